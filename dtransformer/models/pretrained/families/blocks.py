"""Rows for the config keys of blocks: sliding windows, rotary positions and experts."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence

from dtransformer.block_forms import get_block_arguments, shortest_pattern
from dtransformer.errors import InputError
from dtransformer.layers.rotary import ntk_base
from dtransformer.models.pretrained.families.keys import head_size, unsupported_argument

_MAX_BLOCKS = 10_000

FULL = "full_attention"
SLIDING = "sliding_attention"
# Keys of a block pattern that are not network arguments.
_PATTERN_KEYS = "experts", "attention_norm"
_ROTARY = "rotary_base", "rotary_fraction", "rotary_scaling"


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Config keys of rotary positions that are equal in all blocks.

    Configs store them in `rope_parameters`, or in separate keys with `rope_scaling`.

    Args:
        base: Default base.
        fraction: Default fraction of features that rotary positions rotate.
        has_fraction: Boolean. Whether configs may contain another fraction if the default is 1.
        base_key, fraction_key: Keys in configs without `rope_parameters`.
        scaling: Default of `rope_scaling` in a config without rotary keys.
    """

    base: float = 10000.0
    fraction: float = 1.0
    has_fraction: bool = False
    base_key: str = "rope_theta"
    fraction_key: str = "partial_rotary_factor"
    scaling: Mapping = dataclasses.field(default_factory=dict)

    def from_hf(self, config: Mapping, kind: str) -> dict:
        """Return the arguments of a block from a config.

        Args:
            config: Published config.
            kind: `FULL` or `SLIDING`.
        """
        parameters = config.get("rope_parameters") or {}
        if is_by_kind(parameters):
            return self.parameters_from_hf(config, parameters.get(kind) or {})
        scaling = config.get("rope_scaling") or ({} if parameters else self.scaling)
        return self.parameters_from_hf(config, {**scaling, **parameters})

    def parameters_from_hf(self, config: Mapping, parameters: Mapping) -> dict:
        """Return the arguments of a block from its `rope_parameters` and the other keys."""
        options = {key: value for key, value in parameters.items() if value is not None}
        base = options.pop("rope_theta", None) or config.get(self.base_key) or self.base
        name = options.pop("rope_type", None) or options.get("type") or "default"
        fraction = options.pop("partial_rotary_factor", None) or config.get(self.fraction_key)
        for key in ("type", "max_position_embeddings"):
            options.pop(key, None)
        return {
            "rotary_base": float(base),
            "rotary_fraction": float(fraction or self.fraction),
            "rotary_scaling": self.scaling_from_hf(name, options),
        }

    def scaling_from_hf(self, name: str, options: dict) -> dict | None:
        """Return the argument `rotary_scaling` for a type of scaling with its options."""
        return None if name == "default" else {"type": name, **options}

    def to_hf(self, blocks: Sequence[Mapping]) -> dict:
        """Return the config keys from the arguments of all blocks.

        Raises:
            InputError: If blocks differ, or only some features rotate in a family without this
                option.
        """
        rotary = [block for block in blocks if block["rotary_base"] is not None] or blocks
        fractions = {block["rotary_fraction"] for block in blocks} - {1.0}
        if fractions and self.fraction == 1 and not self.has_fraction:
            raise unsupported_argument("rotary_fraction", fractions, 1.0)
        if any(block[name] != rotary[0][name] for block in rotary for name in _ROTARY):
            bases = {block["rotary_base"] for block in rotary}
            raise unsupported_argument("rotary_base", bases, "one value")
        parameters = self.parameters_to_hf(rotary[0])
        return {"rope_theta": parameters["rope_theta"], "rope_parameters": parameters}

    def parameters_to_hf(self, block: Mapping) -> dict:
        """Return `rope_parameters` for a block's arguments."""
        base = block["rotary_base"]
        scaling = dict(block["rotary_scaling"] or {"type": "default"})
        if scaling["type"] == "ntk" and base:  # Configs contain the enlarged base instead.
            size = block["head_dim"] or head_size(block)
            base = ntk_base(base, scaling["factor"], int(size * block["rotary_fraction"]))
            scaling = {"type": "default"}
        return rope_parameters(base, scaling.pop("type"), scaling, block["rotary_fraction"])


def rope_parameters(base: float, name: str, options: Mapping, fraction: float) -> dict:
    """Return `rope_parameters` for a base, a type of scaling with options, and a fraction."""
    parameters = {"rope_theta": base, "rope_type": name, **options}
    return parameters if fraction == 1 else {**parameters, "partial_rotary_factor": fraction}


