"""Config keys that differ between blocks: windows, rotary positions and experts."""

import dataclasses
from collections.abc import Callable, Mapping

from dtransformer.block_forms import arguments_of_block, shortest
from dtransformer.errors import InputError
from dtransformer.layers.rotary import ntk_base
from dtransformer.models.pretrained.families.parts import differs

FULL = "full_attention"
SLIDING = "sliding_attention"
# Keys of a block pattern that are not network arguments.
_PATTERN_KEYS = "experts", "attention_norm"
_ROTARY = "rotary_base", "rotary_fraction", "rotary_scaling"


def every(period: int) -> Callable:
    """Return a rule that makes every `number`-th block full and lets the others slide."""
    return lambda config, i: SLIDING if (i + 1) % period else FULL


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Mapping between config keys and the attention of each block.

    Args:
        base: Default base of rotary positions.
        fraction: Default fraction of features that rotary positions rotate.
        is_partial: Boolean. Whether configs may set another fraction.
        kind_rule: Function from a config and a block index to `FULL` or `SLIDING`, used if the
            config has no `layer_types`. `None` if no block of the family slides.
        window: Default window in configs, or `None`.
        window_field: Config key of the window.
        window_converters: Tuple of a function from the config's window to the argument, and its
            inverse.
        has_types: Boolean. Whether saved configs have `layer_types`.
        switch: Config key that enables sliding blocks, or `None`.
        per_kind: Boolean. Whether `rope_parameters` has one entry per kind of block.
        base_keys: Dict from kinds to the keys of their base in configs without
            `rope_parameters`.
        sliding_base: Default base in sliding blocks, if it differs.
        dense: Tuple of two functions: from a config and a block index to whether the block
            has a feed-forward layer instead of experts, and from the list of these booleans
            to config fields. `None` if all blocks are
            equal.
        first_has_no_norm: Boolean. Whether the first block has no attention norm.
        fields: Tuple of the keys of base and fraction in older configs.
        full_has_rotary: Boolean. Whether full blocks have rotary positions if others slide.
        rotary_blocks: Tuple of a config key with the list of blocks that have rotary positions, a
            key with the interval of blocks without them, and its default. `None` if all
            blocks have rotary positions.
        scaling: Default of `rope_scaling` in a config without rotary keys.
        has_alpha: Boolean. Whether scaling of type `"dynamic"` with `alpha` is this
            library's `"ntk"` with that factor.
    """

    base: float = 10000.0
    fraction: float = 1.0
    is_partial: bool = False
    kind_rule: Callable[[Mapping, int], str] | None = None
    window: int | None = None
    window_field: str = "sliding_window"
    window_converters: tuple[Callable, Callable] = (lambda x: x, lambda x: x)
    has_types: bool = False
    switch: str | None = None
    per_kind: bool = False
    base_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sliding_base: float | None = None
    dense: tuple[Callable, Callable] | None = None
    first_has_no_norm: bool = False
    fields: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    full_has_rotary: bool = True
    rotary_blocks: tuple[str, str, int] | None = None
    scaling: Mapping = dataclasses.field(default_factory=dict)
    has_alpha: bool = False
    arguments: tuple[str, ...] = (*_ROTARY, "window", "block_pattern")

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`.

        Raises:
            InputError: If `layer_types` has an unsupported kind or a wrong length.
        """
        num_blocks = config["num_hidden_layers"]
        kinds = self._block_kinds(config)
        has_rotary = self._rotary_flags(config)
        kind_arguments = {kind: self._kind_arguments(config, kind) for kind in dict.fromkeys(kinds)}
        blocks = [dict(kind_arguments[kind]) for kind in kinds]
        for i in range(num_blocks):
            if has_rotary is not None and not has_rotary[i]:
                blocks[i]["rotary_base"] = None
            if self.first_has_no_norm:
                blocks[i]["attention_norm"] = i > 0
            if self.dense is not None:
                blocks[i]["experts"] = not self.dense[0](config, i)
        if not blocks:
            return kind_arguments.get(FULL, self._kind_arguments(config, FULL))
        return split_pattern(blocks)

    def _block_kinds(self, config):
        num_blocks = config["num_hidden_layers"]
        layer_types = config.get("layer_types")
        supported = {FULL} if self.kind_rule is None else {FULL, SLIDING}
        if unsupported := sorted({*(layer_types or ())} - supported):
            raise InputError(
                f"`layer_types` contains {unsupported[0]!r}, which is not supported for this family."
            )
        if layer_types:
            if len(layer_types) != num_blocks:
                raise InputError(
                    f"`layer_types` must have {num_blocks} entries, one per block, got "
                    f"{len(layer_types)}."
                )
        rule = self.kind_rule or (lambda config, i: FULL)
        by_rule = [rule(config, i) for i in range(num_blocks)]
        return list(layer_types or by_rule)

    def _kind_arguments(self, config, kind):
        """Return the arguments of a full or sliding block."""
        window = None
        if self.kind_rule is not None:
            window = config.get(self.window_field, self.window)
        result = {"window": None, **self._rotary(config, kind)}
        if window is not None and kind == FULL and not self.full_has_rotary:
            return {**result, "rotary_base": None}
        if window is None or kind == FULL:
            return result
        return result | {"window": self.window_converters[0](window)}

    def _rotary(self, config, kind):
        """Return the rotary arguments of a kind of block.

        Configs store them in one of three forms: `rope_parameters` per kind, `rope_parameters`
        for all kinds, or separate keys with `rope_scaling`.
        """
        parameters = config.get("rope_parameters") or {}
        is_local = self.per_kind and kind == SLIDING
        if FULL in parameters or SLIDING in parameters:
            fields = dict(parameters.get(kind) or {})
        else:
            default = {} if parameters else self.scaling
            scaling = {} if is_local else config.get("rope_scaling") or default
            fields = {**scaling, **(parameters if not is_local else {})}
        default_base = self.sliding_base if is_local and self.sliding_base else self.base
        field = self.base_keys.get(kind, self.fields[0])
        base = fields.pop("rope_theta", None) or config.get(field) or default_base
        name = fields.pop("rope_type", None) or fields.pop("type", "default")
        fields.pop("type", None)
        fields.pop("max_position_embeddings", None)
        fraction = fields.pop("partial_rotary_factor", None) or config.get(self.fields[1])
        fields = {key: value for key, value in fields.items() if value is not None}
        if self.has_alpha and name == "dynamic" and fields.get("alpha"):
            # The other fields have no effect then.
            name = "ntk"
            fields = {"factor": fields["alpha"]}
        return {
            "rotary_base": float(base),
            "rotary_fraction": float(fraction or self.fraction),
            "rotary_scaling": None if name == "default" else {"type": name, **fields},
        }

    def _rotary_flags(self, config):
        """Return a list with 1 for blocks that have rotary positions and 0 for others.

        The result is `None` if all blocks have them.
        """
        if self.rotary_blocks is None:
            return None
        field, interval, default = self.rotary_blocks
        period = config.get(interval) or default
        num_blocks = config["num_hidden_layers"]
        return config.get(field) or [int((i + 1) % period != 0) for i in range(num_blocks)]

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`.

        Raises:
            InputError: If no config of the family can represent the blocks.
        """
        blocks = [arguments_of_block(arguments, i) for i in range(arguments["num_layers"])]
        windows = {block["window"] for block in blocks} - {None}
        fractions = {block["rotary_fraction"] for block in blocks}
        if windows and self.kind_rule is None:
            raise differs("window", windows, None)
        if len(windows) > 1:
            raise differs("window", windows, "one value")
        if fractions != {1.0} and self.fraction == 1 and not self.is_partial:
            raise differs("rotary_fraction", fractions - {1.0}, 1.0)
        rotary = [block for block in blocks if block["rotary_base"] is not None] or blocks
        per_kind = {kind: [b for b in rotary if _kind(b) == kind] for kind in (FULL, SLIDING)}
        groups = per_kind.values() if self.per_kind else [rotary]
        for group in groups:
            if any(block[name] != group[0][name] for block in group for name in _ROTARY):
                bases = {block["rotary_base"] for block in group}
                raise differs("rotary_base", bases, "one value")
        fields = {}
        if self.kind_rule is not None:
            window = next(iter(windows), None)
            fields[self.window_field] = (
                None if window is None else self.window_converters[1](window)
            )
        if self.switch is not None:
            fields[self.switch] = bool(windows)
        if self.has_types:
            fields["layer_types"] = [_kind(block) for block in blocks]
        if self.rotary_blocks is not None:
            fields[self.rotary_blocks[0]] = [
                int(block["rotary_base"] is not None) for block in blocks
            ]
        plain = [i for i, block in enumerate(blocks) if not block.get("attention_norm", True)]
        expected_plain = [0] if self.first_has_no_norm else []
        if plain != expected_plain:
            raise differs("blocks without attention norm", plain, expected_plain)
        if self.dense is not None:
            fields |= self.dense[1]([not block.get("experts", True) for block in blocks])
        elif any("experts" in block for block in blocks):
            raise differs("blocks with experts", "some of them", "all of them")
        expected = [
            self.full_has_rotary or not windows or _kind(block) == SLIDING for block in blocks
        ]
        if (
            self.rotary_blocks is None
            and [block["rotary_base"] is not None for block in blocks] != expected
        ):
            raise InputError(
                "The blocks with rotary positions differ from the family's. Save the network as another "
                "family."
            )
        if self.per_kind:
            parameters = {
                kind: self._parameters(group[0]) for kind, group in per_kind.items() if group
            }
            first_parameters = next(iter(parameters.values()))
            return {
                **fields,
                "rope_parameters": {
                    FULL: first_parameters,
                    SLIDING: first_parameters,
                    **parameters,
                },
            }
        parameters = self._parameters(rotary[0])
        return {**fields, "rope_theta": parameters["rope_theta"], "rope_parameters": parameters}

    def _parameters(self, block):
        """Return `rope_parameters` for a block's arguments."""
        base = block["rotary_base"]
        scaling = dict(block["rotary_scaling"] or {"type": "default"})
        if scaling["type"] == "ntk" and self.has_alpha:
            scaling = {"type": "dynamic", "alpha": scaling["factor"], "factor": 1.0}
        elif scaling["type"] == "ntk":  # configs express it with the base
            head_dim = block["head_dim"] or block["hidden_size"] // block["num_heads"]
            rotary_dim = int(head_dim * block["rotary_fraction"])
            base = ntk_base(base, scaling["factor"], rotary_dim)
            scaling = {"type": "default"}
        parameters = {"rope_theta": base, "rope_type": scaling.pop("type"), **scaling}
        fraction = block["rotary_fraction"]
        return parameters if fraction == 1 else {**parameters, "partial_rotary_factor": fraction}


def always_sliding(config: Mapping, index: int) -> str:
    """Return `SLIDING`, for families whose blocks all slide if the config has a window."""
    return SLIDING


def _kind(block):
    return FULL if block["window"] is None else SLIDING


def split_pattern(blocks: list[dict]) -> dict:
    """Return the blocks' common arguments, and a `block_pattern` of the differing ones."""
    common_names = {
        name for name in blocks[0] if all(block[name] == blocks[0][name] for block in blocks)
    }
    # Pattern keys that are False in all blocks must stay in the pattern.
    common_names -= {name for name in common_names & {*_PATTERN_KEYS} if not blocks[0][name]}
    pattern = shortest(
        [{x: v for x, v in block.items() if x not in common_names} for block in blocks]
    )
    if len(common_names) == len(blocks[0]):
        pattern = None
    common = {name: value for name, value in blocks[0].items() if name not in _PATTERN_KEYS}
    return {**common, "block_pattern": pattern}
