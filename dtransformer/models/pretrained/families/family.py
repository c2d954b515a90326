"""Declarative description of a model family of `transformers`.

A family has a table of config keys (see `keys.py`) and a table of weight names (see
`weights.py`). docs/new-family.md explains how to add a family.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping

from dtransformer.errors import InputError
from dtransformer.models import weight_shapes
from dtransformer.models.base import TokenModel
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.masked_lm import MaskedLM
from dtransformer.models.pretrained.families.keys import Row, unsupported_argument
from dtransformer.models.pretrained.families.weights import (
    Table,
    stored_tensors,
    with_rotary_order,
)
from dtransformer.models.pretrained.stored_tensor import StoredTensor
from dtransformer.transformer_config import get_arguments

# Arguments that change no result, or that are saved in the same way for all families.
_UNCHECKED_ARGUMENTS = {
    *("dropout_rate", "attention_dropout_rate", "embedding_dropout_rate", "implementation"),
    *("pad_id", "start_id", "end_id", "vocab_size", "lambda_func"),
    *("trains_head_bias", "trains_padding", "name"),
}
# Prefixes of heads, whose names never get the prefix of a family.
_HEADS = "lm_head", "score", "classifier", "final_logits_bias"
# Network arguments of special tokens -> config keys.
_TEXT_IDS = {"pad_id": "pad_token_id", "start_id": "bos_token_id", "end_id": "eos_token_id"}
_SPECIAL_IDS = {
    CausalLM: _TEXT_IDS,
    MaskedLM: {"pad_id": "pad_token_id"},
    EncoderDecoderLM: {**_TEXT_IDS, "start_id": "decoder_start_token_id"},
}


def _default_arguments(network, *without, **overrides):
    """Return a network's default arguments, except the given names, with overrides."""
    defaults = get_arguments(network.network_class)
    excluded = {*_UNCHECKED_ARGUMENTS, *without}
    return {name: x for name, x in defaults.items() if name not in excluded} | overrides


# Default arguments of networks. The arguments of decoders describe Llama.
_DEFAULT_ARGUMENTS = {
    CausalLM: _default_arguments(
        CausalLM,
        embedding_scale=1.0,
        positions="rotary",
        norm="rms_norm",
        gated=True,
        use_bias=False,
        qkv_bias=False,
    ),
    MaskedLM: _default_arguments(MaskedLM, num_token_types=0),
    EncoderDecoderLM: _default_arguments(
        EncoderDecoderLM, "head_bias", "max_length", "relative_ranges", "relative_max_distance"
    ),
}


