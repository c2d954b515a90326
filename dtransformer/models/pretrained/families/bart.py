"""BART and Marian; mBART, Pegasus and M2M-100 with NLLB, whose norms precede the sublayers.

Reference:
    - [Lewis et al., 2020, BART](https://arxiv.org/abs/1910.13461)
    - [Junczys-Dowmunt et al., 2018, Marian](https://arxiv.org/abs/1804.00344), published
      models by Tiedemann and Thottingal, 2020, "OPUS-MT"
    - [Liu et al., 2020, mBART](https://arxiv.org/abs/2001.08210)
    - [Zhang et al., 2019, PEGASUS](https://arxiv.org/abs/1912.08777)
    - [Fan et al., 2020, M2M-100](https://arxiv.org/abs/2010.11125)
    - [NLLB Team, 2022](https://arxiv.org/abs/2207.04672)
"""

from collections.abc import Collection, Mapping

from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.pretrained.families.family import Family, FileNames
from dtransformer.models.pretrained.families.keys import (
    TIED,
    Key,
    PositionsAfterPadding,
    choice,
    hidden_act,
    replace_rows,
)
from dtransformer.models.pretrained.families.weights import Table, Weights, blocks, products

_BIAS = "final_logits_bias"
# Tensors that repeat the shared embedding table.
TABLE_COPIES = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"


def _block_weights(side: str, attentions: Mapping[str, str]) -> Table:
    """Return the table of the blocks of the encoder or decoder.

    Args:
        side: `"encoder"` or `"decoder"`.
        attentions: Dict from names of attention layers in `transformers` to paths.
    """
    norms = {f"{name}_layer_norm": f"{path}_norm" for name, path in attentions.items()}
    return blocks(
        f"{side}.layers.{{i}}.",
        {**norms, "final_layer_norm": "feed_forward_norm"},
        *(products(f"{x}.{{}}_proj", *"qkv", "out", path=y) for x, y in attentions.items()),
        {"fc1": "feed_forward/mapping", "fc2": "feed_forward/projection"},
        path=f"transformer/{side}/block_{{i}}/",
    )


_WEIGHTS = {
    "shared.weight": "source_embedding/table",
    "encoder.embed_positions.weight": "source_positions/table",
    "decoder.embed_positions.weight": "target_positions/table",
    "encoder.layernorm_embedding": "source_norm",
    "decoder.layernorm_embedding": "target_norm",
    **_block_weights("encoder", {"self_attn": "attention"}),
    "encoder.layer_norm": "transformer/encoder/final_norm",
    **_block_weights("decoder", {"self_attn": "self_attention", "encoder_attn": "cross_attention"}),
    "decoder.layer_norm": "transformer/decoder/final_norm",
    "lm_head": "head",
    _BIAS: Weights(("head/bias",), "row"),
}


def _both_sides(key, argument):
    """Return the row of a key that encoder and decoder must have equal values of."""
    return Key(f"encoder_{key}", argument, equal_keys=(f"decoder_{key}",), needs_equal_keys=True)


_KEYS = (
    Key("d_model", "hidden_size"),
    _both_sides("attention_heads", "num_heads"),
    _both_sides("ffn_dim", "ffn_hidden_size"),
    Key("encoder_layers", "encoder_layers"),
    Key("decoder_layers", "decoder_layers"),
    Key("dropout", "dropout_rate", 0.1, same=("embedding_dropout_rate",)),
    Key("attention_dropout", "attention_dropout_rate", 0.0),
    hidden_act("activation_function", "gelu"),
    choice("scale_embedding", "embedding_scale", False, {False: 1.0, True: None}),
    TIED,
    Key("max_position_embeddings", "max_length", 1024),
)


class _Bart(Family):
    """Family with BART's head bias, which files of models without a head lack."""

    def adapt_to_file(self, arguments: dict, names: Collection[str]) -> dict:
        """Return the network arguments, without the head's bias if the file has none."""
        return {**arguments, "head_bias": _BIAS in names}


def _family(architecture, fixed, keys=_KEYS, supported_values=None, files=None, **options):
    has_first_norms = not fixed.get("post_layernorm_residual", True)
    return _Bart(
        architecture,
        keys=keys,
        weights=_WEIGHTS,
        fixed={"post_layernorm_residual": True, "trains_head_bias": False, **fixed},
        supported_values={
            # The family fixes the places of norms in `transformers`.
            "normalize_before": has_first_norms,
            "add_final_layer_norm": has_first_norms,
            "is_encoder_decoder": True,
            "is_decoder": False,
            **(supported_values or {}),
        },
        network=EncoderDecoderLM,
        files=FileNames(
            prefix="model.",
            table_copies=TABLE_COPIES,
            untied_copies=dict.fromkeys(TABLE_COPIES, "shared.weight"),
            **(files or {}),
        ),
        **options,
    )


# BART's position offset does not depend on the padding id.
_LEARNED = {"positions": "learned", "position_offset": 2, "embedding_norm": True}
_FIRST_NORMS = {"post_layernorm_residual": False}
_SINUSOIDAL = {"positions": "sinusoidal_paper", "trains_padding": False}
_POSITION_TABLES = {"position_tables": ("embed_positions.weight",)}
BART = _family(
    "BartForConditionalGeneration",
    _LEARNED,
    supported_values={"normalize_embedding": True, "static_position_embeddings": False},
)
MARIAN = _family(
    "MarianMTModel",
    _SINUSOIDAL,
    (*_KEYS, Key("vocab_size", "vocab_size", equal_keys=("decoder_vocab_size",))),
    supported_values={"share_encoder_decoder_embeddings": True, "normalize_embedding": False},
    files=_POSITION_TABLES,
)
MBART = _family("MBartForConditionalGeneration", {**_LEARNED, **_FIRST_NORMS})
PEGASUS = _family(
    "PegasusForConditionalGeneration",
    {**_SINUSOIDAL, **_FIRST_NORMS},
    files={
        **_POSITION_TABLES,
        "saved_position_tables": (
            "encoder.embed_positions.weight",
            "decoder.embed_positions.weight",
        ),
    },
)
M2M_100 = _family(
    "M2M100ForConditionalGeneration",
    {
        "positions": "sinusoidal",
        "positions_after_padding": True,
        "head_bias": False,
        **_FIRST_NORMS,
    },
    replace_rows(
        _KEYS,
        Key("attention_dropout", "attention_dropout_rate", 0.1),
        hidden_act("activation_function", "relu"),
        choice("scale_embedding", "embedding_scale", True, {False: 1.0, True: None}),
        TIED,
        PositionsAfterPadding(1024, default=1),
    ),
    ids={"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    # `transformers` ignores them as well.
    files={"ignored": ("embed_positions.weight", "embed_positions.weights")},
)
