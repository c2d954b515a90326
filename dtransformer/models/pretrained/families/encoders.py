"""BERT, RoBERTa, DistilBERT and ModernBERT.

Reference:
    - [Devlin et al., 2019, BERT](https://arxiv.org/abs/1810.04805)
    - [Liu et al., 2019, RoBERTa](https://arxiv.org/abs/1907.11692)
    - [Sanh et al., 2019, DistilBERT](https://arxiv.org/abs/1910.01108)
    - [Warner et al., 2024, ModernBERT](https://arxiv.org/abs/2412.13663)
"""

from collections.abc import Mapping

from dtransformer.models.masked_lm import MaskedLM
from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.blocks import FULL, SLIDING, Blocks
from dtransformer.models.pretrained.families.family import SIZES, Family, default_arguments
from dtransformer.models.pretrained.families.parts import TIED, AfterPadding, Field, hidden_act

_ENCODER = {
    "base": default_arguments(MaskedLM, num_token_types=0),
    "network": MaskedLM,
    "special_ids": {"pad_id": "pad_token_id"},
}


class _NextSentence:
    """Mapping of the architecture in a config and the head for next-sentence prediction."""

    arguments = ("next_sentence",)
    _class = "BertForPreTraining"

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`."""
        return {"next_sentence": self._class in (config.get("architectures") or ())}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`."""
        return {"architectures": [self._class]} if arguments["next_sentence"] else {}


def _bert(architecture, parts, prefix, head, **others):
    """Return a family with BERT's blocks, with additional parts and the head's weight names."""
    embeddings = f"{prefix}.embeddings."
    return Family(
        architecture,
        parts=(
            Field("num_token_types", "type_vocab_size", 2),
            Field("norm_epsilon", "layer_norm_eps", 1e-12),
            Field("dropout_rate", "hidden_dropout_prob", 0.1),
            Field("attention_dropout_rate", "attention_probs_dropout_prob", 0.1),
            TIED,
            *parts,
        ),
        ids={"pad_token_id": 0},
        block=f"{prefix}.encoder.layer.{{}}.",
        attention=paths.attention(
            "attention.{}", "self.query", "self.key", "self.value", "output.dense"
        ),
        dense={"intermediate.dense": paths.MAPPING, "output.dense": paths.PROJECTION},
        norms={
            "attention.output.LayerNorm": "attention_norm",
            "output.LayerNorm": "feed_forward_norm",
        },
        tables={
            f"{embeddings}word_embeddings.weight": "embedding/table",
            f"{embeddings}position_embeddings.weight": "positions/table",
            f"{embeddings}token_type_embeddings.weight": "token_types/table",
        },
        top={f"{embeddings}LayerNorm": "embedding_norm", **head},
        # Google's original files use other names for norms. The head may have a separate bias.
        renamed={
            "LayerNorm.gamma": "LayerNorm.weight",
            "LayerNorm.beta": "LayerNorm.bias",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        default_parts=SIZES,
        **others,
        **_ENCODER,
    )


_REFUSED = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
# Masked language models may have weights for next-sentence prediction, which are skipped.
_SPARE = "position_ids", "pooler.dense.weight", "pooler.dense.bias"
BERT = _bert(
    "BertForMaskedLM",
    (hidden_act(default="gelu"), _NextSentence()),
    "bert",
    {
        "cls.predictions.transform.dense": "head/dense",
        "cls.predictions.transform.LayerNorm": "head/norm",
        "cls.predictions.decoder": "head/logits",
        "bert.pooler.dense": "sentence_head/pooler",
        "cls.seq_relationship": "sentence_head/classifier",
    },
    supported_values=_REFUSED,
    vectors={"cls.predictions.bias": "head/logits/bias"},
    copies=("cls.predictions.decoder.weight",),
    untied_copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    ignored=(*_SPARE, "seq_relationship.weight", "seq_relationship.bias"),
)
ROBERTA = _bert(
    "RobertaForMaskedLM",
    (AfterPadding(512, counts=True),),
    "roberta",
    {
        "lm_head.dense": "head/dense",
        "lm_head.layer_norm": "head/norm",
        "lm_head.decoder": "head/logits",
    },
    supported_values={**_REFUSED, "hidden_act": "gelu"},  # the head always uses "gelu"
    vectors={"lm_head.bias": "head/logits/bias"},
    copies=("lm_head.decoder.weight",),
    untied_copies={"lm_head.decoder.bias": "lm_head.bias"},
    ignored=_SPARE,
)
DISTILBERT = Family(
    "DistilBertForMaskedLM",
    parts=(
        Field("hidden_size", "dim", 768),
        Field("num_heads", "n_heads", 12),
        Field("num_layers", "n_layers", 6),
        Field("ffn_hidden_size", "hidden_dim", 3072),
        Field("max_length", "max_position_embeddings", 512),
        Field("dropout_rate", "dropout", 0.1, same=("embedding_dropout_rate",)),
        Field("attention_dropout_rate", "attention_dropout", 0.1),
        hidden_act("activation", "gelu"),
        TIED,
    ),
    fixed={"norm_epsilon": 1e-12},
    ids={"pad_token_id": 0},
    block="distilbert.transformer.layer.{}.",
    attention=paths.attention("attention.{}_lin", *"qkv", "out"),
    dense={"ffn.lin1": paths.MAPPING, "ffn.lin2": paths.PROJECTION},
    norms={"sa_layer_norm": "attention_norm", "output_layer_norm": "feed_forward_norm"},
    tables={
        "distilbert.embeddings.word_embeddings.weight": "embedding/table",
        "distilbert.embeddings.position_embeddings.weight": "positions/table",
    },
    top={
        "distilbert.embeddings.LayerNorm": "embedding_norm",
        "vocab_transform": "head/dense",
        "vocab_layer_norm": "head/norm",
        "vocab_projector": "head/logits",
    },
    copies=("vocab_projector.weight",),
    ignored=("position_ids",),
    default_parts=(),
    **_ENCODER,
)


def _full_each(config, index):
    """Return the kind of a block. By default every third block is full, from the first one on."""
    return SLIDING if index % (config.get("global_attn_every_n_layers") or 3) else FULL


MODERNBERT = Family(
    "ModernBertForMaskedLM",
    parts=(
        Field("hidden_size", "hidden_size", 768),
        Field("num_layers", "num_hidden_layers", 22),
        Field("ffn_hidden_size", "intermediate_size", 1152),
        Field("max_length", "max_position_embeddings", 8192),
        Field("norm_epsilon", "norm_eps", 1e-5),
        Field("dropout_rate", "mlp_dropout", 0.0),
        Field("embedding_dropout_rate", "embedding_dropout", 0.0),
        Field("attention_dropout_rate", "attention_dropout", 0.0),
        TIED,
        Blocks(
            base=160000.0,
            sliding_base=10000.0,
            kind_rule=_full_each,
            window=128,
            window_field="local_attention",
            # ModernBERT counts both sides of the window together. This library counts one side,
            # including the position itself.
            window_converters=(lambda both: both // 2 + 1, lambda one: 2 * (one - 1)),
            has_types=True,
            per_kind=True,
            base_keys={FULL: "global_rope_theta", SLIDING: "local_rope_theta"},
            first_has_no_norm=True,
        ),
    ),
    fixed={
        "positions": "rotary",
        "norm": "layer_norm_without_beta",
        "gated": True,
        "use_bias": False,
        "post_layernorm_residual": False,
    },
    supported_values={
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
        "decoder_bias": True,
        **dict.fromkeys(("hidden_activation", "classifier_activation"), "gelu"),
    },
    ids={"pad_token_id": 50283},
    block="model.layers.{}.",
    attention={"attn.Wqkv": paths.QUERY_KEY_VALUE, "attn.Wo": paths.OUTPUT},
    dense={"mlp.Wi": paths.GATE_MAPPING, "mlp.Wo": paths.PROJECTION},
    norms={"attn_norm": "attention_norm", "mlp_norm": "feed_forward_norm"},
    tables={"model.embeddings.tok_embeddings.weight": "embedding/table"},
    top={
        "model.embeddings.norm": "embedding_norm",
        "model.final_norm": "blocks/final_norm",
        "head.dense": "head/dense",
        "head.norm": "head/norm",
        "decoder": "head/logits",
    },
    copies=("decoder.weight",),
    default_parts=SIZES,
    **_ENCODER,
)