@dataclasses.dataclass(frozen=True)
class FileNames:
    """Tensors in files that differ from a family's table of weight names.

    Args:
        prefix: Optional prefix of names in files. The table omits it.
        renamed: Dict from suffixes of names in older files to the current suffixes.
        ignored: Tuple of suffixes of names that are not weights of the network.
        skipped: Tuple of prefixes of names that are skipped with a warning. They may contain
            network arguments, such as `{num_layers}`.
        table_copies: Tuple of names that repeat the embedding table.
        untied_copies: Dict from names of tensors that repeat another tensor in untied models
            to the name of that tensor. `transformers` reads both.
        position_tables: Tuple of suffixes of names of sinusoidal position tables. They are
            not weights in this library.
        saved_position_tables: Tuple of names of such tables in saved files.
        constants: Dict from names of scalars with the same value in all models to this value.
            `{i}` is the block index.
    """

    prefix: str = ""
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    skipped: tuple[str, ...] = ()
    table_copies: tuple[str, ...] = ()
    untied_copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    position_tables: tuple[str, ...] = ()
    saved_position_tables: tuple[str, ...] = ()
    constants: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Family:
    """Model family of `transformers`: its config keys and weight names.

    Args:
        architecture: Name of the class in `transformers`, including the pretraining head.
        keys: Table of config keys, a tuple of `Row`s.
        weights: Table of weight names.
        fixed: Dict of network arguments that are the same for the whole family.
        supported_values: Dict from config keys to their only supported value.
        ids: Dict from config keys of special tokens to their defaults.
        is_interleaved: Boolean. Whether rotary positions rotate pairs of neighboring
            features. Loading reorders them to the order of this library.
        network: Class of the networks.
        files: `FileNames`: exceptions from the table of weight names.
        variants: Dict from arguments to tables of additional weight names, by the argument's
            value. The table `"otherwise"` is for all other values.
    """

    architecture: str
    keys: tuple[Row, ...]
    weights: Table
    fixed: Mapping = dataclasses.field(default_factory=dict)
    supported_values: Mapping = dataclasses.field(default_factory=dict)
    ids: Mapping[str, int] = dataclasses.field(default_factory=dict)
    is_interleaved: bool = False
    network: type[TokenModel] = CausalLM
    files: FileNames = FileNames()
    variants: Mapping[str, Mapping] = dataclasses.field(default_factory=dict)

    def from_hf(self, config: Mapping) -> dict:
        """Return the network arguments for a config.

        Raises:
            InputError: If the config needs an unsupported feature.
        """
        # `is_causal` lets decoders in `transformers` attend in both directions.
        supported_values = {"is_causal": True} if hasattr(self.network, "generate") else {}
        for key, supported in {**supported_values, **self.supported_values}.items():
            value = config.get(key)
            if value is not None and value != supported:
                raise InputError(
                    f"`{key}={json.dumps(value)}` is not supported for {self.architecture}."
                )
        arguments = {**self._fixed_arguments, "dropout_rate": 0.0}
        for row in self.keys:
            arguments |= row.from_hf(config)
        return arguments

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config for a network's arguments.

        Raises:
            InputError: If no config of the family can represent the network.
        """
        covered = {name for row in self.keys for name in row.arguments} | _UNCHECKED_ARGUMENTS
        for name, expected in self._fixed_arguments.items():
            value = _canonical_argument(arguments, name)
            if name not in covered and value != expected:
                raise unsupported_argument(name, repr(value), repr(expected))
        fields = dict(self.supported_values)
        for row in self.keys:
            fields |= row.to_hf(arguments)
        return fields

    @property
    def _fixed_arguments(self):
        return {**_DEFAULT_ARGUMENTS[self.network], **self.fixed}

    @property
    def special_ids(self) -> Mapping[str, str]:
        """Dict from network arguments that are token ids to config keys."""
        return _SPECIAL_IDS[self.network]

    def adapt_to_file(self, arguments: dict, names: Collection[str]) -> dict:
        """Return the final network arguments, for facts that the config does not contain.

        Args:
            arguments: Dict of the arguments from the config.
            names: Names of the tensors in the file.
        """
        return arguments

    def weight_names(self, arguments: Mapping) -> Table:
        """Return the table of weight names for a network's arguments."""
        table = dict(self.weights)
        for argument, tables in self.variants.items():
            table |= tables.get(arguments[argument], tables["otherwise"])
        return table

    def tensors(self, arguments: Mapping) -> list[StoredTensor]:
        """Return the `StoredTensor`s in a file of a network, with names without `prefix`."""
        shapes = weight_shapes.network_shapes(self.network, arguments)
        tensors = stored_tensors(self.weight_names(arguments), shapes)
        if not self.is_interleaved:
            return tensors
        return [with_rotary_order(tensor, shapes, arguments) for tensor in tensors]

    @property
    def embedding_table(self) -> str:
        """Name of the embedding table."""
        return next(iter(self.weights))

    @property
    def head_name(self) -> str:
        """Name of the head's kernel."""
        heads = (("head",), ("head/logits",))
        return next(f"{name}.weight" for name, x in self.weights.items() if x.paths in heads)

    @property
    def copies(self) -> set[str]:
        """Names of tensors that repeat the embedding table: a tied head, or other tables."""
        return {self.head_name, *self.files.table_copies}

    @property
    def base_prefix(self) -> str:
        """First part of weight names, such as `"bert."`. Files of classes without a head omit it."""
        return self.embedding_table.partition(".")[0] + "."

    def stored_names(self, names: Collection[str]) -> dict[str, str]:
        """Return a dict from the names that `tensors` uses to the names in a file.

        If a file has a bias twice, the head's copy is used, as in `transformers`.
        """
        result = {self.canonical_name(name): name for name in sorted(names)}
        prefix = self.base_prefix
        if self.embedding_table.removeprefix(prefix) not in result:
            return result
        return {prefix + name: stored for name, stored in result.items()}

    def canonical_name(self, name: str) -> str:
        """Return the name that `tensors` uses for a tensor in a file."""
        name = name.removeprefix(self.files.prefix)
        for older, newer in self.files.renamed.items():
            if name.endswith(older):
                return name.removesuffix(older) + newer
        return name

    def file_name(self, name: str) -> str:
        """Return the name in saved files for a tensor of `tensors`."""
        return name if name.startswith(_HEADS) else self.files.prefix + name

    def constants(self, arguments: Mapping) -> dict[str, float]:
        """Return a dict from names of scalars with a fixed value to this value."""
        constants = self.files.constants.items()
        num_layers = arguments.get("num_layers", 0)
        return {name.replace("{i}", str(i)): x for name, x in constants for i in range(num_layers)}

    def is_optional(self, name: str) -> bool:
        """Return whether a file may contain a tensor that is not a weight of the network."""
        suffixes = self.files.ignored + self.files.position_tables
        return name in self.copies or name.endswith(suffixes)


class BartFamily(Family):
    """Family with BART's head bias, which files of models without a head lack."""

    def adapt_to_file(self, arguments: dict, names: Collection[str]) -> dict:
        """Return the network arguments, without the head's bias if the file has none."""
        return {**arguments, "head_bias": "final_logits_bias" in names}


class T5Family(Family):
    """Family whose files may have a head although the config ties it to the table."""

    def adapt_to_file(self, arguments: dict, names: Collection[str]) -> dict:
        """Untie the head if a T5 1.1 file has one. Newer T5 1.1 configs wrongly tie it."""
        has_head = not arguments["scales_output"] and self.head_name in names
        return {**arguments, "tied_head": arguments["tied_head"] and not has_head}


def _canonical_argument(arguments, name):
    """Return an argument. Explicit values that equal the meaning of `None` become `None`."""
    value = arguments[name]
    if name == "qkv_bias" and value is None:
        return arguments["use_bias"]
    size = arguments["hidden_size"]
    heads = arguments["num_heads"]
    default_epsilon = {"layer_norm": 1e-5, "rms_norm": 1e-6}.get(arguments["norm"])
    defaults = {"norm_placement": "pre", "num_kv_heads": heads, "head_dim": size // heads}
    defaults["norm_epsilon"] = default_epsilon
    return None if name in defaults and value == defaults[name] else value
