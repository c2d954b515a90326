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

from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.family import DECODER_IDS, Family, default_arguments
from dtransformer.models.pretrained.families.parts import (
    TIED,
    AfterPadding,
    Field,
    choice,
    hidden_act,
)

BASE = default_arguments(
    EncoderDecoderLM, "head_bias", "max_length", "relative_ranges", "relative_max_distance"
)
# Names of attention layers in blocks of `transformers` -> paths here, by side.
_ATTENTIONS = {
    "encoder": {"self_attn": "attention"},
    "decoder": {"self_attn": "self_attention", "encoder_attn": "cross_attention"},
}
_BIAS = "final_logits_bias"
# Tensors that repeat the shared table of embeddings.
_EMBEDDINGS = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
COPIES = "lm_head.weight", *_EMBEDDINGS


def _stack(side):
    """Return the `Family` fields that differ in one side's blocks."""
    attention = {}
    norms = {}
    for hf_name, path in _ATTENTIONS[side].items():
        attention |= paths.attention(f"{hf_name}.{{}}_proj", *"qkv", "out", path=path)
        norms[f"{hf_name}_layer_norm"] = f"{path}_norm"
    return {
        "block": f"{side}.layers.{{}}.",
        "path": f"transformer/{side}/block_{{}}/",
        "attention": attention,
        "norms": {**norms, "final_layer_norm": "feed_forward_norm"},
    }


def _finalize(arguments, tensor_names):
    """Drop the head's bias if the file has none, as in files of models without a head."""
    return {**arguments, "head_bias": _BIAS in tensor_names}


_LENGTH = Field("max_length", "max_position_embeddings", 1024)


def _shared_field(argument, field):
    return Field(argument, f"encoder_{field}", also=(f"decoder_{field}",), needs_also=True)


def _family(
    architecture,
    fixed,
    supported_values=None,
    parts=(_LENGTH,),
    activation="gelu",
    is_scaled=False,
    attention_dropout=0.0,
    **others,
):
    is_pre = not fixed.get("post_layernorm_residual", True)
    return Family(
        architecture,
        parts=(
            Field("hidden_size", "d_model"),
            _shared_field("num_heads", "attention_heads"),
            _shared_field("ffn_hidden_size", "ffn_dim"),
            Field("encoder_layers", "encoder_layers"),
            Field("decoder_layers", "decoder_layers"),
            Field("dropout_rate", "dropout", 0.1, same=("embedding_dropout_rate",)),
            Field("attention_dropout_rate", "attention_dropout", attention_dropout),
            hidden_act("activation_function", activation),
            choice("embedding_scale", "scale_embedding", is_scaled, {False: 1.0, True: None}),
            TIED,
            *parts,
        ),
        fixed={"post_layernorm_residual": True, "trains_head_bias": False, **fixed},
        supported_values={
            # The family fixes the places of norms in `transformers`.
            **dict.fromkeys(("normalize_before", "add_final_layer_norm"), is_pre),
            "is_encoder_decoder": True,
            "is_decoder": False,
            **(supported_values or {}),
        },
        stacks={f"{side}_layers": _stack(side) for side in _ATTENTIONS},
        dense={"fc1": paths.MAPPING, "fc2": paths.PROJECTION},
        tables={
            "shared.weight": "source_embedding/table",
            "encoder.embed_positions.weight": "source_positions/table",
            "decoder.embed_positions.weight": "target_positions/table",
        },
        top={
            "encoder.layernorm_embedding": "source_norm",
            "decoder.layernorm_embedding": "target_norm",
            "encoder.layer_norm": "transformer/encoder/final_norm",
            "decoder.layer_norm": "transformer/decoder/final_norm",
            "lm_head": "head",
        },
        rows={_BIAS: "head/bias"},
        base=BASE,
        default_parts=(),
        network=EncoderDecoderLM,
        special_ids=DECODER_IDS,
        needs_unique_padding=False,
        prefix="model.",
        heads=("lm_head", _BIAS),
        copies=COPIES,
        untied_copies=dict.fromkeys(_EMBEDDINGS, "shared.weight"),
        finalize=_finalize,
        **others,
    )


# BART's position offset does not depend on the padding id.
_LEARNED = {"positions": "learned", "position_offset": 2, "embedding_norm": True}
_PRE = {"post_layernorm_residual": False}
_PAPER = {"positions": "sinusoidal_paper", "trains_padding": False}
_COUNTED = {"positions": "sinusoidal", "positions_after_padding": True, "head_bias": False}
_TABLES = {"position_tables": ("embed_positions.weight",)}
BART = _family(
    "BartForConditionalGeneration",
    _LEARNED,
    {"normalize_embedding": True, "static_position_embeddings": False},
)
MARIAN = _family(
    "MarianMTModel",
    _PAPER,
    {"share_encoder_decoder_embeddings": True, "normalize_embedding": False},
    (_LENGTH, Field("vocab_size", "vocab_size", also=("decoder_vocab_size",))),
    **_TABLES,
)
MBART = _family("MBartForConditionalGeneration", {**_LEARNED, **_PRE})
PEGASUS = _family(
    "PegasusForConditionalGeneration",
    {**_PAPER, **_PRE},
    written_positions=("encoder.embed_positions.weight", "decoder.embed_positions.weight"),
    **_TABLES,
)
M2M_100 = _family(
    "M2M100ForConditionalGeneration",
    {**_COUNTED, **_PRE},
    parts=(AfterPadding(1024, default=1),),
    activation="relu",
    is_scaled=True,
    attention_dropout=0.1,
    ids={"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    # `transformers` ignores them as well.
    ignored=("embed_positions.weight", "embed_positions.weights"),
)
