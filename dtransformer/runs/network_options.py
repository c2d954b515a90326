"""Sections `model` of run configs. Their keys are the fields of `TransformerConfig`."""

import re
from typing import Annotated, Literal

import pydantic
from pydantic import BeforeValidator, Field

from dtransformer.errors import hint_members, hint_types
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.runs.descriptions import field_descriptions
from dtransformer.runs.nested_options import make_dataclass
from dtransformer.runs.value_types import Name, Path, Positive, Rate, Size, run_options
from dtransformer.transformer_config import (
    DECODER,
    ENCODER,
    FIELDS,
    GROUPS,
    PAIR,
    POSITIONS,
    TRANSLATION,
    TransformerConfig,
)

# Fields that the task or the tokenizer sets, fields without a form in YAML, and fields that only
# published weights need.
_NOT_KEYS = {
    *("vocab_size", "source_vocab_size", "pad_id", "start_id", "end_id", "prefix"),
    *("max_source_length", "next_sentence", "num_token_types"),
    *("latent", "rotary_scaling", "block_pattern"),
    *("position_offset", "positions_after_padding", "embedding_norm", "trains_padding"),
    *("trains_head_bias", "scales_output", "qk_norm_epsilon", "qk_norm_after_rotary"),
}
# Upper bounds keep derived numbers finite; `runs.needs` checks memory.
_MAX_BLOCKS = 200
_MAX_LENGTH = 10**9
_MAX_SIZE = 2**20
_BOUNDS = {
    **dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers", "moe_every"), _MAX_BLOCKS),
    **dict.fromkeys(("max_length", "window"), _MAX_LENGTH),
}
_TYPE = r"^(Integer|Boolean|Float)\b.*?\. "
_DOCUMENTED = {
    name: text
    for kind in (TransformerConfig, *GROUPS.values())
    for name, text in field_descriptions(kind).items()
}

Experts = Annotated[
    pydantic.InstanceOf[MoEConfig] | None, BeforeValidator(make_dataclass(MoEConfig))
]


@run_options
class AdapterOptions:
    """Low-rank adapters, trained instead of the model's weights."""

    rank: Size = 8  # Rank of the factors
    alpha: Positive = 16.0  # Scale; the product of the factors is multiplied by alpha / rank
    targets: Name | list[Name] = "*attention/(query|value)_kernel"  # Path patterns of kernels
    kind: Literal["lora", "dora"] = "lora"  # lora or dora, which also trains magnitudes
    dropout: Rate = 0.0  # Dropout of the factors' inputs
    rslora: bool = False  # Use alpha / √rank instead of alpha / rank
    dtype: Literal["float32", "bfloat16"] = "float32"  # Type of the factors
    base_dtype: Literal["nf4", "int8"] | None = None  # Format of frozen kernels (QLoRA)
    base_targets: Name | list[Name] = "*_kernel"  # Path patterns of kernels in base_dtype


Adapters = Annotated[
    pydantic.InstanceOf[AdapterOptions] | None, BeforeValidator(make_dataclass(AdapterOptions))
]


@run_options
class StartOptions:
    """Published weights, a preset or another run to start from, and the weights to train."""

    from_: Path | None = None  # Published folder or run folder
    preset: Name | None = None  # Published size, such as llama3_8b, with random weights
    adapters: Adapters = None  # Low-rank adapters (rank, alpha, …); freezes all other weights
    freeze: Name | list[Name] | None = None  # Path patterns of weights to freeze


def _key_type(field, network):
    """Return the type of the key for a field of `TransformerConfig`."""
    if field.name == "moe_config":
        return Experts
    if field.name == "positions" and network is not None:
        return Literal[POSITIONS[network]]
    hint = hint_members(field.hint)[0]
    if hint is bool:
        return bool
    kind = hint_types(hint)[:1]
    if kind == (int,):
        return Annotated[hint, Field(le=_BOUNDS.get(field.name, _MAX_SIZE))]
    return Annotated[hint, Field(le=1e9)] if kind == (float,) else Name


def _key(field, network, defaults):
    """Return the type and the default of a key. Without a network the default is null."""
    default = None
    if network is not None:
        default = defaults.get(field.name, field.default(network))
    kind = _key_type(field, network)
    if default is None:
        kind = kind | None
    text = re.sub(_TYPE, "", _DOCUMENTED[field.name]).partition(". ")[0].rstrip(".")
    text = re.sub('"?`"?', "", text)
    if field.name == "positions" and network is not None:
        text = f"One of {', '.join(POSITIONS[network])}"
    return Annotated[kind, Field(description=text)], default


def _section(name, summary, networks, bases=(), network=None, without=(), **defaults):
    """Return the class of a section with the fields of `TransformerConfig` for some networks.

    Args:
        name: Name of the class.
        summary: Its docstring.
        networks: Names of the networks.
        bases: Base classes.
        network: Network whose defaults the keys have. `None` for keys that are null.
        without: Names of fields that are not keys.
        **defaults: Defaults that replace the defaults of the network.
    """
    keys = {
        field.name: _key(field, network, defaults)
        for field in FIELDS.values()
        if field.name not in _NOT_KEYS.union(without) and not networks.isdisjoint(field.networks)
    }
    namespace = {
        "__doc__": summary,
        "__module__": __name__,
        "__annotations__": {key: kind for key, (kind, _) in keys.items()},
        **{key: default for key, (_, default) in keys.items()},
    }
    return run_options(type(name, bases, namespace))


NetworkOptions = _section(
    "NetworkOptions",
    "Published weights, a preset, another run, or sizes; null keeps the model's value.",
    {DECODER, ENCODER, PAIR},
    (StartOptions,),
)
TranslationModel = _section(
    "TranslationModel",
    "Arguments of `models.TranslationTransformer`.",
    {TRANSLATION},
    network=TRANSLATION,
    without=("max_length",),
    hidden_size=256,
    encoder_layers=4,
    decoder_layers=4,
    shared_embeddings=True,
    tied_head=True,
)
