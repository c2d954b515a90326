"""Declarative description of a model family of `transformers`.

Every default of `Family` describes Llama. Other families state only the differences.
"""

import dataclasses
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
from dtransformer.models.pretrained.stored_tensor import StoredTensor, bias, linear, table
from dtransformer.transformer_config import arguments_of

# Arguments that change no result, or that are saved in the same way for all families.
_UNCHECKED_ARGUMENTS = {
    *("dropout_rate", "attention_dropout_rate", "embedding_dropout_rate", "implementation"),
    *("pad_id", "start_id", "end_id", "vocab_size", "lambda_func"),
    *("trains_head_bias", "trains_padding", "name"),
}


def default_arguments(network: type[TokenModel], *without: str, **overrides) -> dict:
    """Return a network's default arguments, as the fixed arguments of a family.

    Config keys of the family may override them.

    Args:
        network: Class of the network.
        *without: Names of arguments that may have any value.
        **overrides: Arguments whose values differ from the network's defaults.
    """
    defaults = arguments_of(network.network_class)
    return {
        x: y for x, y in defaults.items() if x not in {*_UNCHECKED_ARGUMENTS, *without}
    } | overrides


_LLAMA = default_arguments(
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
    """Return Llama's parts, without parts that set any of the given arguments."""
    return tuple(part for part in LLAMA_PARTS if not set(part.arguments) & set(arguments))


_TABLES = {"model.embed_tokens.weight": "embedding/table"}
_TOP = {"model.norm": "blocks/final_norm", "lm_head": "head"}
# Network arguments of special tokens -> config keys.
TEXT_IDS = {"pad_id": "pad_token_id", "start_id": "bos_token_id", "end_id": "eos_token_id"}
DECODER_IDS = {**TEXT_IDS, "start_id": "decoder_start_token_id"}


@dataclasses.dataclass(frozen=True)
class Family:
    """Model family of `transformers`: its config keys, weight names and supported features.

    Dicts of weight names map names in `transformers` to paths in this library.

    Args:
        architecture: Name of the class in `transformers`, including the pretraining head.
        parts: Tuple of `Part`s. They are added to `default_parts` and replace its parts
            for the same arguments.
        fixed: Dict of network arguments that are the same for the whole family.
        supported_values: Dict from config keys to their only supported value.
        ids: Dict from config keys of special tokens to their defaults.
        attention: Dict from names of attention products in a block to tuples of paths. A
            tuple of several paths is a fused tensor.
        dense: Like `attention`, for feed-forward layers and shared experts. It may be a
            function of the network's arguments that returns the dict.
        experts: Dict from names of expert kernels in a block to paths. `{}` is the index.
        norms: Dict from names of norms in a block to paths, or a function of the network's
            arguments that returns it.
        stacked: Dict from names of tensors with all experts, [experts, inputs, outputs], to
            tuples of paths. The outputs of two weights are interleaved.
        block_vectors: Dict from full names of other vectors in a block to paths.
        router: Name of the router's kernel, without `.weight`.
        router_bias: Full name of the router's bias.
        is_grouped: Boolean. Whether a fused tensor of queries, keys and values stores one
            group of heads after another.
        is_transposed: Boolean. Whether kernels are [outputs, inputs], as in PyTorch.
        is_interleaved: Boolean. Whether rotary positions rotate pairs of neighboring
            features. Loading reorders them to the order of this library.
        block, path: Prefixes of a block's weight names, in `transformers` and here. `{}` is
            the block index.
        stacks: Dict from arguments with a number of blocks to dicts of `Family` fields that
            differ in these blocks.
        tables: Dict from names of embedding tables to paths.
        top: Dict from names of norms and products outside of blocks to paths.
        vectors: Dict from full names of other vectors [features] to paths.
        rows: Dict from full names of other vectors [1, features] to paths.
        base: Dict of network arguments. `fixed` overrides it.
        default_parts: Tuple of default `Part`s.
        network: Class of the networks.
        special_ids: Dict from network arguments that are token ids to config keys.
        needs_unique_padding: Boolean. Whether to ignore a start or end token as padding.
        prefix: Optional prefix of weight names in files. `tensors` omits it.
        heads: Tuple of prefixes of names that never have `prefix`.
        copies: Tuple of names of tensors that repeat the first of `tables`: a tied head, or
            one side's embedding table.
        untied_copies: Dict from names of tensors that repeat another tensor in untied models
            to the name of that tensor. `transformers` reads both.
        position_tables: Tuple of suffixes of names of sinusoidal position tables. They are
            not weights in this library.
        written_positions: Tuple of names of such tables in saved files.
        ignored: Tuple of suffixes of names that are not weights of the network.
        renamed: Dict from suffixes of names in older files to the current suffixes.
        skipped_prefixes: Function from the network's arguments to a tuple of prefixes of tensor
            names that are skipped with a warning.
        finalize: Function from the network's arguments and the tensor names in a file to the
            final arguments, for facts that the config does not contain.
    """

    architecture: str
    parts: tuple[Part, ...] = ()
    fixed: Mapping = dataclasses.field(default_factory=dict)
    supported_values: Mapping = dataclasses.field(default_factory=dict)
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
    default_parts: tuple[Part, ...] = dataclasses.field(default_factory=lambda: LLAMA_PARTS)
    network: type[TokenModel] = CausalLM
    special_ids: Mapping[str, str] = dataclasses.field(default_factory=lambda: TEXT_IDS)
    needs_unique_padding: bool = True
    prefix: str = ""
    heads: tuple[str, ...] = ("lm_head", "score")
    copies: tuple[str, ...] = ("lm_head.weight",)
    untied_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    position_tables: tuple[str, ...] = ()
    written_positions: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skipped_prefixes: Callable[[dict], tuple[str, ...]] = lambda arguments: ()
    finalize: Callable[[dict, Collection[str]], dict] = lambda arguments, names: arguments

    def all_parts(self) -> list[Part]:
        """Return the parts of the family, including the default parts that it does not replace."""
        overridden = {name for part in self.parts for name in part.arguments}
        return [*(x for x in self.default_parts if not overridden & set(x.arguments)), *self.parts]

    def arguments(self, config: Mapping) -> dict:
        """Return the network arguments for a config.

        Raises:
            InputError: If the config needs an unsupported feature.
        """
        # `is_causal` lets decoders in `transformers` attend in both directions.
        supported_values = {"is_causal": True} if hasattr(self.network, "generate") else {}
        for field, supported in {**supported_values, **self.supported_values}.items():
            value = config.get(field)
            if value is not None and value != supported:
                raise InputError(
                    f"`{field}={json.dumps(value)}` is not supported for {self.architecture}."
                )
        arguments = {**self.base, **self.fixed, "dropout_rate": 0.0}
        for part in self.all_parts():
            arguments |= part.from_hf(config)
        return arguments

    def config(self, arguments: Mapping) -> dict:
        """Return the config for a network's arguments.

        Raises:
            InputError: If no config of the family can represent the network.
        """
        parts = self.all_parts()
        covered = {name for part in parts for name in part.arguments} | _UNCHECKED_ARGUMENTS
        for name, expected in {**self.base, **self.fixed}.items():
            value = _canonical_argument(arguments, name)
            if name not in covered and value != expected:
                raise differs(name, repr(value), repr(expected))
        fields = dict(self.supported_values)
        for part in parts:
            fields |= part.to_hf(arguments)
        return fields

    def tensors(self, arguments: Mapping) -> list[StoredTensor]:
        """Return the `StoredTensor`s in a file of a network, with names without `prefix`."""
        shapes = weight_shapes.of_network(self.network, arguments)
        tensors = [table(name, path) for name, path in self.tables.items() if path in shapes]
        vectors = {**self.vectors, **self.rows}
        for name, path in self.top.items():
            tensors += _vectors(name, path, shapes)
            if f"{path}/kernel" in shapes:
                tensors.append(linear(f"{name}.weight", f"{path}/kernel"))
            if f"{path}/bias" in shapes.keys() - vectors.values():
                tensors.append(bias(f"{name}.bias", f"{path}/bias"))
        for name, path in vectors.items():
            if path in shapes:
                tensors.append(dataclasses.replace(bias(name, path), is_row=name in self.rows))
        for argument, differences in self.stacks.items():
            stack = dataclasses.replace(self, **differences)
            for index in range(arguments[argument]):
                tensors += stack._numbered_block(index, shapes, arguments)
        return tensors

    @property
    def base_prefix(self) -> str:
        """First part of weight names, such as `"bert."`. Files of classes without a head omit it."""
        return next(iter(self.tables)).partition(".")[0] + "."

    def stored_names(self, names: Collection[str]) -> dict[str, str]:
        """Return a dict from the names that `tensors` uses to the names in a file.

        If a file has a bias twice, the head's copy is used, as in `transformers`.
        """
        result = {self.canonical_name(name): name for name in sorted(names)}
        table = next(iter(self.tables))
        prefix = self.base_prefix
        if table.removeprefix(prefix) not in result:
            return result
        return {prefix + name: stored for name, stored in result.items()}

    def canonical_name(self, name: str) -> str:
        """Return the name that `tensors` uses for a tensor in a file."""
        name = name.removeprefix(self.prefix)
        for older, newer in self.renamed.items():
            if name.endswith(older):
                return name.removesuffix(older) + newer
        return name

    def file_name(self, name: str) -> str:
        """Return the name in saved files for a tensor of `tensors`."""
        return name if name.startswith(self.heads) else self.prefix + name

    def is_optional(self, name: str) -> bool:
        """Return whether a file may contain a tensor that is not a weight of the network."""
        return name in self.copies or name.endswith(self.ignored + self.position_tables)

    def _numbered_block(self, index, shapes, arguments):
        """Return the tensors of the block with an index."""
        hf_prefix = self.block.format(index)
        prefix = self.path.format(index)
        block_shapes = {
            x.removeprefix(prefix): s for x, s in shapes.items() if x.startswith(prefix)
        }
        return [
            dataclasses.replace(
                tensor,
                name=f"{hf_prefix}{tensor.name}",
                weights=tuple(f"{prefix}{path}" for path in tensor.weights),
            )
            for tensor in self._block(block_shapes, arguments)
        ]

    def _block(self, shapes, arguments):
        """Return the tensors of a block, named relative to the block."""
        has_experts = "feed_forward/router/kernel" in shapes
        tensors = []
        norms, dense = (x(arguments) if callable(x) else x for x in (self.norms, self.dense))
        for name, path in norms.items():
            tensors += _vectors(name, path, shapes)
        tensors += [bias(name, path) for name, path in self.block_vectors.items() if path in shapes]
        for name, weight_paths in {**self.attention, **dense}.items():
            is_dense = (
                not has_experts or name in self.attention or "/shared_experts/" in weight_paths[0]
            )
            if is_dense and f"{weight_paths[0]}_kernel" in shapes:
                tensors += self._product(name, weight_paths, shapes, arguments)
        if has_experts:
            tensors.append(linear(f"{self.router}.weight", "feed_forward/router/kernel"))
            biases = "feed_forward/router/bias", "feed_forward/router/logits_bias"
            tensors += [bias(self.router_bias, path) for path in biases if path in shapes]
            for name, weight_paths in self.stacked.items():
                tensors += _stacked(name, weight_paths, shapes)
            for name, expert_path in self.experts.items():
                path = f"{expert_path}_kernel"
                for i in range(shapes[path][0]):
                    tensors.append(linear(f"{name.format(i)}.weight", path, expert=i))
        return tensors

    def _product(self, name, weight_paths, shapes, arguments):
        kernels = [f"{path}_kernel" for path in weight_paths]
        groups = (
            shapes["attention/key_kernel"][1] if self.is_grouped and len(weight_paths) == 3 else 1
        )
        order = None
        inputs = 2 if weight_paths[0].endswith("attention/output") else 1
        if self.is_interleaved and len(weight_paths) == 1:
            order = _interleaved_order(weight_paths[0], shapes[kernels[0]][-1], arguments)
        tensors = [StoredTensor(f"{name}.weight", tuple(kernels), self.is_transposed, inputs)]
        if f"{weight_paths[0]}_bias" in shapes:
            tensors.append(bias(f"{name}.bias", *(f"{path}_bias" for path in weight_paths)))
        return [dataclasses.replace(tensor, order=order, groups=groups) for tensor in tensors]


def _stacked(name, weight_paths, shapes):
    """Return the tensors with the kernels, and biases if any, of all experts."""
    tensors = []
    for kind, ending, inputs in (("kernel", "", 2), ("bias", "_bias", 1)):
        paths = tuple(f"{path}_{kind}" for path in weight_paths)
        if paths[0] in shapes:
            num_groups = shapes[paths[0]][-1] if len(weight_paths) > 1 else 1
            tensors.append(
                StoredTensor(
                    f"{name}{ending}", paths, num_inputs=inputs, groups=num_groups, is_stacked=True
                )
            )
    return tensors


def _vectors(name, path, shapes):
    """Return the tensors of a norm: its scale and its shift, as far as the network has them."""
    suffixes = {"weight": "gamma", "bias": "beta"}.items()
    return [bias(f"{name}.{x}", f"{path}/{y}") for x, y in suffixes if f"{path}/{y}" in shapes]


def _canonical_argument(arguments, name):
    """Return an argument. Explicit values that equal the meaning of `None` become `None`."""
    value = arguments[name]
    if name == "qkv_bias" and value is None:
        return arguments["use_bias"]
    size = arguments["hidden_size"]
    heads = arguments["num_heads"]
    epsilon = {"layer_norm": 1e-5, "rms_norm": 1e-6}.get(arguments["norm"])
    defaults = {"norm_placement": "pre", "num_kv_heads": heads, "head_dim": size // heads}
    defaults["norm_epsilon"] = epsilon
    return None if name in defaults and value == defaults[name] else value


def _interleaved_order(path, features, arguments):
    """Return the feature order of a product with interleaved rotary pairs, or `None`.

    This library stores the first features of all pairs, then the second features.
    """
    latent = Latent.of(arguments.get("latent"))
    if latent is not None:
        num_plain = features - latent.rotary_dim
        plain = range(num_plain)
        rotated = _evens_first(range(num_plain, features))
        orders = {"attention/latent": (*plain, *rotated)}
        orders |= dict.fromkeys(("attention/query", "attention/query_up"), (*rotated, *plain))
        return orders.get(path)
    if path not in ("attention/query", "attention/key"):
        return None
    rotated = int(features * arguments["rotary_fraction"])
    return (*_evens_first(range(rotated)), *range(rotated, features))


def _evens_first(indices):
    return (*indices[::2], *indices[1::2])
