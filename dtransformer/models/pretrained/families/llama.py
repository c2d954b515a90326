"""Llama 1 to 3, and the families that differ from it by a few fields: Mistral and Qwen2.

References: Touvron et al., 2023, "LLaMA", arXiv 2302.13971; Grattafiori et al., 2024, "The Llama 3
herd of models", arXiv 2407.21783; Jiang et al., 2023, "Mistral 7B", arXiv 2310.06825; Yang et al.,
2024, "Qwen2 technical report", arXiv 2407.10671.
"""

from collections.abc import Callable

from dtransformer.errors import InputError
from dtransformer.layers.rotary import ntk_base
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.pretrained.families.causal import PLAIN, head
from dtransformer.models.pretrained.families.family import (
    Family,
    activation,
    bias,
    linear,
    of_blocks,
    published_activation,
    refuse,
    require,
    table,
)
from dtransformer.models.pretrained.stored_tensor import StoredTensor


def llama_arguments(config: dict, kv_heads: int | None = None, base: float = 10000.0) -> dict:
    """Llama's, and those of the families that differ by a few fields only.

    Args:
        config: the published config.
        kv_heads: grouped heads where it does not say; None for as many as heads.
        base: the rotary base where it does not say.
    """
    refuse(config, "Llama", mlp_bias=False)
    if others := sorted({*(config.get("layer_types") or ())} - {"full_attention"}):
        raise InputError(
            f"layer_types has {others[0]!r}, attention of some blocks: it is not built"
        )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads", kv_heads) or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "num_layers": config["num_hidden_layers"],
        "ffn_hidden_size": config["intermediate_size"],
        "max_length": config["max_position_embeddings"],
        "positions": "rotary",
        **_rotary(config, base),
        "hidden_act": activation(config.get("hidden_act", "silu")),
        "norm": "rms_norm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "gated": True,
        "use_bias": False,
        "qkv_bias": False,
        "dropout_rate": 0.0,
        "attention_dropout_rate": config.get("attention_dropout", 0.0),
        "tied_head": config.get("tie_word_embeddings", False),
        "embedding_scale": 1.0,
    }


def _rotary(config, usual_base):
    """Return the arguments of rotary positions, which configs hold in one of two forms."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = given.pop("rope_theta", None) or config.get("rope_theta", usual_base)
    kind = given.pop("rope_type", None) or given.pop("type", "default")
    given.pop("type", None)
    fraction = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor", 1.0)
    scaling = None if kind == "default" else {"type": kind, **given}
    return {
        "rotary_base": float(base),
        "rotary_fraction": float(fraction or 1.0),
        "rotary_scaling": scaling,
    }


def llama_config(arguments: dict) -> dict:
    """Return the opposite of `llama_arguments`."""
    require(
        arguments,
        **PLAIN,
        positions="rotary",
        norm="rms_norm",
        gated=True,
        use_bias=False,
        rotary_fraction=1.0,
    )
    hidden, heads = arguments["hidden_size"], arguments["num_heads"]
    head_dim, base = arguments["head_dim"] or hidden // heads, arguments["rotary_base"]
    scaling = dict(arguments["rotary_scaling"] or {"type": "default"})
    if scaling["type"] == "ntk":  # configs say it by the base
        base, scaling = ntk_base(base, scaling["factor"], head_dim), {"type": "default"}
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": arguments["num_kv_heads"] or heads,
        "head_dim": head_dim,
        "num_hidden_layers": arguments["num_layers"],
        "intermediate_size": arguments["ffn_hidden_size"],
        "max_position_embeddings": arguments["max_length"],
        "rope_theta": base,
        "rope_parameters": {
            "rope_theta": base,
            "rope_type": scaling.pop("type"),
            **scaling,
        },
        "hidden_act": published_activation(arguments),
        "rms_norm_eps": arguments["norm_epsilon"] or 1e-6,
        "attention_dropout": arguments["attention_dropout_rate"],
        "attention_bias": False,
        "mlp_bias": False,
    }


def attention_tensors(number: int, arguments: dict) -> list[StoredTensor]:
    """Return the tensors of a block's attention and norms."""
    theirs, ours = f"model.layers.{number}.", f"blocks/block_{number}/"
    attention, own = f"{ours}attention/", f"{theirs}self_attn."
    projections = {"q": "query", "k": "key", "v": "value"}
    return [
        bias(f"{theirs}input_layernorm.weight", f"{ours}attention_norm/gamma"),
        *(
            linear(f"{own}{x}_proj.weight", f"{attention}{y}_kernel")
            for x, y in projections.items()
        ),
        *(
            bias(f"{own}{x}_proj.bias", f"{attention}{y}_bias")
            for x, y in projections.items()
            if arguments["qkv_bias"]
        ),
        linear(f"{own}o_proj.weight", f"{attention}output_kernel", num_inputs=2),
        bias(f"{theirs}post_attention_layernorm.weight", f"{ours}feed_forward_norm/gamma"),
    ]


def _block(number, arguments):
    mlp, dense = f"model.layers.{number}.mlp.", f"blocks/block_{number}/feed_forward/"
    return [
        *attention_tensors(number, arguments),
        linear(f"{mlp}gate_proj.weight", f"{dense}gate_kernel"),
        linear(f"{mlp}up_proj.weight", f"{dense}mapping_kernel"),
        linear(f"{mlp}down_proj.weight", f"{dense}projection_kernel"),
    ]


def llama_tensors(arguments: dict, block: Callable = _block) -> list[StoredTensor]:
    """Return the tensors of a network, of a function of a block's number and the arguments."""
    return [
        table("model.embed_tokens.weight", "embedding/table"),
        bias("model.norm.weight", "blocks/final_norm/gamma"),
        *head(arguments),
        *of_blocks(arguments["num_layers"], lambda number: block(number, arguments)),
    ]


def _plain_llama_arguments(config):
    refuse(config, "Llama", attention_bias=False)
    return llama_arguments(config)


def _mistral_arguments(config):
    # A config that says nothing of it means 4096, as that of the first Mistral.
    return {**llama_arguments(config, 8), "window": config.get("sliding_window", 4096)}


def _mistral_config(arguments):
    require(arguments, qkv_bias=False)
    return {**llama_config(arguments), "sliding_window": arguments["window"]}


def _qwen2_arguments(config):
    if config.get("use_sliding_window"):
        raise InputError("use_sliding_window=true, windows of some blocks only, is not built")
    return {**llama_arguments(config), "qkv_bias": True}


def _qwen2_config(arguments):
    require(arguments, qkv_bias=True, window=None)
    return {**llama_config(arguments), "use_sliding_window": False}


def _only_llama_config(arguments):
    require(arguments, qkv_bias=False, window=None)
    return llama_config(arguments)


# What files may have besides.
SPARE = {"copies": ("lm_head.weight",), "ignored": ("rotary_emb.inv_freq",)}


USUAL_IDS = {"bos_token_id": 1, "eos_token_id": 2}


def _family(architecture, arguments, config, usual_ids=USUAL_IDS):
    options = {**SPARE, "usual_ids": usual_ids}
    return Family(architecture, CausalLM, arguments, config, llama_tensors, **options)


LLAMA = _family("LlamaForCausalLM", _plain_llama_arguments, _only_llama_config)
MISTRAL = _family("MistralForCausalLM", _mistral_arguments, _mistral_config)
QWEN2 = _family("Qwen2ForCausalLM", _qwen2_arguments, _qwen2_config, {})
