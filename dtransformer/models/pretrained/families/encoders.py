"""BERT, RoBERTa, DistilBERT and ModernBERT.

Reference:
    - [Devlin et al., 2019, BERT](https://arxiv.org/abs/1810.04805)
    - [Liu et al., 2019, RoBERTa](https://arxiv.org/abs/1907.11692)
    - [Sanh et al., 2019, DistilBERT](https://arxiv.org/abs/1910.01108)
    - [Warner et al., 2024, ModernBERT](https://arxiv.org/abs/2412.13663)
"""

from collections.abc import Mapping, Sequence

from dtransformer.models.masked_lm import MaskedLM
from dtransformer.models.pretrained.families.blocks import (
    FULL,
    SLIDING,
    Blocks,
    Rotary,
    RotaryByKind,
    Windows,
)
from dtransformer.models.pretrained.families.family import SIZES, Family, FileNames
from dtransformer.models.pretrained.families.keys import (
    HEADS,
    TIED,
    Key,
    PositionsAfterPadding,
    hidden_act,
    replace_rows,
)
from dtransformer.models.pretrained.families.weights import (
    GATE_MAPPING,
    QUERY_KEY_VALUE,
    blocks,
    products,
)


class _NextSentence:
    """Row of the architecture in a config and the head for next-sentence prediction."""

    arguments = ("next_sentence",)
    _class = "BertForPreTraining"

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`."""
        return {"next_sentence": self._class in (config.get("architectures") or ())}

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config keys from network arguments; see `Row`."""
        return {"architectures": [self._class]} if arguments["next_sentence"] else {}


_BERT_KEYS = (
    *SIZES,
    Key("type_vocab_size", "num_token_types", 2),
    Key("layer_norm_eps", "norm_epsilon", 1e-12),
    Key("hidden_dropout_prob", "dropout_rate", 0.1),
    Key("attention_probs_dropout_prob", "attention_dropout_rate", 0.1),
    TIED,
)


def _bert_weights(prefix, head):
    """Return BERT's table of weight names with a prefix, and with a table of the head."""
    embeddings = f"{prefix}.embeddings."
    return {
        f"{embeddings}word_embeddings.weight": "embedding/table",
        f"{embeddings}position_embeddings.weight": "positions/table",
        f"{embeddings}token_type_embeddings.weight": "token_types/table",
        f"{embeddings}LayerNorm": "embedding_norm",
        **blocks(
            f"{prefix}.encoder.layer.{{i}}.",
            {
                "attention.output.LayerNorm": "attention_norm",
                "output.LayerNorm": "feed_forward_norm",
            },
            products("attention.{}", "self.query", "self.key", "self.value", "output.dense"),
            {
                "intermediate.dense": "feed_forward/mapping",
                "output.dense": "feed_forward/projection",
            },
        ),
        **head,
    }


# Google's original files use other names for norms. The head may have a separate bias.
_RENAMED = {
    "LayerNorm.gamma": "LayerNorm.weight",
    "LayerNorm.beta": "LayerNorm.bias",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
_SUPPORTED_VALUES = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
# Masked language models may have weights for next-sentence prediction, which are skipped.
_UNUSED = "position_ids", "pooler.dense.weight", "pooler.dense.bias"
BERT = Family(
    "BertForMaskedLM",
    keys=(*_BERT_KEYS, hidden_act(default="gelu"), _NextSentence()),
    weights=_bert_weights(
        "bert",
        {
            "cls.predictions.transform.dense": "head/dense",
            "cls.predictions.transform.LayerNorm": "head/norm",
            "cls.predictions.decoder": "head/logits",
            "cls.predictions.bias": "head/logits/bias",
            "bert.pooler.dense": "sentence_head/pooler",
            "cls.seq_relationship": "sentence_head/classifier",
        },
    ),
    supported_values=_SUPPORTED_VALUES,
    ids={"pad_token_id": 0},
    network=MaskedLM,
    files=FileNames(
        renamed=_RENAMED,
        ignored=(*_UNUSED, "seq_relationship.weight", "seq_relationship.bias"),
        untied_copies={"cls.predictions.decoder.bias": "cls.predictions.bias"},
    ),
)
ROBERTA = Family(
    "RobertaForMaskedLM",
    keys=replace_rows(_BERT_KEYS, PositionsAfterPadding(512, counts_padding=True)),
    weights=_bert_weights(
        "roberta",
        {
            "lm_head.dense": "head/dense",
            "lm_head.layer_norm": "head/norm",
            "lm_head.decoder": "head/logits",
            "lm_head.bias": "head/logits/bias",
        },
    ),
    # The head always uses "gelu".
    supported_values={**_SUPPORTED_VALUES, "hidden_act": "gelu"},
    ids={"pad_token_id": 0},
    network=MaskedLM,
    files=FileNames(
        renamed=_RENAMED,
        ignored=_UNUSED,
        untied_copies={"lm_head.decoder.bias": "lm_head.bias"},
    ),
)
DISTILBERT = Family(
    "DistilBertForMaskedLM",
    keys=(
        Key("dim", "hidden_size", 768),
        Key("n_heads", "num_heads", 12),
        Key("n_layers", "num_layers", 6),
        Key("hidden_dim", "ffn_hidden_size", 3072),
        Key("max_position_embeddings", "max_length", 512),
        Key("dropout", "dropout_rate", 0.1, same=("embedding_dropout_rate",)),
        Key("attention_dropout", "attention_dropout_rate", 0.1),
        hidden_act("activation", "gelu"),
        TIED,
    ),
    weights={
        "distilbert.embeddings.word_embeddings.weight": "embedding/table",
        "distilbert.embeddings.position_embeddings.weight": "positions/table",
        "distilbert.embeddings.LayerNorm": "embedding_norm",
        **blocks(
            "distilbert.transformer.layer.{i}.",
            {"sa_layer_norm": "attention_norm", "output_layer_norm": "feed_forward_norm"},
            products("attention.{}_lin", *"qkv", "out"),
            {"ffn.lin1": "feed_forward/mapping", "ffn.lin2": "feed_forward/projection"},
        ),
        "vocab_transform": "head/dense",
        "vocab_layer_norm": "head/norm",
        "vocab_projector": "head/logits",
    },
    fixed={"norm_epsilon": 1e-12},
    ids={"pad_token_id": 0},
    network=MaskedLM,
    files=FileNames(ignored=("position_ids",)),
)


class _ModernBertWindows(Windows):
    """Windows in two of three blocks by default. The first block has no attention norm.

    ModernBERT counts both sides of a window together. This library counts one side, including
    the position itself.
    """

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`."""
        return SLIDING if index % (config.get("global_attn_every_n_layers") or 3) else FULL

    def from_hf(self, config: Mapping, kinds: Sequence[str]) -> list[dict]:
        """Return the arguments of each block that depend on its kind or index."""
        blocks = super().from_hf(config, kinds)
        for i, block in enumerate(blocks):
            window = block["window"]
            window = None if window is None else window // 2 + 1
            blocks[i] = {**block, "window": window, "attention_norm": i > 0}
        return blocks

    def to_hf(self, blocks: Sequence[Mapping]) -> dict:
        """Return the config keys from the arguments of all blocks."""
        fields = super().to_hf(blocks)
        window = fields[self.key]
        return {**fields, self.key: None if window is None else 2 * (window - 1)}

    def has_attention_norm(self, index: int) -> bool:
        """Return whether a block has a norm before its attention."""
        return index > 0


MODERNBERT = Family(
    "ModernBertForMaskedLM",
    keys=(
        HEADS,
        Key("hidden_size", "hidden_size", 768),
        Key("num_hidden_layers", "num_layers", 22),
        Key("intermediate_size", "ffn_hidden_size", 1152),
        Key("max_position_embeddings", "max_length", 8192),
        Key("norm_eps", "norm_epsilon", 1e-5),
        Key("mlp_dropout", "dropout_rate", 0.0),
        Key("embedding_dropout", "embedding_dropout_rate", 0.0),
        Key("attention_dropout", "attention_dropout_rate", 0.0),
        TIED,
        Blocks(
            RotaryByKind(
                full=Rotary(160000.0, base_key="global_rope_theta"),
                sliding=Rotary(10000.0, base_key="local_rope_theta"),
            ),
            _ModernBertWindows(128, key="local_attention", has_layer_types=True),
        ),
    ),
    weights={
        "model.embeddings.tok_embeddings.weight": "embedding/table",
        "model.embeddings.norm": "embedding_norm",
        **blocks(
            "model.layers.{i}.",
            {
                "attn_norm": "attention_norm",
                "mlp_norm": "feed_forward_norm",
                "attn.Wqkv": QUERY_KEY_VALUE,
                "attn.Wo": "attention/output",
                "mlp.Wi": GATE_MAPPING,
                "mlp.Wo": "feed_forward/projection",
            },
        ),
        "model.final_norm": "blocks/final_norm",
        "head.dense": "head/dense",
        "head.norm": "head/norm",
        "decoder": "head/logits",
    },
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
    network=MaskedLM,
)
