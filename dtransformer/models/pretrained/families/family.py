"""Families of published models as rows of a table: what each says and stores in its own way.

What a row does not say is Llama's.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Mapping

from dtransformer.block_forms import Latent
from dtransformer.errors import InputError
from dtransformer.models import weight_shapes
from dtransformer.models.base import TokenModel
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.pretrained.families.blocks import Blocks
from dtransformer.models.pretrained.families.parts import (
    HEADS,
    Field,
    Part,
    differs,
    epsilon,
    head_dim,
    hidden_act,
    kv_heads,
)
from dtransformer.models.pretrained.families.paths import ATTENTION, EXPERTS, GATED, PRE
from dtransformer.models.pretrained.stored_tensor import StoredTensor

# What changes no result, or is written for all families alike.
_FREE = {
    *("dropout_rate", "attention_dropout_rate", "embedding_dropout_rate", "implementation"),
    *("pad_id", "start_id", "end_id", "vocab_size", "lambda_func"),
    *("trains_head_bias", "trains_padding", "name"),
}


def usual_arguments(network: type[TokenModel], *without: str, **others) -> dict:
    """Return what configs cannot say otherwise, where no part of theirs does: a network's defaults.

    Args:
        network: its class.
        *without: names of arguments that may be any.
        **others: arguments that are others than by default.
    """
    given = inspect.signature(network.__init__).parameters.values()
    usual = {x.name: x.default for x in given if x.default is not x.empty}
    return {x: y for x, y in usual.items() if x not in {*_FREE, *without}} | others


_LLAMA = usual_arguments(
    CausalLM,
    embedding_scale=1.0,
    positions="rotary",
    norm="rms_norm",
    gated=True,
    use_bias=False,
    qkv_bias=False,
)
SIZES = (
    Field("hidden_size", "hidden_size"),
    Field("num_layers", "num_hidden_layers"),
    Field("ffn_hidden_size", "intermediate_size"),
    Field("max_length", "max_position_embeddings"),
    HEADS,
)
LLAMA_PARTS = (
    *SIZES,
    kv_heads(),
    head_dim(),
    epsilon(1e-6),
    Field("attention_dropout_rate", "attention_dropout", 0.0),
    Field("tied_head", "tie_word_embeddings", False),
    hidden_act(),
    Blocks(),
)


def llama_parts_without(*arguments: str) -> tuple[Part, ...]:
    """Return Llama's parts without those of some arguments, of which configs say nothing."""
    return tuple(part for part in LLAMA_PARTS if not set(part.arguments) & set(arguments))