def is_by_kind(parameters: Mapping) -> bool:
    """Return whether `rope_parameters` has an entry for each kind of block."""
    return FULL in parameters or SLIDING in parameters


@dataclasses.dataclass(frozen=True)
class RotaryByKind:
    """Config keys of rotary positions that differ between full and sliding blocks.

    `rope_parameters` has an entry for each kind of block. Scaling in older configs applies to full
    blocks only.

    Args:
        full, sliding: `Rotary` of full and of sliding blocks.
    """

    full: Rotary
    sliding: Rotary

    def from_hf(self, config: Mapping, kind: str) -> dict:
        """Return the arguments of a block from a config; see `Rotary.from_hf`."""
        parameters = config.get("rope_parameters") or {}
        if kind == FULL:
            return self.full.from_hf(config, kind)
        sliding = parameters.get(SLIDING) if is_by_kind(parameters) else None
        return self.sliding.parameters_from_hf(config, sliding or {})

    def to_hf(self, blocks: Sequence[Mapping]) -> dict:
        """Return the config keys from the arguments of all blocks.

        Raises:
            InputError: If blocks of one kind differ, or only some features rotate in a family
                without this option.
        """
        parameters = {}
        for kind, rotary in ((FULL, self.full), (SLIDING, self.sliding)):
            if matches := [block for block in blocks if _get_kind(block) == kind]:
                parameters[kind] = rotary.to_hf(matches)["rope_parameters"]
        # A kind without blocks gets the values of the other kind.
        first = next(iter(parameters.values()))
        return {"rope_parameters": {kind: parameters.get(kind, first) for kind in (FULL, SLIDING)}}


@dataclasses.dataclass(frozen=True)
class FullAttention:
    """Blocks without windows, and the base of classes for families with windows.

    Attributes:
        supported_kinds: Tuple of the supported kinds of blocks.
    """

    supported_kinds = (FULL,)

    def kinds(self, config: Mapping) -> list[str]:
        """Return `FULL` or `SLIDING` for each block of a config.

        Raises:
            InputError: If `layer_types` has an unsupported kind or a wrong length, or if there are
                too many blocks.
        """
        num_blocks = config["num_hidden_layers"]
        if num_blocks > _MAX_BLOCKS:
            raise InputError(
                f"`num_hidden_layers` must be at most {_MAX_BLOCKS:,}, got {num_blocks:,}."
            )
        layer_types = config.get("layer_types")
        unsupported = sorted({*(layer_types or ())} - {*self.supported_kinds})
        if unsupported:
            raise InputError(
                f"`layer_types` contains {unsupported[0]!r}, which is not supported for this family."
            )
        if layer_types and len(layer_types) != num_blocks:
            raise InputError(
                f"`layer_types` must have {num_blocks} entries, one per block, got "
                f"{len(layer_types)}."
            )
        default_kinds = [self.default_kind(config, i) for i in range(num_blocks)]
        return list(layer_types or default_kinds)

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        return FULL

    def from_hf(self, config: Mapping, kinds: Sequence[str]) -> list[dict]:
        """Return the arguments of each block that depend on its kind."""
        return [{"window": None} for _ in kinds]

    def to_hf(self, blocks: Sequence[Mapping]) -> dict:
        """Return the config keys from the arguments of all blocks.

        Raises:
            InputError: If the family cannot represent the windows.
        """
        if windows := _get_windows(blocks):
            raise unsupported_argument("window", windows, None)
        return {}

    def has_rotary(self, blocks: Sequence[Mapping]) -> list[bool]:
        """Return for each block whether it has rotary positions in the family."""
        return [True for _ in blocks]

    def has_attention_norm(self, index: int) -> bool:
        """Return whether a block has a norm before its attention."""
        return True


@dataclasses.dataclass(frozen=True)
class Windows(FullAttention):
    """Config keys of sliding windows.

    Args:
        window: Default window in configs, or `None`.
        period: Integer n: every n-th block is full. `None` if all blocks slide.
        key: Config key of the window.
        has_layer_types: Boolean. Whether saved configs have `layer_types`.
        full_has_rotary: Boolean. Whether full blocks have rotary positions if configs have a
            window.
        switch: Config key that enables windows, or `None`.
    """

    window: int | None = None
    period: int | None = None
    key: str = "sliding_window"
    has_layer_types: bool = False
    full_has_rotary: bool = True
    switch: str | None = None
    supported_kinds = FULL, SLIDING

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        return periodic_kind(index, self.period)

    def from_hf(self, config: Mapping, kinds: Sequence[str]) -> list[dict]:
        """Return the arguments of each block that depend on its kind."""
        window = config.get(self.key, self.window)
        if window is None:
            return super().from_hf(config, kinds)
        full = {"window": None} if self.full_has_rotary else {"window": None, "rotary_base": None}
        return [full if kind == FULL else {"window": window} for kind in kinds]

    def to_hf(self, blocks: Sequence[Mapping]) -> dict:
        """Return the config keys from the arguments of all blocks.

        Raises:
            InputError: If the blocks have different windows.
        """
        windows = _get_windows(blocks)
        if len(windows) > 1:
            raise unsupported_argument("window", windows, "one value")
        fields = {self.key: next(iter(windows), None)}
        if self.switch is not None:
            fields[self.switch] = bool(windows)
        if self.has_layer_types:
            fields["layer_types"] = [_get_kind(block) for block in blocks]
        return fields

    def has_rotary(self, blocks: Sequence[Mapping]) -> list[bool]:
        """Return for each block whether it has rotary positions in the family."""
        is_everywhere = self.full_has_rotary or not _get_windows(blocks)
        return [is_everywhere or _get_kind(block) == SLIDING for block in blocks]


