"""Config keys of experts, and the families Mixtral and Qwen3-MoE.

Reference:
    - [Jiang et al., 2024, Mixtral of experts](https://arxiv.org/abs/2401.04088)
    - [Yang et al., 2025, Qwen3](https://arxiv.org/abs/2505.09388)
"""

import dataclasses
from collections.abc import Mapping

from dtransformer.errors import InputError
from dtransformer.models.base import get_moe_config
from dtransformer.models.pretrained.families.blocks import Blocks, always_sliding
from dtransformer.models.pretrained.families.family import Family
from dtransformer.models.pretrained.families.llama import DEFAULT_IDS, QK_EPSILON
from dtransformer.models.pretrained.families.parts import differs, epsilon, kv_heads
from dtransformer.parallel.config.config import MoEConfig

# Published models drop no token. The load is balanced within each sequence.
_ALWAYS = {"dropless": True, "expert_group_size": 4096}
_COEFFICIENT = "router_aux_loss_coef"


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mapping between config keys and `MoEConfig`.

    Args:
        fields: Dict from fields of `MoEConfig` to tuples of a config key and its default.
        aux_loss: Default weight of the load-balancing loss, or `None` if the family has
            none.
        fixed: Dict of other fields of `MoEConfig`.
        renamed: Dict from config keys to their names in older configs.
    """

    fields: Mapping[str, tuple]
    aux_loss: float | None = 0.001
    fixed: Mapping = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    arguments: tuple[str, ...] = ("moe_config",)

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`."""
        fields = {**_ALWAYS, **self.fixed, "aux_loss_factor": 0.0}
        for name, (field, default) in self.fields.items():
            value = config.get(field)
            value = config.get(self.renamed.get(field)) if value is None else value
            fields[name] = default if value is None else value
        # `transformers` adds the loss only with `output_router_logits`.
        if self.aux_loss is not None:
            factor = config.get(_COEFFICIENT)
            factor = self.aux_loss if factor is None else factor
            fields["aux_loss_factor"] = factor if config.get("output_router_logits") else 0.0
        return {"moe_config": MoEConfig(**fields)}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`.

        Raises:
            InputError: If the network has no experts, or unsupported ones.
        """
        moe = get_moe_config(arguments)
        if moe is None:
            raise InputError(
                "The family has experts, but the network has none. Save it as another family."
            )
        free = {"aux_loss_factor", *_ALWAYS, *self.fields}
        plain = MoEConfig(**{**_ALWAYS, **self.fixed})
        for name, value in vars(plain).items():
            if getattr(moe, name) != value and (name not in free or name == "dropless"):
                raise differs(f"experts with {name}", repr(getattr(moe, name)), repr(value))
        ffn_hidden_size = arguments["ffn_hidden_size"]  # the meaning of `None`
        moe = dataclasses.replace(moe, ffn_hidden_size=moe.ffn_hidden_size or ffn_hidden_size)
        fields = {field: getattr(moe, name) for name, (field, _) in self.fields.items()}
        if self.aux_loss is None:
            return fields
        factor = moe.aux_loss_factor
        return {**fields, "output_router_logits": factor > 0, _COEFFICIENT: factor or self.aux_loss}


def _mlp_only(config, index):
    """Return whether a Qwen3-MoE block has no experts."""
    step = config.get("decoder_sparse_step") or 1
    return index in (config.get("mlp_only_layers") or ()) or (index + 1) % step != 0


def _mlp_only_layers(are_dense):
    dense = [index for index, is_dense in enumerate(are_dense) if is_dense]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def first_dense(default: int) -> tuple:
    """Return functions for a family whose first blocks have no experts; see `Blocks.dense`.

    Args:
        default: Default number of these blocks.
    """
    field = "first_k_dense_replace"

    def is_dense(config, index):
        value = config.get(field)
        return index < (default if value is None else value)

    def fields(are_dense):
        num_dense = sum(are_dense)
        if not all(are_dense[:num_dense]):
            raise InputError(
                "Blocks without experts must precede all others in this family. Save the network as "
                "another family."
            )
        return {field: num_dense}

    return is_dense, fields


def deepseek_experts(*defaults, kind: type[Experts] = Experts, **fixed) -> Experts:
    """Return an `Experts` part with DeepSeek's config keys and no load-balancing loss.

    Args:
        *defaults: Defaults of the keys, in the order of `_DEEPSEEK`.
        kind: Class of the result.
        **fixed: Other fields of `MoEConfig`.
    """
    fields = {name: (field, x) for (name, field), x in zip(_DEEPSEEK.items(), defaults)}
    return kind(fields, aux_loss=None, fixed=fixed)


_DEEPSEEK = {
    "expert_num": "n_routed_experts",
    "num_experts_chosen": "num_experts_per_tok",
    "ffn_hidden_size": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "gate_scale": "routed_scaling_factor",
    "routing_groups": "n_group",
    "routing_groups_chosen": "topk_group",
    "normalizes_gates": "norm_topk_prob",
}


def next_tokens(arguments: Mapping) -> tuple[str, ...]:
    """Return prefixes of the multi-token prediction weights, which follow the last block."""
    return (f"model.layers.{arguments['num_layers']}.",)


_MIXTRAL_NAMES = {"w1": "gate", "w3": "mapping", "w2": "projection"}
MIXTRAL = Family(
    "MixtralForCausalLM",
    parts=(
        kv_heads(8),
        epsilon(1e-5),
        Blocks(base=1e6, kind_rule=always_sliding),
        Experts(
            {
                "expert_num": ("num_local_experts", 8),
                "num_experts_chosen": ("num_experts_per_tok", 2),
            }
        ),
    ),
    # `transformers` also multiplies the experts' inputs by this noise.
    supported_values={"router_jitter_noise": 0.0},
    ids=DEFAULT_IDS,
    router="block_sparse_moe.gate",
    experts={
        f"block_sparse_moe.experts.{{}}.{name}": f"feed_forward/{own}"
        for name, own in _MIXTRAL_NAMES.items()
    },
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    parts=(
        QK_EPSILON,
        kv_heads(4),
        Blocks(dense=(_mlp_only, _mlp_only_layers)),
        Experts(
            {
                "expert_num": ("num_local_experts", 128),
                "num_experts_chosen": ("num_experts_per_tok", 8),
                "ffn_hidden_size": ("moe_intermediate_size", 768),
                "normalizes_gates": ("norm_topk_prob", False),
            },
            renamed={"num_local_experts": "num_experts"},
        ),
    ),
    fixed={"qk_norm": "rms_norm"},
    supported_values={"attention_bias": False, "use_sliding_window": False},
)