_TABLES = {"model.embed_tokens.weight": "embedding/table"}
_TOP = {"model.norm": "blocks/final_norm", "lm_head": "head"}
# Special tokens of texts: our arguments -> fields of published configs.
TEXT_IDS = {"pad_id": "pad_token_id", "start_id": "bos_token_id", "end_id": "eos_token_id"}
DECODER_IDS = {**TEXT_IDS, "start_id": "decoder_start_token_id"}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models.

    Args:
        architecture: the class in `transformers`, with the head that it was trained with.
        parts: `Part`s that replace Llama's of the same arguments, or come besides.
        fixed: arguments that are always so.
        refused: fields, and the only values that are built.
        ids: what fields of special tokens mean that a config lacks.
        attention, dense, experts, norms: names of tensors within a block, and ours; `dense` are
            those of feed-forward layers, and of what is beside experts. The norms' and `dense` may be
            functions of the arguments.
        stacked: those of tensors that have all experts, kernels as [experts, inputs, outputs]; where
            there are two weights, their outputs take turns.
        block_vectors: those of other vectors of a block, whole.
        router: what the router's kernel is called.
        router_bias: the whole name of its bias.
        is_grouped: whether queries, keys and values of one tensor are by groups of heads.
        is_transposed: whether products are stored as PyTorch's `Linear` has them.
        is_interleaved: whether neighbouring features turn together: theirs are put in our order.
        block, path: what names of a block's tensors, and our paths, begin with; `{}` is its number.
        stacks: arguments that are numbers of blocks, and fields of this class that such blocks have of
            their own.
        tables, top, vectors, rows: names of the tensors outside of blocks, and ours: tables, norms and
            products, and others by their whole names, as [features] or as [1, features].
        base: what `fixed` is besides.
        usual_parts: the parts that `parts` come besides.
        network: the class of the networks.
        special_ids: dict of arguments that are ids of tokens, and the fields that hold them.
        own_padding: whether padding that is the start or end token, too, is none.
        prefix: what names may begin with, or not; `tensors` has them without it.
        heads: what names begin with that have no prefix in any case.
        copies: Names of tensors that repeat the first of `tables`: a tied head, or a table of
            embeddings for one side.
        untied_copies: Tensors of untied models that repeat another one, and its name. `transformers`
            reads each of them.
        position_tables: Ends of names of tables of sinusoidal positions, which are no weights here.
        written_positions: Names of such tables that saved files have.
        ignored: endings of names that hold no weights of the network.
        renamed: dict of endings of names in older files, and what they are now.
        left_out: a function of the arguments that returns what names begin with of tensors that are
            left out, with a notice.
        settled: a function of the arguments and of the names of a file's tensors that returns the
            arguments: it settles what the config leaves open.
    """

    architecture: str
    parts: tuple[Part, ...] = ()
    fixed: Mapping = dataclasses.field(default_factory=dict)
    refused: Mapping = dataclasses.field(default_factory=dict)
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    attention: Mapping[str, tuple] = dataclasses.field(default_factory=lambda: ATTENTION)
    dense: Mapping[str, tuple] | Callable = dataclasses.field(default_factory=lambda: GATED)
    experts: Mapping[str, str] = dataclasses.field(default_factory=lambda: EXPERTS)
    norms: Mapping[str, str] | Callable = dataclasses.field(default_factory=lambda: PRE)
    stacked: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    block_vectors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    router: str = "mlp.gate"
    router_bias: str = "mlp.gate.e_score_correction_bias"
    is_grouped: bool = False
    is_transposed: bool = True
    is_interleaved: bool = False
    block: str = "model.layers.{}."
    path: str = "blocks/block_{}/"
    stacks: Mapping[str, Mapping] = dataclasses.field(default_factory=lambda: {"num_layers": {}})
    tables: Mapping[str, str] = dataclasses.field(default_factory=lambda: _TABLES)
    top: Mapping[str, str] = dataclasses.field(default_factory=lambda: _TOP)
    vectors: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: Mapping[str, str] = dataclasses.field(default_factory=dict)
    base: Mapping = dataclasses.field(default_factory=lambda: _LLAMA)
    usual_parts: tuple[Part, ...] = dataclasses.field(default_factory=lambda: LLAMA_PARTS)
    network: type[TokenModel] = CausalLM
    special_ids: Mapping[str, str] = dataclasses.field(default_factory=lambda: TEXT_IDS)
    own_padding: bool = True
    prefix: str = ""
    heads: tuple[str, ...] = ("lm_head", "score")
    copies: tuple[str, ...] = ("lm_head.weight",)
    untied_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    position_tables: tuple[str, ...] = ()
    written_positions: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: Callable[[dict], tuple[str, ...]] = lambda arguments: ()
    settled: Callable[[dict, Collection[str]], dict] = lambda arguments, names: arguments

    def all_parts(self) -> list[Part]:
        """Return the family's parts, and those of Llama's that they do not replace."""
        own = {name for part in self.parts for name in part.arguments}
        return [*(x for x in self.usual_parts if not own & set(x.arguments)), *self.parts]

    def arguments(self, config: Mapping) -> dict:
        """Return the arguments of a network of a config.

        Raises:
            InputError: the config asks for what is not built.
        """
        # `transformers` lets decoders attend both ways by the former.
        refused = {"is_causal": True} if hasattr(self.network, "generate") else {}
        for field, value in {**refused, **self.refused}.items():
            given = config.get(field)
            if given is not None and given != value:
                raise InputError(
                    f"{field}={json.dumps(given)} is not built for {self.architecture}'s blocks"
                )
        found = {**self.base, **self.fixed, "dropout_rate": 0.0}
        for part in self.all_parts():
            found |= part.read(config)
        return found

    def config(self, arguments: Mapping) -> dict:
        """Return the config of a network of some arguments.

        Raises:
            InputError: the network has what no config of the family says.
        """
        parts = self.all_parts()
        said = {name for part in parts for name in part.arguments} | _FREE
        for name, value in {**self.base, **self.fixed}.items():
            own = _meant(arguments, name)
            if name not in said and own != value:
                raise differs(name, repr(own), repr(value))
        found = dict(self.refused)
        for part in parts:
            found |= part.written(arguments)
        return found

    def tensors(self, arguments: Mapping) -> list[StoredTensor]:
        """Return the tensors of a file of a network of some arguments, without the prefix."""
        shapes = weight_shapes.of_network(self.network, arguments)
        found = [table(name, ours) for name, ours in self.tables.items() if ours in shapes]
        vectors = {**self.vectors, **self.rows}
        for name, ours in self.top.items():
            found += _vectors(name, ours, shapes)
            if f"{ours}/kernel" in shapes:
                found.append(linear(f"{name}.weight", f"{ours}/kernel"))
            if f"{ours}/bias" in shapes.keys() - vectors.values():
                found.append(bias(f"{name}.bias", f"{ours}/bias"))
        for name, ours in vectors.items():
            if ours in shapes:
                found.append(dataclasses.replace(bias(name, ours), is_row=name in self.rows))
        for argument, own in self.stacks.items():
            stack = dataclasses.replace(self, **own)
            for number in range(arguments[argument]):
                found += stack._numbered_block(number, shapes, arguments)
        return found

    @property
    def base_prefix(self) -> str:
        """The first part of names, such as `"bert."`. Files of the class without a head lack it."""
        return next(iter(self.tables)).partition(".")[0] + "."

    def stored_names(self, names: Collection[str]) -> dict[str, str]:
        """Return the names of a file's tensors by the names that `tensors` uses.

        If a file has a bias twice, the head's own is taken, as in `transformers`.
        """
        found = {self.own_name(name): name for name in sorted(names)}
        table, prefix = next(iter(self.tables)), self.base_prefix
        if table.removeprefix(prefix) not in found:
            return found
        return {prefix + name: stored for name, stored in found.items()}

    def own_name(self, name: str) -> str:
        """Return what a tensor of a file is called by `tensors`."""
        name = name.removeprefix(self.prefix)
        for older, newer in self.renamed.items():
            if name.endswith(older):
                return name.removesuffix(older) + newer
        return name

    def file_name(self, name: str) -> str:
        """Return what a tensor of `tensors` is called in the files that are written."""
        return name if name.startswith(self.heads) else self.prefix + name

    def is_spare(self, name: str) -> bool:
        """Return whether a file may have a tensor of that name besides the network's."""
        return name in self.copies or name.endswith(self.ignored + self.position_tables)

    def _numbered_block(self, number, shapes, arguments):
        """Return the tensors of a block by its number."""
        theirs, ours = self.block.format(number), self.path.format(number)
        own = {x.removeprefix(ours): s for x, s in shapes.items() if x.startswith(ours)}
        return [
            dataclasses.replace(
                tensor,
                name=f"{theirs}{tensor.name}",
                weights=tuple(f"{ours}{path}" for path in tensor.weights),
            )
            for tensor in self._block(own, arguments)
        ]

    def _block(self, shapes, arguments):
        """Return the tensors of a block's weights, by their paths within it."""
        has_experts, found = "feed_forward/router/kernel" in shapes, []
        norms, dense = (x(arguments) if callable(x) else x for x in (self.norms, self.dense))
        for name, ours in norms.items():
            found += _vectors(name, ours, shapes)
        found += [bias(name, ours) for name, ours in self.block_vectors.items() if ours in shapes]
        for name, ours in {**self.attention, **dense}.items():
            is_dense = not has_experts or name in self.attention or "/shared_experts/" in ours[0]
            if is_dense and f"{ours[0]}_kernel" in shapes:
                found += self._product(name, ours, shapes, arguments)
        if has_experts:
            found.append(linear(f"{self.router}.weight", "feed_forward/router/kernel"))
            biases = "feed_forward/router/bias", "feed_forward/router/logits_bias"
            found += [bias(self.router_bias, path) for path in biases if path in shapes]
            for name, ours in self.stacked.items():
                found += _stacked(name, ours, shapes)
            for name, ours in self.experts.items():
                path = f"{ours}_kernel"
                for i in range(shapes[path][0]):
                    found.append(linear(f"{name.format(i)}.weight", path, expert=i))
        return found

    def _product(self, name, ours, shapes, arguments):
        kernels = [f"{path}_kernel" for path in ours]
        groups = shapes["attention/key_kernel"][1] if self.is_grouped and len(ours) == 3 else 1
        order, inputs = None, 2 if ours[0].endswith("attention/output") else 1
        if self.is_interleaved and len(ours) == 1:
            order = _order(ours[0], shapes[kernels[0]][-1], arguments)
        found = [StoredTensor(f"{name}.weight", tuple(kernels), self.is_transposed, inputs)]
        if f"{ours[0]}_bias" in shapes:
            found.append(bias(f"{name}.bias", *(f"{path}_bias" for path in ours)))
        return [dataclasses.replace(tensor, order=order, groups=groups) for tensor in found]


