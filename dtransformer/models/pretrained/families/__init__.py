"""Model families of `transformers`, read from `families.yaml`.

`keys.py` and `rows.py` map config keys to network arguments. `blocks.py`, `block_rules.py` and
`experts.py` map config keys that depend on the block. `weights.py` maps names of tensors to weights.
docs/new-family.md explains how to add a family.
"""

import pathlib
from collections.abc import Mapping

from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.masked_lm import MaskedLM
from dtransformer.models.pretrained.families import block_rules, experts, rows
from dtransformer.models.pretrained.families.blocks import (
    Blocks,
    FullAttention,
    Rotary,
    RotaryByKind,
    Windows,
)
from dtransformer.models.pretrained.families.family import (
    BartFamily,
    Family,
    FileNames,
    T5Family,
)
from dtransformer.models.pretrained.families.keys import Row, read_row
from dtransformer.models.pretrained.families.weights import read_table as read_weights
from dtransformer.tables import read_table

_NETWORKS = {network.__name__: network for network in (CausalLM, EncoderDecoderLM, MaskedLM)}
# Classes by `kind` or `rule` of an entry.
_FAMILIES = {None: Family, "bart": BartFamily, "t5": T5Family}
_ROTARY = {None: Rotary, "alpha": block_rules.AlphaRotary}
_WINDOWS = {
    None: Windows,
    "cohere": block_rules.CohereWindows,
    "exaone": block_rules.ExaoneWindows,
    "gemma": block_rules.GemmaWindows,
    "modernbert": block_rules.ModernBertWindows,
    "qwen": block_rules.QwenWindows,
    "smollm": block_rules.SmolWindows,
}
_EXPERTS = {None: experts.Experts, "group_limited": experts.GroupLimitedExperts}
_DENSE_BLOCKS = {"qwen": experts.QwenDenseBlocks}


def read_family(fields: Mapping) -> Family:
    """Return the family of an entry of `families.yaml`."""
    fields = dict(fields)
    kind = _FAMILIES[fields.pop("kind", None)]
    network = _NETWORKS[fields.pop("network", "CausalLM")]
    in_stacks = network is EncoderDecoderLM
    keys = [_read_row(name, x) for name, x in fields.pop("keys").items() if x is not None]
    weights = read_weights(fields.pop("weights"), in_stacks)
    files = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.pop("files", {}).items()
    }
    variants = {}
    for argument, tables in fields.pop("variants", {}).items():
        variants[argument] = {value: read_weights(x, in_stacks) for value, x in tables.items()}
    return kind(
        keys=tuple(keys),
        weights=weights,
        network=network,
        files=FileNames(**files),
        variants=variants,
        **fields,
    )


def _read_row(name, options) -> Row:
    """Return a row for several arguments by its name, or the row of an argument."""
    if name in _ROWS:
        return _ROWS[name](**options)
    return read_row(name, options)


def _read_blocks(rotary=None, windows=None, dense_blocks=None):
    """Return the row of rotary positions, windows and blocks without experts.

    Args:
        rotary: Dict of the fields of `Rotary`, or of the dicts `full` and `sliding`.
        windows: Dict of the fields of `Windows`. `None` supports full attention only.
        dense_blocks: Integer, the default number of first blocks without experts, or `"qwen"`.
    """
    if isinstance(dense_blocks, int):
        dense_blocks = experts.FirstDenseBlocks(dense_blocks)
    elif dense_blocks is not None:
        dense_blocks = _DENSE_BLOCKS[dense_blocks]()
    if rotary is not None and "full" in rotary:
        parts = {kind: Rotary(**options) for kind, options in rotary.items()}
        rotary = RotaryByKind(**parts)
    else:
        rotary = _make(_ROTARY, **rotary or {})
    windows = FullAttention() if windows is None else _make(_WINDOWS, **windows)
    return Blocks(rotary, windows, dense_blocks)


def _read_experts(keys, rule=None, **options):
    return _EXPERTS[rule](tuple(read_row(name, x) for name, x in keys.items()), **options)


def _make(classes, rule=None, **options):
    return classes[rule](**options)


# Rows for several arguments, by their names in `keys`.
_ROWS = {
    "blocks": _read_blocks,
    "experts": _read_experts,
    "falcon_heads": rows.FalconHeads,
    "feed_forward": rows.FeedForward,
    "latents": rows.Latents,
    "next_sentence": rows.NextSentence,
    "positions_after_padding": rows.PositionsAfterPadding,
}
_TABLE = read_table(pathlib.Path(__file__).with_name("families.yaml"))
SHARED: dict[str, dict] = _TABLE["shared"]
"""Tables of config keys and of weight names that several families use."""
HEADS: dict[str, dict] = _TABLE["heads"]
"""Task heads by `model_type`; see `task_heads.py`."""
FAMILIES: dict[str, Family] = {
    name: read_family(fields) for name, fields in _TABLE["families"].items()
}
"""Families by `model_type` in a config."""
