"""Families of published models as rows: a tiny config of each, and a field that is refused.

A row has at least one whole period of the family's blocks, and windows shorter than its texts.
"""

import typing

SLIDING, FULL = "sliding_attention", "full_attention"


class Row(typing.NamedTuple):
    """A family.

    Args:
        config: fields besides those of all rows of its kind.
        refused: fields that the family's blocks do not have, and what the error says.
        family: its `model_type`; the row's name by default.
    """

    config: dict
    refused: tuple[dict, str]
    family: str | None = None


NO_BIAS = {"attention_bias": True}, "`attention_bias=true` is not supported"
LONGROPE = {"rope_type": "longrope", "factor": 2.0}, "'longrope', expected one of"
NOT_ROTARY = {"rope_parameters": LONGROPE[0]}, LONGROPE[1]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BY_KIND = {
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
}
EXPERTS = {"num_experts_per_tok": 2}
LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
}
# Decoders: besides SIZES of `reference_models`.
TEXTS = {
    "opt": Row(
        {"ffn_dim": 48, "dropout": 0.0},
        (
            {"word_embed_proj_dim": 16},
            "`hidden_size=32` and `word_embed_proj_dim=16` must be equal",
        ),
    ),
    "qwen2_yarn": Row({"rope_parameters": YARN}, NOT_ROTARY, "qwen2"),
    "ministral3": Row(
        {
            "head_dim": 12,
            "sliding_window": 5,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 2.0,
            },
        },
        NOT_ROTARY,
    ),
    "qwen3": Row({"head_dim": 12}, NO_BIAS),
    "phi3": Row({"sliding_window": 5}, NOT_ROTARY),
    "starcoder2": Row({"sliding_window": 5}, NOT_ROTARY),
    "stablelm": Row(
        {"use_qkv_bias": True},
        ({"qk_layernorm": True}, "`qk_layernorm=true` is not supported"),
    ),
    "stablelm_parallel": Row(
        {"use_parallel_residual": True},
        ({"qk_layernorm": True}, "`qk_layernorm=true` is not supported"),
        "stablelm",
    ),
    "gpt_neox": Row({}, ({"attention_bias": False}, "`attention_bias=false` is not supported")),
    "gpt_neox_in_turn": Row({"use_parallel_residual": False}, NOT_ROTARY, "gpt_neox"),
    "phi": Row({}, ({"qk_layernorm": True}, "`qk_layernorm=true` is not supported")),
    "falcon": Row({"multi_query": True}, ({"alibi": True}, "`alibi=true` is not supported")),
    "falcon_groups": Row(
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 48},
        ({"parallel_attn": False}, "`parallel_attn=false` is not supported"),
        "falcon",
    ),
    "cohere": Row({}, ({"use_qk_norm": True}, "`use_qk_norm=true` is not supported")),
    "cohere2": Row(
        {"num_hidden_layers": 4, "sliding_window": 5},
        (
            {"sliding_window": None},
            "sliding_window=null. .blocks without positions. is not supported",
        ),
    ),
    "apertus": Row({"rope_parameters": LLAMA_3}, NO_BIAS),
    "arcee": Row({}, NO_BIAS),
    "nemotron": Row({}, NO_BIAS),
    "helium": Row({"head_dim": 8}, NO_BIAS),
    "ernie4_5": Row({"head_dim": 12, "use_bias": True}, NOT_ROTARY),
    "exaone4": Row({"num_hidden_layers": 4, "sliding_window": 5}, NOT_ROTARY),
    "seed_oss": Row(
        {"head_dim": 12, "residual_dropout": 0.0},
        ({"attention_out_bias": True}, "`attention_out_bias=true` is not supported"),
    ),
    "smollm3": Row({"num_hidden_layers": 4}, NO_BIAS),
    "granite": Row(
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
        NO_BIAS,
    ),
    "hunyuan_v1_dense": Row({"head_dim": 12}, NO_BIAS),
    "hunyuan_v1_dense_alpha": Row(
        {
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 100.0,
                "alpha": 50.0,
                "factor": 1.0,
            },
        },
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic', expected one"),
        "hunyuan_v1_dense",
    ),
    "gemma": Row({"head_dim": 12}, NO_BIAS),
    "gemma2": Row(
        {
            "head_dim": 12,
            "sliding_window": 5,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        (
            {"use_bidirectional_attention": True},
            "`use_bidirectional_attention=true` is not supported",
        ),
    ),
    "gemma3": Row(
        {
            "head_dim": 12,
            "sliding_window": 5,
            "query_pre_attn_scalar": 10,
            "rope_parameters": BY_KIND,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, SLIDING, FULL],
        },
        NO_BIAS,
        "gemma3_text",
    ),
    "olmo2": Row({}, NO_BIAS),
    "olmo3": Row(
        {
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "rope_parameters": {**BY_KIND, FULL: YARN},
        },
        NO_BIAS,
    ),
    "olmoe": Row(
        {"num_experts": 4, **EXPERTS}, ({"clip_qkv": 8.0}, "`clip_qkv=8.0` is not supported")
    ),
    "qwen3_moe": Row(
        {
            "num_local_experts": 4,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            **EXPERTS,
        },
        NO_BIAS,
    ),
    "glm": Row({"head_dim": 12}, NOT_ROTARY),
    "glm4": Row({"head_dim": 8}, NOT_ROTARY),
    "glm4_moe": Row(
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
            **EXPERTS,
        },
        NOT_ROTARY,
    ),
    "gpt_oss": Row(
        {
            "head_dim": 12,
            "intermediate_size": 64,  # a multiple of 32, which MXFP4's blocks have
            "num_local_experts": 4,
            "sliding_window": 5,
            "rope_parameters": {**YARN, "truncate": False},
            **EXPERTS,
        },
        ({"swiglu_limit": 6.0}, "`swiglu_limit=6.0` is not supported"),
    ),
    "deepseek_v2": Row(
        {
            **LATENTS,
            "q_lora_rank": None,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            **EXPERTS,
        },
        NO_BIAS,
    ),
    "deepseek_v3": Row(
        {
            **LATENTS,
            "q_lora_rank": 12,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
            **EXPERTS,
        },
        ({"scoring_func": "softmax"}, '`scoring_func="softmax"` is not supported'),
    ),
}
# Encoders: besides BERT of `reference_models`.
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
NO_HEAD_OF_ITS_OWN = (
    {"tie_word_embeddings": False},
    "missing vocab_projector.weight",
)
NOT_GELU = {"hidden_act": "relu"}, '`hidden_act="relu"` is not supported'
MASKED = {
    "xlm-roberta": Row(ROBERTA, NOT_GELU),
    "camembert": Row(ROBERTA, NOT_GELU),
    "distilbert": Row(
        {
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        NO_HEAD_OF_ITS_OWN,
    ),
    "modernbert": Row(
        {
            "num_hidden_layers": 4,
            "local_attention": 8,
            "rope_parameters": BY_KIND,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        ({"norm_bias": True}, "`norm_bias=true` is not supported"),
    ),
}
# Encoder–decoders: besides BART of `reference_models`.
NO_NORM = {"add_final_layer_norm": False}, "`add_final_layer_norm=false` is not supported"
PAIRS = {
    "mbart": Row({"scale_embedding": True}, NO_NORM),
    "pegasus": Row({"scale_embedding": True, "decoder_start_token_id": 3}, NO_NORM),
    "m2m_100": Row(
        {
            "scale_embedding": True,
            "attention_dropout": 0.0,
            "encoder_layerdrop": 0.0,
            "decoder_layerdrop": 0.0,
        },
        NO_NORM,
    ),
    "mt5": Row(
        {
            "d_kv": 6,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 1,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
            "dropout_rate": 0.0,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "decoder_start_token_id": 3,
        },
        ({"feed_forward_proj": "twice-gelu"}, "got 'twice-gelu'"),
    ),
}
ROWS = {**TEXTS, **MASKED, **PAIRS}
# Families whose presets begin with something else than the family's name, regular expressions.
PRESETS_OF = {
    "llama": r"llama[\d.]*_",
    "phi3": "phi3_|phi4",
    "gpt_neox": "gpt_neox_|pythia_",
    "qwen3": r"qwen3_(?!.*_a\d)",
    "qwen3_moe": r"qwen3_.*_a\d",
    "gemma3_text": "gemma3_",
    "glm": "glm4_9b$",
    "glm4": "glm4_9b_0414",
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "m2m_100": "nllb_",
    "xlm-roberta": "xlm_roberta_",
}
# Families whose blocks another network of the harness has than most of their kind.
FORM_OF = {
    **dict.fromkeys(("gpt2", "opt"), "causal"),
    "mixtral": "moe",
    "modernbert": "modernbert",
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "gemma"),
    **dict.fromkeys(("ministral3", "olmo2", "olmo3", "exaone4", "granite", "smollm3"), "olmo"),
    **dict.fromkeys(("glm4_moe", "qwen3_moe", "olmoe"), "glm_experts"),
    **dict.fromkeys(("gpt_neox", "phi", "falcon", "cohere", "cohere2", "nemotron"), "falcon"),
    **dict.fromkeys(("t5", "mt5"), "t5"),
    "gpt_oss": "gpt_oss",
    "hunyuan_v1_dense": "hunyuan",
    "apertus": "apertus",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek"),
}
# Families whose default config in `transformers` is a published size, and its preset.
DEFAULT_SIZES = {
    "gpt2": "gpt2_small",
    "opt": "opt_125m",
    "llama": "llama_7b",
    "mistral": "mistral_7b",
    "ministral3": "ministral3_8b",
    "phi3": "phi3_mini",
    "gpt_oss": "gpt_oss_120b",
    "mixtral": "mixtral_8x7b",
    "smollm3": "smollm3_3b",
    "gemma": "gemma_7b",
    "gemma2": "gemma2_2b",
    "starcoder2": "starcoder2_3b",
    "stablelm": "stablelm_3b",
    "glm": "glm4_9b",
    "glm4": "glm4_9b_0414",
    "gpt_neox": "gpt_neox_20b",
    "phi": "phi_1",
    "falcon": "falcon_7b",
    "cohere": "cohere_command_r",
    "helium": "helium_2b",
    "ernie4_5": "ernie4_5_0.3b",
    "modernbert": "modernbert_base",
    "t5": "t5_small",
    "distilbert": "distilbert_base",
    "bart": "bart_large",
}
# Rows whose adapters are compared with those of `peft`.
ADAPTERS = "llama", "mistral", "qwen2", "gpt2", "glm"
FAMILIES = {name: row.family or name for name, row in ROWS.items()}
