"""GPT-2: Radford et al., 2019, "Language models are unsupervised multitask learners"."""

from dtransformer.models.pretrained.families.family import Family
from dtransformer.models.pretrained.families.parallel import CLASSIC, FUSED, MAPPING, PROJECTION
from dtransformer.models.pretrained.families.parts import Activation, Derived, Field, epsilon

GPT2 = Family(
    "GPT2LMHeadModel",
    parts=(
        Field("hidden_size", "n_embd"),
        Field("num_heads", "n_head"),
        Field("num_layers", "n_layer"),
        Field("max_length", "n_positions"),
        Derived("ffn_hidden_size", "n_inner", lambda x: 4 * x["n_embd"]),
        epsilon(1e-5, "layer_norm_epsilon", own=1e-5),
        Field("dropout_rate", "resid_pdrop", 0.1),
        Field("attention_dropout_rate", "attn_pdrop", 0.1),
        Field("embedding_dropout_rate", "embd_pdrop", 0.1),
        Field("tied_head", "tie_word_embeddings", True),
        Activation("activation_function", "gelu_new"),
    ),
    usual_parts=(),
    fixed={**CLASSIC, "positions": "learned", "window": None},
    refused={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    ids={"bos_token_id": 50256, "eos_token_id": 50256},
    block="h.{}.",
    attention={"attn.c_attn": FUSED, "attn.c_proj": ("attention/output",)},
    dense={"mlp.c_fc": MAPPING, "mlp.c_proj": PROJECTION},
    is_transposed=False,  # GPT-2 has kernels as [inputs, outputs]
    norms={"ln_1": "attention_norm", "ln_2": "feed_forward_norm"},
    tables={"wte.weight": "embedding/table", "wpe.weight": "positions/table"},
    top={"ln_f": "blocks/final_norm", "lm_head": "head"},
    prefix="transformer.",
    heads=("lm_head", "score", "classifier"),
    ignored=(".attn.bias", ".attn.masked_bias"),
)
