"""Config keys that differ between blocks: windows, rotary positions and experts."""

import dataclasses
from collections.abc import Callable, Mapping

from dtransformer.block_forms import arguments_of_block, shortest
from dtransformer.errors import InputError
from dtransformer.layers.rotary import ntk_base
from dtransformer.models.pretrained.families.parts import differs

FULL, SLIDING = "full_attention", "sliding_attention"
_OF_PATTERN = "experts", "attention_norm"  # keys of a block pattern that are not network arguments
_ROTARY = "rotary_base", "rotary_fraction", "rotary_scaling"


def every(number: int) -> Callable:
    """Return a rule that makes every `number`-th block full and lets the others slide."""
    return lambda config, i: SLIDING if (i + 1) % number else FULL


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Mapping between config keys and the attention of each block.

    Args:
        base: Default base of rotary positions.
        fraction: Default fraction of features that rotary positions rotate.
        is_partial: Boolean. Whether configs may set another fraction.
        kind_of: Function from a config and a block index to `FULL` or `SLIDING`, used if the
            config has no `layer_types`. `None` if no block of the family slides.
        window: Default window in configs, or `None`.
        window_field: Config key of the window.
        window_of: Tuple of a function from the config's window to the argument, and its
            inverse.
        has_types: Boolean. Whether saved configs have `layer_types`.
        switch: Config key that enables sliding blocks, or `None`.
        by_kind: Boolean. Whether `rope_parameters` has one entry per kind of block.
        older: Dict from kinds to the keys of their base in configs without
            `rope_parameters`.
        sliding_base: Default base in sliding blocks, if it differs.
        dense: Tuple of two functions: from a config and a block index to whether the block
            has a feed-forward layer instead of experts, and from the list of these booleans
            to config fields. `None` if all blocks are
            equal.
        is_first_plain: Boolean. Whether the first block has no attention norm.
        fields: Tuple of the keys of base and fraction in older configs.
        are_full_turned: Boolean. Whether full blocks have rotary positions if others slide.
        turns: Tuple of a config key with the list of blocks that have rotary positions, a
            key with the interval of blocks without them, and its default. `None` if all
            blocks have rotary positions.
        scaling: Default of `rope_scaling` in a config without rotary keys.
        has_alpha: Boolean. Whether scaling of type `"dynamic"` with `alpha` is this
            library's `"ntk"` with that factor.
    """

    base: float = 10000.0
    fraction: float = 1.0
    is_partial: bool = False
    kind_of: Callable[[Mapping, int], str] | None = None
    window: int | None = None
    window_field: str = "sliding_window"
    window_of: tuple[Callable, Callable] = (lambda x: x, lambda x: x)
    has_types: bool = False
    switch: str | None = None
    by_kind: bool = False
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sliding_base: float | None = None
    dense: tuple[Callable, Callable] | None = None
    is_first_plain: bool = False
    fields: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    are_full_turned: bool = True
    turns: tuple[str, str, int] | None = None
    scaling: Mapping = dataclasses.field(default_factory=dict)
    has_alpha: bool = False
    arguments: tuple[str, ...] = (*_ROTARY, "window", "block_pattern")

    def read(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`.

        Raises:
            InputError: If `layer_types` has an unsupported kind or a wrong length.
        """
        number, kinds = config["num_hidden_layers"], self._kinds(config)
        turns = self._turns(config)
        of_kind = {kind: self._of_kind(config, kind) for kind in dict.fromkeys(kinds)}
        blocks = [dict(of_kind[kind]) for kind in kinds]
        for i in range(number):
            if turns is not None and not turns[i]:
                blocks[i]["rotary_base"] = None
            if self.is_first_plain:
                blocks[i]["attention_norm"] = i > 0
            if self.dense is not None:
                blocks[i]["experts"] = not self.dense[0](config, i)
        return factored(blocks) if blocks else of_kind.get(FULL, self._of_kind(config, FULL))

    def _kinds(self, config):
        number, given = config["num_hidden_layers"], config.get("layer_types")
        kinds = {FULL} if self.kind_of is None else {FULL, SLIDING}
        if others := sorted({*(given or ())} - kinds):
            raise InputError(
                f"`layer_types` contains {others[0]!r}, which is not supported for this family."
            )
        if given:
            if len(given) != number:
                raise InputError(
                    f"`layer_types` must have one entry per block ({number}), got {len(given)}."
                )
        rule = self.kind_of or (lambda config, i: FULL)
        by_rule = [rule(config, i) for i in range(number)]
        return list(given or by_rule)

    def _of_kind(self, config, kind):
        """Return the arguments of a full or sliding block."""
        window = None
        if self.kind_of is not None:
            window = config.get(self.window_field, self.window)
        found = {"window": None, **self._rotary(config, kind)}
        if window is not None and kind == FULL and not self.are_full_turned:
            return {**found, "rotary_base": None}
        if window is None or kind == FULL:
            return found
        return found | {"window": self.window_of[0](window)}

    def _rotary(self, config, kind):
        """Return the rotary arguments of a kind of block.

        Configs store them in one of three forms: `rope_parameters` per kind, `rope_parameters`
        for all kinds, or separate keys with `rope_scaling`.
        """
        given, is_local = config.get("rope_parameters") or {}, self.by_kind and kind == SLIDING
        if FULL in given or SLIDING in given:
            own = dict(given.get(kind) or {})
        else:
            usual = {} if given else self.scaling
            scaling = {} if is_local else config.get("rope_scaling") or usual
            own = {**scaling, **(given if not is_local else {})}
        usual = self.sliding_base if is_local and self.sliding_base else self.base
        field = self.older.get(kind, self.fields[0])
        base = own.pop("rope_theta", None) or config.get(field) or usual
        name = own.pop("rope_type", None) or own.pop("type", "default")
        own.pop("type", None)
        own.pop("max_position_embeddings", None)
        fraction = own.pop("partial_rotary_factor", None) or config.get(self.fields[1])
        own = {key: value for key, value in own.items() if value is not None}
        if self.has_alpha and name == "dynamic" and own.get("alpha"):
            # The other fields have no effect then.
            name, own = "ntk", {"factor": own["alpha"]}
        return {
            "rotary_base": float(base),
            "rotary_fraction": float(fraction or self.fraction),
            "rotary_scaling": None if name == "default" else {"type": name, **own},
        }

    def _turns(self, config):
        """Return a list with 1 for blocks that have rotary positions and 0 for others.

        The result is `None` if all blocks have them.
        """
        if self.turns is None:
            return None
        field, interval, usual = self.turns
        period, number = config.get(interval) or usual, config["num_hidden_layers"]
        return config.get(field) or [int((i + 1) % period != 0) for i in range(number)]

    def written(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`.

        Raises:
            InputError: If no config of the family can represent the blocks.
        """
        blocks = [arguments_of_block(arguments, i) for i in range(arguments["num_layers"])]
        windows = {block["window"] for block in blocks} - {None}
        fractions = {block["rotary_fraction"] for block in blocks}
        if windows and self.kind_of is None:
            raise differs("window", windows, None)
        if len(windows) > 1:
            raise differs("window", windows, "one value")
        if fractions != {1.0} and self.fraction == 1 and not self.is_partial:
            raise differs("rotary_fraction", fractions - {1.0}, 1.0)
        turning = [block for block in blocks if block["rotary_base"] is not None] or blocks
        by_kind = {kind: [b for b in turning if _kind(b) == kind] for kind in (FULL, SLIDING)}
        groups = by_kind.values() if self.by_kind else [turning]
        for group in groups:
            if any(one[name] != group[0][name] for one in group for name in _ROTARY):
                bases = {one["rotary_base"] for one in group}
                raise differs("rotary_base", bases, "one value")
        found = {}
        if self.kind_of is not None:
            window = next(iter(windows), None)
            found[self.window_field] = None if window is None else self.window_of[1](window)
        if self.switch is not None:
            found[self.switch] = bool(windows)
        if self.has_types:
            found["layer_types"] = [_kind(block) for block in blocks]
        if self.turns is not None:
            found[self.turns[0]] = [int(block["rotary_base"] is not None) for block in blocks]
        plain = [i for i, block in enumerate(blocks) if not block.get("attention_norm", True)]
        if plain != [0] * self.is_first_plain:
            raise differs("blocks without attention norm", plain, [0] * self.is_first_plain)
        if self.dense is not None:
            found |= self.dense[1]([not block.get("experts", True) for block in blocks])
        elif any("experts" in block for block in blocks):
            raise differs("blocks with experts", "some of them", "all of them")
        turns = [self.are_full_turned or not windows or _kind(block) == SLIDING for block in blocks]
        if self.turns is None and [block["rotary_base"] is not None for block in blocks] != turns:
            raise InputError(
                "The blocks with rotary positions differ from the family's. Save the network as another "
                "family."
            )
        if self.by_kind:
            own = {kind: self._parameters(group[0]) for kind, group in by_kind.items() if group}
            first = next(iter(own.values()))
            return {**found, "rope_parameters": {FULL: first, SLIDING: first, **own}}
        own = self._parameters(turning[0])
        return {**found, "rope_theta": own["rope_theta"], "rope_parameters": own}

    def _parameters(self, block):
        """Return `rope_parameters` for a block's arguments."""
        base, scaling = block["rotary_base"], dict(block["rotary_scaling"] or {"type": "default"})
        if scaling["type"] == "ntk" and self.has_alpha:
            scaling = {"type": "dynamic", "alpha": scaling["factor"], "factor": 1.0}
        elif scaling["type"] == "ntk":  # configs express it with the base
            head_dim = block["head_dim"] or block["hidden_size"] // block["num_heads"]
            turning = int(head_dim * block["rotary_fraction"])
            base, scaling = ntk_base(base, scaling["factor"], turning), {"type": "default"}
        found = {"rope_theta": base, "rope_type": scaling.pop("type"), **scaling}
        fraction = block["rotary_fraction"]
        return found if fraction == 1 else {**found, "partial_rotary_factor": fraction}


def all_slide(config: Mapping, number: int) -> str:
    """Return `SLIDING`, for families whose blocks all slide if the config has a window."""
    return SLIDING


def _kind(block):
    return FULL if block["window"] is None else SLIDING


def factored(blocks: list[dict]) -> dict:
    """Return the blocks' common arguments, and a `block_pattern` of the differing ones."""
    same = {name for name in blocks[0] if all(one[name] == blocks[0][name] for one in blocks)}
    # Pattern keys that are False in all blocks must stay in the pattern.
    same -= {name for name in same & {*_OF_PATTERN} if not blocks[0][name]}
    pattern = shortest([{x: v for x, v in one.items() if x not in same} for one in blocks])
    if len(same) == len(blocks[0]):
        pattern = None
    common = {name: value for name, value in blocks[0].items() if name not in _OF_PATTERN}
    return {**common, "block_pattern": pattern}
