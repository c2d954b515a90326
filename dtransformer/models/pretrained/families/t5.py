"""T5, its first version and 1.1, and mT5.

References: Raffel et al., 2019, arXiv 1910.10683; Xue et al., 2020, "mT5", arXiv 2010.11934.
"""

import dataclasses
from collections.abc import Collection

from dtransformer.errors import InputError
from dtransformer.models.encoder_decoder_lm import EncoderDecoderLM
from dtransformer.models.pretrained.families.family import (
    DECODER_IDS,
    Family,
    activation,
    bias,
    linear,
    of_blocks,
    published_activation,
    read,
    refuse,
    require,
    table,
    written,
)

# Our arguments -> fields of configs, and what they are where a config says nothing.
_FIELDS = {
    "hidden_size": "d_model",
    "num_heads": "num_heads",
    "ffn_hidden_size": "d_ff",
    "head_dim": "d_kv",
    "encoder_layers": "num_layers",
    "dropout_rate": "dropout_rate",
    "norm_epsilon": "layer_norm_epsilon",
    "relative_ranges": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
}
_USUAL = {
    "dropout_rate": 0.1,
    "norm_epsilon": 1e-6,
    "relative_ranges": 32,
    "relative_max_distance": 128,
}
_FORM = {
    "positions": "relative",
    "norm": "rms_norm",
    "use_bias": False,
    "post_layernorm_residual": False,
    "query_scale": 1.0,
    "embedding_scale": 1.0,
}
_HEAD = "lm_head.weight"


def _arguments(config):
    refuse(config, "T5", is_decoder=False)
    *gate, name = config.get("feed_forward_proj", "relu").split("-")
    if gate not in ([], ["gated"]):
        raise InputError(
            f"feed_forward_proj is {config['feed_forward_proj']!r}, which is not known"
        )
    if gate and name == "gelu":
        name = "gelu_new"  # as the first files of 1.1 mean it
    is_tied = config.get("tie_word_embeddings") is not False
    return {
        **_FORM,
        **read(config, _FIELDS, **_USUAL),
        "decoder_layers": config.get("num_decoder_layers") or config["num_layers"],
        "gated": bool(gate),
        "hidden_act": activation(name),
        "tied_head": is_tied,
        "scales_output": config.get("scale_decoder_outputs", is_tied),
    }


def _settled(arguments: dict, names: Collection[str]) -> dict:
    """Version 1.1 has a head of its own, though newer configs of it say that it is tied."""
    is_own = not arguments["scales_output"] and _HEAD in names
    return {**arguments, "tied_head": arguments["tied_head"] and not is_own}


def _config(arguments):
    require(
        arguments,
        **_FORM,
        head_bias=False,
        embedding_norm=False,
        moe_config=None,
        trains_padding=True,
        attention_dropout_rate=arguments["dropout_rate"],
        embedding_dropout_rate=arguments["dropout_rate"],
    )
    name = published_activation(arguments)
    return {
        **written({**arguments, "norm_epsilon": arguments["norm_epsilon"] or 1e-6}, _FIELDS),
        "d_kv": arguments["head_dim"] or arguments["hidden_size"] // arguments["num_heads"],
        "num_decoder_layers": arguments["decoder_layers"],
        "feed_forward_proj": _proj(name, arguments["gated"]),
        "scale_decoder_outputs": arguments["scales_output"],
        "is_encoder_decoder": True,
    }


def _proj(name, gated):
    if not gated:
        return name
    if name == "gelu":
        raise InputError("a gate of hidden_act='gelu' has no name in T5's configs: 'gelu_tanh' has")
    return "gated-gelu" if name == "gelu_new" else f"gated-{name}"


# The sublayers of blocks: what they are called, and ours.
_SUBLAYERS = {
    "encoder": {"SelfAttention": "attention"},
    "decoder": {"SelfAttention": "self_attention", "EncDecAttention": "cross_attention"},
}


def _block(side, number, gated):
    theirs, ours = f"{side}.block.{number}.layer.", f"transformer/{side}/block_{number}/"
    sublayers, tensors = _SUBLAYERS[side], []
    for place, (name, own) in enumerate(sublayers.items()):
        for projection, part in {"q": "query", "k": "key", "v": "value"}.items():
            tensors.append(
                linear(f"{theirs}{place}.{name}.{projection}.weight", f"{ours}{own}/{part}_kernel")
            )
        output = f"{ours}{own}/output_kernel"
        tensors.append(linear(f"{theirs}{place}.{name}.o.weight", output, num_inputs=2))
        tensors.append(bias(f"{theirs}{place}.layer_norm.weight", f"{ours}{own}_norm/gamma"))
    dense, last = f"{ours}feed_forward/", f"{theirs}{len(sublayers)}."
    mappings = {"wi_0": "gate", "wi_1": "mapping"} if gated else {"wi": "mapping"}
    for name, own in {**mappings, "wo": "projection"}.items():
        tensors.append(linear(f"{last}DenseReluDense.{name}.weight", f"{dense}{own}_kernel"))
    return [*tensors, bias(f"{last}layer_norm.weight", f"{ours}feed_forward_norm/gamma")]


def _tensors(arguments):
    found = [table("shared.weight", "source_embedding/table")]
    if not arguments["tied_head"]:
        found.append(linear(_HEAD, "head/kernel"))
    for side in _SUBLAYERS:
        ours, first = f"transformer/{side}/", f"{side}.block.0.layer.0.SelfAttention."
        block = lambda number, side=side: _block(side, number, arguments["gated"])
        found += [
            table(f"{first}relative_attention_bias.weight", f"{ours}relative_positions/table"),
            bias(f"{side}.final_layer_norm.weight", f"{ours}final_norm/gamma"),
            *of_blocks(arguments[f"{side}_layers"], block),
        ]
    return found


def _mt5_arguments(config):
    """MT5 is version 1.1 from its beginning: gated, and nothing is scaled before the head."""
    config["feed_forward_proj"] = config.get("feed_forward_proj") or "gated-gelu"
    return {**_arguments(config), "scales_output": False}


T5 = Family(
    "T5ForConditionalGeneration",
    EncoderDecoderLM,
    _arguments,
    _config,
    _tensors,
    settled=_settled,
    special_ids=DECODER_IDS,
    own_padding=False,
    copies=(_HEAD, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    ignored=("EncDecAttention.relative_attention_bias.weight",),
)
MT5 = dataclasses.replace(T5, architecture="MT5ForConditionalGeneration", arguments=_mt5_arguments)
