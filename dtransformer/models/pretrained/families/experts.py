"""Config keys of experts, and the families Mixtral and Qwen3-MoE.

Reference:
    - [Jiang et al., 2024, Mixtral of experts](https://arxiv.org/abs/2401.04088)
    - [Yang et al., 2025, Qwen3](https://arxiv.org/abs/2505.09388)
"""

import dataclasses
from collections.abc import Mapping, Sequence

from dtransformer.errors import InputError
from dtransformer.models.base import get_moe_config, value_or_default
from dtransformer.models.pretrained.families.blocks import Blocks, Rotary, Windows
from dtransformer.models.pretrained.families.family import Family, FileNames, llama_keys
from dtransformer.models.pretrained.families.keys import (
    Key,
    epsilon,
    kv_heads,
    unsupported_argument,
)
from dtransformer.models.pretrained.families.llama import DEFAULT_IDS, QK_EPSILON
from dtransformer.models.pretrained.families.weights import EXPERTS, GATED, llama_weights
from dtransformer.parallel.config.config import MoEConfig

# Published models drop no token. The load is balanced within each sequence.
_ALWAYS = {"dropless": True, "expert_group_size": 4096}
_COEFFICIENT = "router_aux_loss_coef"


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


# Config keys of DeepSeek -> fields of `MoEConfig`.
_DEEPSEEK_KEYS = {
    "n_routed_experts": "expert_num",
    "num_experts_per_tok": "num_experts_chosen",
    "moe_intermediate_size": "ffn_hidden_size",
    "n_shared_experts": "shared_experts",
    "routed_scaling_factor": "gate_scale",
    "n_group": "routing_groups",
    "topk_group": "routing_groups_chosen",
    "norm_topk_prob": "normalizes_gates",
}


def deepseek_experts(
    row: type[Experts] = Experts, fixed: Mapping | None = None, **defaults
) -> Experts:
    """Return the row for DeepSeek's experts, which have no load-balancing loss.

    Args:
        row: Class of the result.
        fixed: Dict of fields of `MoEConfig` that are the same for the family.
        **defaults: Config keys of the family with their defaults.
    """
    keys = (Key(key, _DEEPSEEK_KEYS[key], default) for key, default in defaults.items())
    return row(tuple(keys), aux_loss=None, fixed=fixed or {})


# Blocks for multi-token prediction follow the last block.
NEXT_TOKEN_BLOCKS = FileNames(skipped=("model.layers.{num_layers}.",))


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


class _QwenDenseBlocks:
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


MIXTRAL = Family(
    "MixtralForCausalLM",
    keys=llama_keys(
        kv_heads(8),
        epsilon(1e-5),
        Blocks(Rotary(1e6), Windows()),
        Experts(
            (
                Key("num_local_experts", "expert_num", 8),
                Key("num_experts_per_tok", "num_experts_chosen", 2),
            )
        ),
    ),
    weights=llama_weights(
        feed_forward={
            "block_sparse_moe.gate": "feed_forward/router",
            "block_sparse_moe.experts.{e}.w1": "feed_forward/gate",
            "block_sparse_moe.experts.{e}.w3": "feed_forward/mapping",
            "block_sparse_moe.experts.{e}.w2": "feed_forward/projection",
        }
    ),
    # `transformers` also multiplies the experts' inputs by this noise.
    supported_values={"router_jitter_noise": 0.0},
    ids=DEFAULT_IDS,
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    keys=llama_keys(
        QK_EPSILON,
        kv_heads(4),
        Blocks(dense_blocks=_QwenDenseBlocks()),
        Experts(
            (
                Key("num_local_experts", "expert_num", 128, older="num_experts"),
                Key("num_experts_per_tok", "num_experts_chosen", 8),
                Key("moe_intermediate_size", "ffn_hidden_size", 768),
                Key("norm_topk_prob", "normalizes_gates", False),
            )
        ),
    ),
    weights=llama_weights(feed_forward={**GATED, **EXPERTS}),
    fixed={"qk_norm": "rms_norm"},
    supported_values={"attention_bias": False, "use_sliding_window": False},
)