def periodic_kind(index: int, period: int | None) -> str:
    """Return `FULL` for every `period`-th block and `SLIDING` for all others."""
    return FULL if period and (index + 1) % period == 0 else SLIDING


class DenseBlocks(typing.Protocol):
    """Config keys that select the blocks without experts."""

    def from_hf(self, config: Mapping) -> list[bool]:
        """Return for each block of a config whether it has experts."""

    def to_hf(self, has_experts: Sequence[bool]) -> dict:
        """Return the config keys. The inverse of `from_hf`."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Row for all config keys of blocks.

    Args:
        rotary: Keys of rotary positions.
        windows: Keys of windows.
        dense_blocks: Keys of blocks without experts. `None` if all blocks are equal.
    """

    rotary: Rotary | RotaryByKind = Rotary()
    windows: FullAttention = FullAttention()
    dense_blocks: DenseBlocks | None = None
    arguments: tuple[str, ...] = (*_ROTARY, "window", "block_pattern")

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`.

        Raises:
            InputError: If `layer_types` has an unsupported kind or a wrong length.
        """
        kinds = self.windows.kinds(config)
        if not kinds:
            return {"window": None, **self.rotary.from_hf(config, FULL)}
        differences = self.windows.from_hf(config, kinds)
        rotary = {kind: self.rotary.from_hf(config, kind) for kind in dict.fromkeys(kinds)}
        blocks = [{"window": None, **rotary[kind], **x} for kind, x in zip(kinds, differences)]
        if self.dense_blocks is not None:
            for block, has_experts in zip(blocks, self.dense_blocks.from_hf(config)):
                block["experts"] = has_experts
        return split_pattern(blocks)

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If no config of the family can represent the blocks.
        """
        blocks = [get_block_arguments(arguments, i) for i in range(arguments["num_layers"])]
        fields = self.windows.to_hf(blocks)
        rotary_fields = self.rotary.to_hf(blocks)
        self._check_norms(blocks)
        if self.dense_blocks is not None:
            fields |= self.dense_blocks.to_hf([block.get("experts", True) for block in blocks])
        elif any("experts" in block for block in blocks):
            raise unsupported_argument("blocks with experts", "some of them", "all of them")
        has_rotary = [block["rotary_base"] is not None for block in blocks]
        if has_rotary != self.windows.has_rotary(blocks):
            raise InputError(
                "The blocks with rotary positions differ from the family's. Save the network as another "
                "family."
            )
        return {**fields, **rotary_fields}

    def _check_norms(self, blocks):
        """Raise an error if other blocks than the family's have no norm before attention."""
        without = [i for i, block in enumerate(blocks) if not block.get("attention_norm", True)]
        expected = [i for i in range(len(blocks)) if not self.windows.has_attention_norm(i)]
        if without != expected:
            raise unsupported_argument("blocks without attention norm", without, expected)


def _get_windows(blocks):
    return {block["window"] for block in blocks} - {None}


def _get_kind(block):
    return FULL if block["window"] is None else SLIDING


def split_pattern(blocks: list[dict]) -> dict:
    """Return the blocks' common arguments, and a `block_pattern` of the differing ones."""
    first = blocks[0]
    common = {name for name in first if all(block[name] == first[name] for block in blocks)}
    # Pattern keys that are False in all blocks must stay in the pattern.
    common -= {name for name in common & {*_PATTERN_KEYS} if not first[name]}
    differing = [{x: y for x, y in block.items() if x not in common} for block in blocks]
    pattern = None if len(common) == len(first) else shortest_pattern(differing)
    arguments = {name: value for name, value in first.items() if name not in _PATTERN_KEYS}
    return {**arguments, "block_pattern": pattern}
