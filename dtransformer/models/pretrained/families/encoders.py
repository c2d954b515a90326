"""DistilBERT and ModernBERT.

References: Sanh et al., 2019, "DistilBERT", arXiv 1910.01108; Warner et al., 2024, "ModernBERT", arXiv
2412.13663.
"""

from dtransformer.models.masked_lm import MaskedLM
from dtransformer.models.pretrained.families.blocks import FULL, SLIDING, Blocks
from dtransformer.models.pretrained.families.parts import HEADS, Activation, Field
from dtransformer.models.pretrained.families.stack import Stack

# What configs of encoders cannot say otherwise, where no part of theirs does.
_PLAIN = {
    "positions": "learned",
    "norm": "layer_norm",
    "gated": False,
    "use_bias": True,
    "embedding_scale": 1.0,
    "post_layernorm_residual": True,
    "tied_head": True,
    "next_sentence": False,
    "num_token_types": 0,
    "position_offset": 0,
    "window": None,
    "block_pattern": None,
    "moe_config": None,
    "moe_every": 1,
}
_ENCODER = {
    "base": _PLAIN,
    "usual_parts": (),
    "network": MaskedLM,
}
_IDS = {"special_ids": {"pad_id": "pad_token_id"}}
DISTILBERT = Stack(
    "DistilBertForMaskedLM",
    parts=(
        Field("hidden_size", "dim", 768),
        Field("num_heads", "n_heads", 12),
        Field("num_layers", "n_layers", 6),
        Field("ffn_hidden_size", "hidden_dim", 3072),
        Field("max_length", "max_position_embeddings", 512),
        Field("dropout_rate", "dropout", 0.1, same=("embedding_dropout_rate",)),
        Field("attention_dropout_rate", "attention_dropout", 0.1),
        Activation("activation", "gelu"),
    ),
    fixed={"norm_epsilon": 1e-12},
    refused={"tie_word_embeddings": True},
    ids={"pad_token_id": 0},
    block="distilbert.transformer.layer.{}.",
    attention={
        "attention.q_lin": ("attention/query",),
        "attention.k_lin": ("attention/key",),
        "attention.v_lin": ("attention/value",),
        "attention.out_lin": ("attention/output",),
    },
    dense={"ffn.lin1": ("feed_forward/mapping",), "ffn.lin2": ("feed_forward/projection",)},
    norms={"sa_layer_norm": "attention_norm", "output_layer_norm": "feed_forward_norm"},
    tables={
        "distilbert.embeddings.word_embeddings.weight": "embedding/table",
        "distilbert.embeddings.position_embeddings.weight": "positions/table",
    },
    top={
        "distilbert.embeddings.LayerNorm": "embedding_norm",
        "vocab_transform": "head/dense",
        "vocab_layer_norm": "head/norm",
    },
    vectors={"vocab_projector.bias": "head/logits/bias"},
    others={**_IDS, "copies": ("vocab_projector.weight",), "ignored": ("position_ids",)},
    **_ENCODER,
).family()


def _full_each(config, number):
    """Return the kind of a block: by default each third is full, the first one among them."""
    return SLIDING if number % (config.get("global_attn_every_n_layers") or 3) else FULL


MODERNBERT = Stack(
    "ModernBertForMaskedLM",
    parts=(
        Field("hidden_size", "hidden_size", 768),
        HEADS,
        Field("num_layers", "num_hidden_layers", 22),
        Field("ffn_hidden_size", "intermediate_size", 1152),
        Field("max_length", "max_position_embeddings", 8192),
        Field("norm_epsilon", "norm_eps", 1e-5),
        Field("dropout_rate", "mlp_dropout", 0.0),
        Field("embedding_dropout_rate", "embedding_dropout", 0.0),
        Field("attention_dropout_rate", "attention_dropout", 0.0),
        Blocks(
            base=160000.0,
            sliding_base=10000.0,
            kind_of=_full_each,
            window=128,
            window_field="local_attention",
            # Theirs is what is seen on both sides together, ours on one, with the position itself.
            window_of=(lambda both: both // 2 + 1, lambda one: 2 * (one - 1)),
            has_types=True,
            by_kind=True,
            older={FULL: "global_rope_theta", SLIDING: "local_rope_theta"},
            is_first_plain=True,
        ),
    ),
    fixed={
        "positions": "rotary",
        "norm": "layer_norm_without_beta",
        "gated": True,
        "use_bias": False,
        "post_layernorm_residual": False,
        "hidden_act": "gelu",
    },
    refused={
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
        **dict.fromkeys(("decoder_bias", "tie_word_embeddings"), True),
        **dict.fromkeys(("hidden_activation", "classifier_activation"), "gelu"),
    },
    ids={"pad_token_id": 50283},
    block="model.layers.{}.",
    attention={
        "attn.Wqkv": ("attention/query", "attention/key", "attention/value"),
        "attn.Wo": ("attention/output",),
    },
    dense={
        "mlp.Wi": ("feed_forward/gate", "feed_forward/mapping"),
        "mlp.Wo": ("feed_forward/projection",),
    },
    norms={"attn_norm": "attention_norm", "mlp_norm": "feed_forward_norm"},
    tables={"model.embeddings.tok_embeddings.weight": "embedding/table"},
    top={
        "model.embeddings.norm": "embedding_norm",
        "model.final_norm": "blocks/final_norm",
        "head.dense": "head/dense",
        "head.norm": "head/norm",
    },
    vectors={"decoder.bias": "head/logits/bias"},
    others={**_IDS, "copies": ("decoder.weight",)},
    **_ENCODER,
).family()
