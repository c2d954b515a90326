"""Config keys of experts, and of the blocks that have them."""

import dataclasses
from collections.abc import Mapping, Sequence

from dtransformer.errors import InputError
from dtransformer.models.base import get_moe_config, value_or_default
from dtransformer.models.pretrained.families.keys import Key, unsupported_argument
from dtransformer.parallel.config.config import MoEConfig

# Published models drop no token. The load is balanced within each sequence.
_ALWAYS = {"dropless": True, "expert_group_size": 4096}
_COEFFICIENT = "router_aux_loss_coef"
# DeepSeek-V2's routing methods: experts of all groups, and of the chosen groups.
_METHODS = "greedy", "group_limited_greedy"


@dataclasses.dataclass(frozen=True)
class Experts:
    """Row for the config keys of `MoEConfig`.

    Args:
        keys: Tuple of `Key`s whose arguments are fields of `MoEConfig`.
        aux_loss: Default weight of the load-balancing loss, or `None` if the family has
            none.
        fixed: Dict of other fields of `MoEConfig`.
    """

    keys: tuple[Key, ...]
    aux_loss: float | None = 0.001
    fixed: Mapping = dataclasses.field(default_factory=dict)
    arguments: tuple[str, ...] = ("moe_config",)

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`."""
        fields = {**_ALWAYS, **self.fixed, "aux_loss_factor": 0.0}
        for key in self.keys:
            fields |= key.from_hf(config)
        # `transformers` adds the loss only with `output_router_logits`.
        if self.aux_loss is not None:
            factor = value_or_default(config.get(_COEFFICIENT), self.aux_loss)
            fields["aux_loss_factor"] = factor if config.get("output_router_logits") else 0.0
        return {"moe_config": MoEConfig(**fields)}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If the network has no experts, or unsupported ones.
        """
        moe = get_moe_config(arguments)
        if moe is None:
            raise InputError(
                "The family has experts, but the network has none. Save it as another family."
            )
        free = {"aux_loss_factor", "expert_group_size", *(key.argument for key in self.keys)}
        for name, expected in vars(MoEConfig(**{**_ALWAYS, **self.fixed})).items():
            value = getattr(moe, name)
            if value != expected and name not in free:
                raise unsupported_argument(f"experts with {name}", repr(value), repr(expected))
        fields = {}
        for key in self.keys:
            default_size = arguments["ffn_hidden_size"]
            values = {**vars(moe), "ffn_hidden_size": moe.ffn_hidden_size or default_size}
            fields |= key.to_hf(values)
        if self.aux_loss is None:
            return fields
        factor = moe.aux_loss_factor
        return {**fields, "output_router_logits": factor > 0, _COEFFICIENT: factor or self.aux_loss}


@dataclasses.dataclass(frozen=True)
class GroupLimitedExperts(Experts):
    """Row of DeepSeek-V2's experts. Only one routing method selects groups of experts."""

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`.

        Raises:
            InputError: If the routing method is unknown.
        """
        moe_config = super().from_hf(config)["moe_config"]
        method = config.get("topk_method") or _METHODS[0]
        if method not in _METHODS:
            raise InputError(f"`topk_method` must be one of {', '.join(_METHODS)}, got {method!r}.")
        if method == _METHODS[0]:
            moe_config = dataclasses.replace(moe_config, routing_groups=1, routing_groups_chosen=1)
        return {"moe_config": moe_config}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`."""
        fields = super().to_hf(arguments)
        return {**fields, "topk_method": _METHODS[fields["topk_group"] < fields["n_group"]]}


@dataclasses.dataclass(frozen=True)
class FirstDenseBlocks:
    """Config key of the number of first blocks, which have no experts.

    Args:
        default: Default number of these blocks.
    """

    default: int

    def from_hf(self, config: Mapping) -> list[bool]:
        """Return for each block of a config whether it has experts."""
        num_dense = value_or_default(config.get("first_k_dense_replace"), self.default)
        return [index >= num_dense for index in range(config["num_hidden_layers"])]

    def to_hf(self, has_experts: Sequence[bool]) -> dict:
        """Return the config keys.

        Raises:
            InputError: If a block with experts precedes one without.
        """
        num_dense = has_experts.count(False)
        if any(has_experts[:num_dense]):
            raise InputError(
                "Blocks without experts must precede all others in this family. Save the network as "
                "another family."
            )
        return {"first_k_dense_replace": num_dense}


class QwenDenseBlocks:
    """Config keys of Qwen3-MoE's blocks without experts."""

    def from_hf(self, config: Mapping) -> list[bool]:
        """Return for each block of a config whether it has experts."""
        step = config.get("decoder_sparse_step") or 1
        dense = config.get("mlp_only_layers") or ()
        num_blocks = config["num_hidden_layers"]
        return [i not in dense and (i + 1) % step == 0 for i in range(num_blocks)]

    def to_hf(self, has_experts: Sequence[bool]) -> dict:
        """Return the config keys."""
        dense = [index for index, x in enumerate(has_experts) if not x]
        return {"mlp_only_layers": dense, "decoder_sparse_step": 1}