def linear(
    name: str, *weights: str, num_inputs: int = 1, expert: int | None = None
) -> StoredTensor:
    """Return a kernel as PyTorch's `Linear` has it: [outputs, inputs]; or that of an expert."""
    return StoredTensor(name, weights, is_transposed=True, num_inputs=num_inputs, expert=expert)


def bias(name: str, *weights: str) -> StoredTensor:
    """Return a tensor [features]: a bias, or what a norm multiplies with."""
    return StoredTensor(name, weights, num_inputs=0)


def table(name: str, weight: str) -> StoredTensor:
    """Return a table of embeddings: [entries, features]."""
    return StoredTensor(name, (weight,))


def _stacked(name, ours, shapes):
    """Return the tensors of all experts: a kernel, and a bias where there is one."""
    found = []
    for kind, ending, inputs in (("kernel", "", 2), ("bias", "_bias", 1)):
        paths = tuple(f"{path}_{kind}" for path in ours)
        if paths[0] in shapes:
            turns = shapes[paths[0]][-1] if len(ours) > 1 else 1
            found.append(
                StoredTensor(
                    f"{name}{ending}", paths, num_inputs=inputs, groups=turns, is_stacked=True
                )
            )
    return found


def _vectors(name, ours, shapes):
    """Return the tensors of a norm that is there, with a shift or without."""
    parts = {"weight": "gamma", "bias": "beta"}.items()
    return [bias(f"{name}.{x}", f"{ours}/{y}") for x, y in parts if f"{ours}/{y}" in shapes]


def _meant(arguments, name):
    """Return an argument, or what None means of it."""
    value = arguments[name]
    if name == "qkv_bias" and value is None:
        return arguments["use_bias"]
    size, heads = arguments["hidden_size"], arguments["num_heads"]
    epsilon = {"layer_norm": 1e-5, "rms_norm": 1e-6}.get(arguments["norm"])
    usual = {"norm_placement": "pre", "num_kv_heads": heads, "head_dim": size // heads}
    usual["norm_epsilon"] = epsilon
    return None if name in usual and value == usual[name] else value


def _order(path, features, arguments):
    """Return our order of a product's features: of the pairs that turn first all first ones."""
    latent = Latent.of(arguments.get("latent"))
    if latent is not None:
        first = features - latent.rotary_dim
        others, turning = range(first), _evens_first(range(first, features))
        of_path = {"attention/latent": (*others, *turning)}
        of_path |= dict.fromkeys(("attention/query", "attention/query_up"), (*turning, *others))
        return of_path.get(path)
    if path not in ("attention/query", "attention/key"):
        return None
    turning = int(features * arguments["rotary_fraction"])
    return (*_evens_first(range(turning)), *range(turning, features))


def _evens_first(places):
    return (*places[::2], *places[1::2])
