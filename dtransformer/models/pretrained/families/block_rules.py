"""Rules of single families for sliding windows and rotary positions."""

from collections.abc import Mapping, Sequence

from dtransformer.errors import InputError
from dtransformer.models.pretrained.families.blocks import (
    FULL,
    SLIDING,
    Rotary,
    Windows,
    periodic_kind,
    rope_parameters,
)


class QwenWindows(Windows):
    """Windows in all blocks after the first `max_window_layers`, if they are enabled."""

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        is_last = index >= config.get("max_window_layers", 28)
        return SLIDING if config.get("use_sliding_window") and is_last else FULL


class SmolWindows(Windows):
    """Windows in blocks without rotary positions, which `no_rope_layers` marks with 0."""

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        is_enabled = config.get("use_sliding_window")
        has_rotary = self._rotary_flags(config, index + 1)[index]
        return SLIDING if is_enabled and not has_rotary else FULL

    def from_hf(self, config: Mapping, kinds: Sequence[str]) -> list[dict]:
        """Return the arguments of each block that depend on its kind."""
        blocks = super().from_hf(config, kinds)
        flags = self._rotary_flags(config, len(blocks))
        without_rotary = {"rotary_base": None}
        return [block if flags[i] else block | without_rotary for i, block in enumerate(blocks)]

    def to_hf(self, blocks: Sequence[Mapping]) -> dict:
        """Return the config keys from the arguments of all blocks."""
        return {**super().to_hf(blocks), "no_rope_layers": [*map(int, self.has_rotary(blocks))]}

    def has_rotary(self, blocks: Sequence[Mapping]) -> list[bool]:
        """Return for each block whether it has rotary positions."""
        return [block["rotary_base"] is not None for block in blocks]

    def _rotary_flags(self, config, num_blocks):
        period = config.get("no_rope_layer_interval") or 4
        flags = config.get("no_rope_layers")
        return flags or [(i + 1) % period != 0 for i in range(num_blocks)]


class GemmaWindows(Windows):
    """Windows in all blocks except every sixth by default."""

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        period = config.get("_sliding_window_pattern") or config.get("sliding_window_pattern")
        return periodic_kind(index, period or 6)


class ExaoneWindows(Windows):
    """Windows in the blocks that `sliding_window_pattern` selects.

    The key is a period, or a string with one letter per block of a period. `L` means a sliding
    block. With letters the last block is always full.
    """

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        pattern = config.get("sliding_window_pattern", 4)
        if config.get("sliding_window", 4096) is None or not pattern:
            return FULL
        if not isinstance(pattern, str):
            return periodic_kind(index, pattern)
        is_last = index == config["num_hidden_layers"] - 1
        return SLIDING if pattern[index % len(pattern)] == "L" and not is_last else FULL


class CohereWindows(Windows):
    """Windows in all blocks except every fourth by default."""

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`.

        Raises:
            InputError: If the config has no windows.
        """
        if config.get("sliding_window", 4096) is None:
            raise InputError(
                "`sliding_window=null` (blocks without positions) is not supported for Cohere 2."
            )
        return periodic_kind(index, config.get("sliding_window_pattern") or 4)


class ModernBertWindows(Windows):
    """Windows in two of three blocks by default. The first block has no attention norm.

    ModernBERT counts both sides of a window together. This library counts one side, including
    the position itself.
    """

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        return SLIDING if index % (config.get("global_attn_every_n_layers") or 3) else FULL

    def from_hf(self, config: Mapping, kinds: Sequence[str]) -> list[dict]:
        """Return the arguments of each block that depend on its kind or index."""
        blocks = super().from_hf(config, kinds)
        for i, block in enumerate(blocks):
            window = block["window"]
            window = None if window is None else window // 2 + 1
            blocks[i] = {**block, "window": window, "attention_norm": i > 0}
        return blocks

    def to_hf(self, blocks: Sequence[Mapping]) -> dict:
        """Return the config keys from the arguments of all blocks."""
        fields = super().to_hf(blocks)
        window = fields[self.key]
        return {**fields, self.key: None if window is None else 2 * (window - 1)}

    def has_attention_norm(self, index: int) -> bool:
        """Return whether a block has a norm before its attention."""
        return index > 0


class AlphaRotary(Rotary):
    """Rotary positions whose scaling of type `"dynamic"` with `alpha` is `"ntk"` here."""

    def scaling_from_hf(self, name: str, options: dict) -> dict | None:
        """Return the argument `rotary_scaling`. Other options have no effect with `alpha`."""
        if name == "dynamic" and options.get("alpha"):
            return {"type": "ntk", "factor": options["alpha"]}
        return super().scaling_from_hf(name, options)

    def parameters_to_hf(self, block: Mapping) -> dict:
        """Return `rope_parameters` for a block's arguments."""
        scaling = block["rotary_scaling"]
        if scaling is None or scaling["type"] != "ntk":
            return super().parameters_to_hf(block)
        options = {"alpha": scaling["factor"], "factor": 1.0}
        return rope_parameters(block["rotary_base"], "dynamic", options, block["rotary_fraction"])
