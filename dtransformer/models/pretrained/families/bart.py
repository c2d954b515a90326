"""BART and Marian, and with norms of the sublayers' inputs mBART, Pegasus and M2M-100 with NLLB.

References: Lewis et al., 2020, "BART", arXiv 1910.13461; Junczys-Dowmunt et al., 2018, "Marian",
arXiv 1804.00344, whose published models are of Tiedemann and Thottingal, 2020, "OPUS-MT"; Liu et
al., 2020, "mBART", arXiv 2001.08210; Zhang et al., 2019, "PEGASUS", arXiv 1912.08777; Fan et al.,
2020, "M2M-100", arXiv 2010.11125; NLLB Team, 2022, arXiv 2207.04672.
"""

import numpy as np

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
_USUAL = {
    "max_length": 1024,
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.0,
    "activation_function": "gelu",
    "scale_embedding": False,
}
_BIAS = "final_logits_bias"
_OFFSET = 2  # of BART's positions, whatever the padding's id is


def _arguments(config, name, usual, is_pre):
    # The norms' places follow from the family there.
    refuse(config, name, normalize_before=is_pre, add_final_layer_norm=is_pre)
    refuse(config, name, tie_word_embeddings=True, is_decoder=False)
    for field in ("attention_heads", "ffn_dim"):
        sides = [config[f"{side}_{field}"] for side in ("encoder", "decoder")]
        if sides[0] != sides[1]:
            raise InputError(
                f"encoder_{field}={sides[0]} and decoder_{field}={sides[1]} differ: blocks of both "
                "are alike here"
            )
    return {
        **read(config, _FIELDS, **{x: usual[x] for x in _FIELDS if x in usual}),
        "embedding_dropout_rate": config.get("dropout", 0.1),
        "hidden_act": activation(config.get("activation_function", usual["activation_function"])),
        "embedding_scale": None if config.get("scale_embedding", usual["scale_embedding"]) else 1.0,
        "norm_epsilon": 1e-5,
        "trains_head_bias": False,
    }


def _settled(arguments, names):
    """Files of models without a head have no bias of it, either."""
    return {**arguments, "head_bias": _BIAS in names}


def _read_as(name, own, refused, usual):
    """Return the function of a family's configs that returns arguments; `own` are always so."""
    is_pre = not own.get("post_layernorm_residual", True)

    def arguments(config):
        refuse(config, name, **refused)
        if name == "Marian":
            refuse(config, name, decoder_vocab_size=config["vocab_size"])
        found = {**_arguments(config, name, usual, is_pre), **own}
        if found.get("positions_after_padding"):  # counted from the padding's id on
            pad_id = config.get("pad_token_id")
            found["position_offset"] = 1 + (usual["pad_id"] if pad_id is None else pad_id)
        return found

    return arguments


def _config(arguments, **own):
    is_scaled = arguments["embedding_scale"] is None
    require(
        arguments,
        **own,
        embedding_scale=None if is_scaled else 1.0,
        norm="layer_norm",
        norm_epsilon=1e-5,
        tied_head=True,
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


def _written_as(name, own):
    """Return the function of a network's arguments that returns a config: of `_read_as`."""
    usual = {"embedding_norm": False, "post_layernorm_residual": True}
    usual |= {"positions_after_padding": False}
    always = {x: v for x, v in own.items() if x != "trains_padding"}
    always |= {x: v for x, v in usual.items() if x not in own}

    def config(arguments):
        counted = {"position_offset": arguments["pad_id"] + 1, "head_bias": False}
        own = counted if always["positions_after_padding"] else {}
        found = _config(arguments, **always, **own)
        sizes = {"decoder_vocab_size": arguments["vocab_size"]} if name == "Marian" else {}
        return {**found, **sizes}

    return config


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
    found = [table("shared.weight", "source_embedding/table")]
    if arguments["head_bias"]:
        found.append(StoredTensor(_BIAS, ("head/bias",), num_inputs=0, is_row=True))
    for side, attentions in _ATTENTIONS.items():
        block = lambda number, side=side, names=attentions: _block(side, number, names)
        found += of_blocks(arguments[f"{side}_layers"], block)
        own = {"encoder": "source", "decoder": "target"}[side]
        if arguments["positions"] == "learned":
            found.append(table(f"{side}.embed_positions.weight", f"{own}_positions/table"))
        if arguments["embedding_norm"]:
            found += norm(f"{side}.layernorm_embedding", f"{own}_norm")
        if not arguments["post_layernorm_residual"]:
            found += norm(f"{side}.layer_norm", f"transformer/{side}/final_norm")
    return found


_COMMON = {
    "special_ids": DECODER_IDS,
    "own_padding": False,
    "prefix": "model.",
    "heads": ("lm_head", _BIAS),
    "copies": ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    "settled": _settled,
}


def _sinusoids(arguments):
    """Return the tables of positions that Pegasus' files have: sines, then cosines."""
    h, length = arguments["hidden_size"], arguments["max_length"]
    angles = np.arange(length)[:, None] / 10000 ** (2 * np.arange(h // 2) / h)
    rows = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype("float32")
    return {f"model.{side}.embed_positions.weight": rows for side in _ATTENTIONS}


_LEARNED = {"positions": "learned", "position_offset": _OFFSET, "embedding_norm": True}
_PRE = {"post_layernorm_residual": False}
_PAPER = {"positions": "sinusoidal_paper", "trains_padding": False}
_COUNTED = {"positions": "sinusoidal", "positions_after_padding": True}


def _family(architecture, name, own, refused=None, usual=None, **others):
    return Family(
        architecture,
        EncoderDecoderLM,
        _read_as(name, own, refused or {}, {**_USUAL, **(usual or {})}),
        _written_as(name, own),
        _tensors,
        **{**_COMMON, **others},
    )


_COMPUTED = {"ignored": ("embed_positions.weight", "embed_positions.weights")}
BART = _family(
    "BartForConditionalGeneration",
    "BART",
    _LEARNED,
    {"normalize_embedding": True, "static_position_embeddings": False},
)
MARIAN = _family(
    "MarianMTModel",
    "Marian",
    _PAPER,
    {"share_encoder_decoder_embeddings": True, "normalize_embedding": False},
    **_COMPUTED,
)
MBART = _family("MBartForConditionalGeneration", "mBART", {**_LEARNED, **_PRE})
PEGASUS = _family(
    "PegasusForConditionalGeneration",
    "Pegasus",
    {**_PAPER, **_PRE},
    computed=_sinusoids,
    **_COMPUTED,
)
M2M_100 = _family(
    "M2M100ForConditionalGeneration",
    "M2M-100",
    {**_COUNTED, **_PRE},
    usual={
        "activation_function": "relu",
        "scale_embedding": True,
        "attention_dropout_rate": 0.1,
        "pad_id": 1,
    },
    usual_ids={"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    **_COMPUTED,
)
