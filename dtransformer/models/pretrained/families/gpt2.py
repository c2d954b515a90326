"""GPT-2 and OPT: decoders with learned positions.

Reference:
    - Radford et al., 2019, "Language models are unsupervised multitask learners"
    - [Zhang et al., 2022, OPT](https://arxiv.org/abs/2205.01068)
"""

from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.family import SIZES, Family
from dtransformer.models.pretrained.families.parallel import CLASSIC
from dtransformer.models.pretrained.families.parts import TIED, Field, epsilon, hidden_act

GPT2 = Family(
    "GPT2LMHeadModel",
    parts=(
        Field("hidden_size", "n_embd"),
        Field("num_heads", "n_head"),
        Field("num_layers", "n_layer"),
        Field("max_length", "n_positions"),
        Field("ffn_hidden_size", "n_inner", lambda x: 4 * x["n_embd"]),
        epsilon(1e-5, "layer_norm_epsilon", none_value=1e-5),
        Field("dropout_rate", "resid_pdrop", 0.1),
        Field("attention_dropout_rate", "attn_pdrop", 0.1),
        Field("embedding_dropout_rate", "embd_pdrop", 0.1),
        TIED,
        hidden_act("activation_function", "gelu_new"),
    ),
    default_parts=(),
    fixed={**CLASSIC, "positions": "learned"},
    supported_values={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    ids={"bos_token_id": 50256, "eos_token_id": 50256},
    block="h.{}.",
    attention={"attn.c_attn": paths.QUERY_KEY_VALUE, "attn.c_proj": paths.OUTPUT},
    dense={"mlp.c_fc": paths.MAPPING, "mlp.c_proj": paths.PROJECTION},
    is_transposed=False,  # GPT-2 stores kernels as [inputs, outputs]
    norms={"ln_1": "attention_norm", "ln_2": "feed_forward_norm"},
    tables={"wte.weight": "embedding/table", "wpe.weight": "positions/table"},
    top={"ln_f": "blocks/final_norm", "lm_head": "head"},
    prefix="transformer.",
    heads=("lm_head", "score", "classifier"),
    ignored=(".attn.bias", ".attn.masked_bias"),
)
OPT = Family(
    "OPTForCausalLM",
    parts=(
        Field("hidden_size", "hidden_size", also=("word_embed_proj_dim",)),
        Field("ffn_hidden_size", "ffn_dim"),
        Field("dropout_rate", "dropout", 0.1),
        Field("attention_dropout_rate", "attention_dropout", 0.0),
        TIED,
        Field("use_bias", "enable_bias", True, same=("qkv_bias",)),
        hidden_act("activation_function", "relu"),
    ),
    default_parts=SIZES,
    fixed={**CLASSIC, "positions": "learned", "position_offset": 2, "embedding_dropout_rate": 0.0},
    supported_values={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
    },
    ids={"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
    block="decoder.layers.{}.",
    attention=paths.attention("self_attn.{}_proj", *"qkv", "out"),
    dense={"fc1": paths.MAPPING, "fc2": paths.PROJECTION},
    norms={"self_attn_layer_norm": "attention_norm", "final_layer_norm": "feed_forward_norm"},
    tables={
        "decoder.embed_tokens.weight": "embedding/table",
        "decoder.embed_positions.weight": "positions/table",
    },
    top={"decoder.final_layer_norm": "blocks/final_norm", "lm_head": "head"},
    prefix="model.",
)
