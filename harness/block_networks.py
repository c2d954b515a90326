"""Networks that together cover all block variants of published model families."""

from dtransformer import MoEConfig
from dtransformer.models import CausalLM, MaskedLM

_SIZES = {"hidden_size": 32, "num_heads": 8, "ffn_hidden_size": 64, "dropout_rate": 0.0}
_DECODER = {
    **_SIZES,
    "hidden_act": "silu",
    "positions": "rotary",
    "embedding_scale": 1.0,
    "norm": "rms_norm",
    "gated": True,
    "use_bias": False,
    "num_kv_heads": 4,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4}
_EXPERTS = {"expert_num": 4, "num_experts_chosen": 2, "dropless": True, "expert_group_size": 8}
_GROUPED_EXPERTS = {
    **_EXPERTS,
    "ffn_hidden_size": 24,
    "shared_experts": 1,
    "router_type": "sigmoid",
    "routing_groups": 2,
    "routing_groups_chosen": 1,
}


def gemma(vocab_size, num_layers):
    """Gemma's blocks: norms around sublayers, windows in every other block, soft caps."""
    changes = {"norm": "rms_norm_unit_offset", "qk_norm": "rms_norm_unit_offset", "soft_cap": 5.0}
    changes |= {"norm_placement": "sandwich", "embedding_scale": None, "logits_soft_cap": 3.0}
    pattern = [{"window": 4, "rotary_base": 100.0}, {"window": None}]
    return CausalLM(
        vocab_size, num_layers=num_layers, **{**_DECODER, **changes}, block_pattern=pattern
    )


def olmo(vocab_size, num_layers):
    """OLMo's blocks: output norms, query and key norms over all heads, YaRN.

    Also has options of Granite and Ministral 3.
    """
    changes = {"norm_placement": "output", "qk_norm": "rms_norm_all_heads", "tied_head": False}
    changes |= {"residual_scale": 0.5, "logits_scale": 2.0, "rotary_fraction": 0.5}
    pattern = [{"window": 4}, {"rotary_scaling": {**_YARN, "llama_4_scaling_beta": 0.5}}]
    return CausalLM(vocab_size, num_layers=num_layers, **_DECODER, **changes, block_pattern=pattern)


def falcon(vocab_size, num_layers):
    """Falcon's blocks with one norm, Command R's norms, and Nemotron's ungated activation."""
    changes = {"norm_placement": "parallel_one_norm", "norm": "layer_norm_without_beta"}
    changes |= {"gated": False, "hidden_act": "relu2", "rotary_fraction": 0.5, "logits_scale": 0.5}
    pattern = [{"window": 4}, {"rotary_base": None}]
    return CausalLM(
        vocab_size, num_layers=num_layers, **{**_DECODER, **changes}, block_pattern=pattern
    )


def glm_experts(vocab_size, num_layers):
    """GLM-4.5's blocks: a dense first block, experts of another size, some blocks without positions."""
    expert_options = {"group_score": "max", "normalizes_gates": False, "gate_scale": 1.5}
    experts = MoEConfig(**_GROUPED_EXPERTS, **expert_options)
    pattern = [{"experts": False}, {"rotary_base": None}]
    return CausalLM(
        vocab_size,
        num_layers=num_layers,
        **_DECODER,
        qkv_bias=True,
        moe_config=experts,
        block_pattern=pattern,
    )


def gpt_oss(vocab_size, num_layers):
    """gpt-oss' blocks: sinks, windows in every other block, router biases and a clamped gate."""
    experts = MoEConfig(**_EXPERTS, router_bias=True)
    changes = {"hidden_act": "clamped_swiglu", "use_bias": True, "sinks": True, "tied_head": False}
    changes |= {"rotary_scaling": _YARN, "block_pattern": [{"window": 4}, {"window": None}]}
    return CausalLM(
        vocab_size, num_layers=num_layers, **{**_DECODER, **changes}, moe_config=experts
    )


def deepseek(vocab_size, num_layers):
    """DeepSeek-V3's blocks: latent attention, routing groups, a dense first block."""
    changes = {"num_kv_heads": None, "head_dim": 6, "tied_head": False, "rotary_scaling": _YARN}
    changes["latent"] = {"kv_rank": 10, "rotary_dim": 4, "value_dim": 5, "query_rank": 12}
    blocks = [{"experts": False}, *[{"experts": True}] * (num_layers - 1)]
    return CausalLM(
        vocab_size,
        num_layers=num_layers,
        **{**_DECODER, **changes},
        moe_config=MoEConfig(**_GROUPED_EXPERTS),
        block_pattern=blocks,
    )


def hunyuan(vocab_size, num_layers):
    """HunYuan's blocks: query and key norms after the rotary embedding."""
    changes = {"qk_norm": "rms_norm", "qk_norm_after_rotary": True, "tied_head": False}
    changes["rotary_scaling"] = {"type": "linear", "factor": 2.0}
    return CausalLM(vocab_size, num_layers=num_layers, **_DECODER, **changes)


def apertus(vocab_size, num_layers):
    """Apertus' blocks: query and key norms, and an activation with trained weights."""
    changes = {"qk_norm": "rms_norm", "gated": False, "hidden_act": "xielu", "tied_head": False}
    return CausalLM(vocab_size, num_layers=num_layers, **{**_DECODER, **changes})


def modernbert(vocab_size, num_layers):
    """ModernBERT's blocks: an encoder with rotary positions, two-sided windows, norms without beta."""
    changes = {"positions": "rotary", "norm": "layer_norm_without_beta", "norm_epsilon": 1e-5}
    changes |= {"gated": True, "use_bias": False, "post_layernorm_residual": False}
    windowed = {"window": 4, "rotary_base": 100.0}
    blocks = [{"attention_norm": False}, *[windowed] * (num_layers - 1)]
    return MaskedLM(
        vocab_size,
        num_layers=num_layers,
        num_token_types=0,
        **_SIZES,
        **changes,
        block_pattern=blocks,
    )


# Names of the networks in the harness. They use the batches of `causal` and `bert`.
DECODERS = {
    "gemma": gemma,
    "olmo": olmo,
    "falcon": falcon,
    "glm_experts": glm_experts,
    "gpt_oss": gpt_oss,
    "deepseek": deepseek,
    "hunyuan": hunyuan,
    "apertus": apertus,
}
ENCODERS = {"modernbert": modernbert}
