"""BART and Marian.

References: Lewis et al., 2020, "BART", arXiv 1910.13461; Junczys-Dowmunt et al., 2018, "Marian",
arXiv 1804.00344, whose published models are of Tiedemann and Thottingal, 2020, "OPUS-MT".
"""

from dtransformer.errors import InputError
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.pretrained.families.family import (
    DECODER_IDS,
    Family,
    activation,
    dense,
    norm,
    of_blocks,
    published_activation,
    read,
    refuse,
    require,
    table,
    written,
)
from dtransformer.models.pretrained.stored_tensor import StoredTensor

# Our arguments -> fields of configs, and what they are where a config says nothing.
_FIELDS = {
    "hidden_size": "d_model",
    "num_heads": "encoder_attention_heads",
    "ffn_hidden_size": "encoder_ffn_dim",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "max_length": "max_position_embeddings",
    "dropout_rate": "dropout",
    "attention_dropout_rate": "attention_dropout",
}
_USUAL = {"max_length": 1024, "dropout_rate": 0.1, "attention_dropout_rate": 0.0}
_BIAS = "final_logits_bias"
_OFFSET = 2  # of BART's positions, whatever the padding's id is


def _arguments(config, name):
    refuse(config, name, normalize_before=False, add_final_layer_norm=False)
    refuse(config, name, tie_word_embeddings=True, is_decoder=False)
    for field in ("attention_heads", "ffn_dim"):
        sides = [config[f"{side}_{field}"] for side in ("encoder", "decoder")]
        if sides[0] != sides[1]:
            raise InputError(
                f"encoder_{field}={sides[0]} and decoder_{field}={sides[1]} differ: blocks of both "
                "are alike here"
            )
    return {
        **read(config, _FIELDS, **_USUAL),
        "embedding_dropout_rate": config.get("dropout", 0.1),
        "hidden_act": activation(config.get("activation_function", "gelu")),
        "embedding_scale": None if config.get("scale_embedding") else 1.0,
        "norm_epsilon": 1e-5,
        "trains_head_bias": False,
    }


def _settled(arguments, names):
    """Files of models without a head have no bias of it, either."""
    return {**arguments, "head_bias": _BIAS in names}


def _bart_arguments(config):
    refuse(config, "BART", normalize_embedding=True, static_position_embeddings=False)
    own = {"positions": "learned", "position_offset": _OFFSET, "embedding_norm": True}
    return {**_arguments(config, "BART"), **own}


def _marian_arguments(config):
    refuse(config, "Marian", share_encoder_decoder_embeddings=True, normalize_embedding=False)
    refuse(config, "Marian", decoder_vocab_size=config["vocab_size"])
    own = {"positions": "sinusoidal_paper", "trains_padding": False}
    return {**_arguments(config, "Marian"), **own}


def _config(arguments, **own):
    is_scaled = arguments["embedding_scale"] is None
    require(
        arguments,
        **own,
        embedding_scale=None if is_scaled else 1.0,
        norm="layer_norm",
        norm_epsilon=1e-5,
        tied_head=True,
        post_layernorm_residual=True,
        gated=False,
        use_bias=True,
        moe_config=None,
        head_dim=arguments["hidden_size"] // arguments["num_heads"],
        embedding_dropout_rate=arguments["dropout_rate"],
    )
    return {
        **written(arguments, _FIELDS),
        "decoder_attention_heads": arguments["num_heads"],
        "decoder_ffn_dim": arguments["ffn_hidden_size"],
        "activation_function": published_activation(arguments),
        "scale_embedding": is_scaled,
        "is_encoder_decoder": True,
    }


def _bart_config(arguments):
    own = {"positions": "learned", "position_offset": _OFFSET, "embedding_norm": True}
    return _config(arguments, **own)


def _marian_config(arguments):
    found = _config(arguments, positions="sinusoidal_paper", embedding_norm=False)
    return {**found, "decoder_vocab_size": arguments["vocab_size"]}


def _block(side, number, attentions):
    theirs, ours = f"{side}.layers.{number}.", f"transformer/{side}/block_{number}/"
    tensors = []
    for own, name in attentions.items():
        for projection, part in {"q_proj": "query", "k_proj": "key", "v_proj": "value"}.items():
            tensors += dense(f"{theirs}{own}.{projection}", f"{ours}{name}/{part}_")
        tensors += dense(f"{theirs}{own}.out_proj", f"{ours}{name}/output_", num_inputs=2)
        tensors += norm(f"{theirs}{own}_layer_norm", f"{ours}{name}_norm")
    return [
        *tensors,
        *dense(f"{theirs}fc1", f"{ours}feed_forward/mapping_"),
        *dense(f"{theirs}fc2", f"{ours}feed_forward/projection_"),
        *norm(f"{theirs}final_layer_norm", f"{ours}feed_forward_norm"),
    ]


_ATTENTIONS = {
    "encoder": {"self_attn": "attention"},
    "decoder": {"self_attn": "self_attention", "encoder_attn": "cross_attention"},
}


def _tensors(arguments):
    found = [
        table("shared.weight", "source_embedding/table"),
    ]
    if arguments["head_bias"]:
        found.append(StoredTensor(_BIAS, ("head/bias",), num_inputs=0, is_row=True))
    for side, attentions in _ATTENTIONS.items():
        block = lambda number, side=side, names=attentions: _block(side, number, names)
        found += of_blocks(arguments[f"{side}_layers"], block)
    return found


def _bart_tensors(arguments):
    found = _tensors(arguments)
    for side, own in {"encoder": "source", "decoder": "target"}.items():
        found.append(table(f"{side}.embed_positions.weight", f"{own}_positions/table"))
        found += norm(f"{side}.layernorm_embedding", f"{own}_norm")
    return found


_COMMON = {
    "special_ids": DECODER_IDS,
    "own_padding": False,
    "prefix": "model.",
    "heads": ("lm_head", _BIAS),
    "copies": ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    "settled": _settled,
}
BART = Family(
    "BartForConditionalGeneration",
    EncoderDecoderLM,
    _bart_arguments,
    _bart_config,
    _bart_tensors,
    **_COMMON,
)
MARIAN = Family(
    "MarianMTModel",
    EncoderDecoderLM,
    _marian_arguments,
    _marian_config,
    _tensors,
    ignored=("embed_positions.weight",),
    **_COMMON,
)
