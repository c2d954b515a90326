"""Base of families of published models, and of their files."""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping

import numpy as np

from dtransformer.errors import InputError, shown
from dtransformer.models.base import TokenModel
from dtransformer.models.pretrained.stored_tensor import StoredTensor

# Names of activations in published configs -> ours.
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
# Special tokens of texts: our arguments -> fields of published configs.
TEXT_IDS = {"pad_id": "pad_token_id", "start_id": "bos_token_id", "end_id": "eos_token_id"}
DECODER_IDS = {**TEXT_IDS, "start_id": "decoder_start_token_id"}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models.

    Args:
        architecture: the class in `transformers`, with the head that it was trained with.
        network: the class of its networks.
        arguments: a function of a published config that returns arguments of the network.
        config: a function of a network's arguments that returns a published config.
        tensors: a function of a network's arguments that returns the `StoredTensor`s of a file.
        special_ids: dict of arguments that are ids of tokens, and the fields that hold them.
        usual_ids: dict of those fields and the ids that a config means which lacks them.
        own_padding: whether padding that is the start or end token, too, is none.
        prefix: what names may begin with, or not; `tensors` has them without it.
        heads: what names begin with that have no prefix in any case.
        copies: names of tensors that hold once more what another one does.
        ignored: endings of names that hold no weights of the network.
        renamed: dict of endings of names in older files, and what they are now.
        left_out: a function of the arguments that returns what names begin with of tensors that are
            left out, with a notice.
        computed: a function of the arguments that returns tensors by their names in files, which no
            weights are, and files have.
        settled: a function of the arguments and of the names of a file's tensors that returns the
            arguments: it settles what the config leaves open.
    """

    architecture: str
    network: type[TokenModel]
    arguments: Callable[[dict], dict]
    config: Callable[[dict], dict]
    tensors: Callable[[dict], list[StoredTensor]]
    special_ids: Mapping[str, str] = dataclasses.field(default_factory=lambda: TEXT_IDS)
    usual_ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    own_padding: bool = True
    prefix: str = ""
    heads: tuple[str, ...] = ("lm_head", "score")
    copies: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: Callable[[dict], tuple[str, ...]] = lambda arguments: ()
    computed: Callable[[dict], dict[str, np.ndarray]] = lambda arguments: {}
    settled: Callable[[dict, Collection[str]], dict] = lambda arguments, names: arguments

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
        return name in self.copies or (bool(self.ignored) and name.endswith(self.ignored))


def as_class(family: Family, architecture: str) -> Family:
    """Return a family whose files and configs are another one's, but for the class."""
    return dataclasses.replace(family, architecture=architecture)


def linear(
    name: str, *weights: str, num_inputs: int = 1, expert: int | None = None
) -> StoredTensor:
    """Return a kernel as PyTorch's `Linear` has it: [outputs, inputs]; or that of an expert."""
    return StoredTensor(name, weights, is_transposed=True, num_inputs=num_inputs, expert=expert)


def bias(name: str, *weights: str) -> StoredTensor:
    """Return a tensor [features]: a bias, or what a norm multiplies with."""
    return StoredTensor(name, weights, num_inputs=0)


def dense(theirs: str, ours: str, num_inputs: int = 1) -> list[StoredTensor]:
    """Return the kernel and the bias of a dense layer; `ours` ends in `_` or `/`."""
    return [
        linear(f"{theirs}.weight", f"{ours}kernel", num_inputs=num_inputs),
        bias(f"{theirs}.bias", f"{ours}bias"),
    ]


def norm(theirs: str, ours: str) -> list[StoredTensor]:
    """Return the gain and the shift of a norm."""
    return [bias(f"{theirs}.weight", f"{ours}/gamma"), bias(f"{theirs}.bias", f"{ours}/beta")]


def table(name: str, weight: str) -> StoredTensor:
    """Return a table of embeddings: [entries, features]."""
    return StoredTensor(name, (weight,))


def of_blocks(number: int, block: Callable[[int], list[StoredTensor]]) -> list[StoredTensor]:
    """Return the tensors of so many blocks, of a function of a block's number."""
    return [tensor for i in range(number) for tensor in block(i)]


def activation(name: str) -> str:
    """Return our name of a published config's activation.

    Raises:
        InputError: it has none.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise InputError(f"the activation {shown(name)} is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def published_activation(arguments: dict) -> str:
    """Return what published configs call a network's activation.

    Raises:
        InputError: it has no name there.
    """
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    name = arguments["hidden_act"]
    if name not in theirs:
        raise InputError(f"hidden_act={name!r} has no name in published configs")
    return theirs[name]


def require(arguments: dict, **wanted) -> None:
    """Check that a network has what its family's config cannot say otherwise.

    Raises:
        InputError: names the argument that differs.
    """
    heads = arguments["num_heads"]
    usual = {
        "qkv_bias": arguments.get("use_bias"),
        "num_kv_heads": heads,
        "head_dim": arguments["hidden_size"] // heads,
        "norm_epsilon": {"layer_norm": 1e-5, "rms_norm": 1e-6}.get(arguments.get("norm")),
    }
    for name, value in wanted.items():
        own = usual.get(name) if arguments[name] is None else arguments[name]
        if own != value:
            raise InputError(
                f"the network has {name}={own!r}, the published family {value!r}: it cannot be "
                "saved as one of that family"
            )


def read(config: dict, fields: Mapping[str, str], **usual) -> dict:
    """Return arguments of a network that are fields of a published config.

    Args:
        config: its fields.
        fields: dict of the arguments' names and the fields'.
        **usual: arguments where the config says nothing.

    Raises:
        KeyError: a field is lacking.
    """
    given = {
        ours: config.get(theirs) if ours in usual else config[theirs]
        for ours, theirs in fields.items()
    }
    return {ours: usual.get(ours) if value is None else value for ours, value in given.items()}


def written(arguments: dict, fields: Mapping[str, str]) -> dict:
    """Return fields of a published config that are arguments of a network: the opposite of `read`."""
    return {theirs: arguments[ours] for ours, theirs in fields.items()}


def refuse(config: dict, name: str, **usual) -> None:
    """Check that a published config asks for nothing that is not built.

    Args:
        config: its fields.
        name: the family's.
        **usual: the fields' values where nothing is said, which are all that is built.

    Raises:
        InputError: names the field that differs.
    """
    for field, value in usual.items():
        given = config.get(field)
        if given is not None and given != value:
            message = json.dumps(given)
            raise InputError(f"{field}={message} is not built for {name}'s blocks")
