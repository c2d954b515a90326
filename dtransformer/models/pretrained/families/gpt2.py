"""GPT-2: Radford et al., 2019, "Language models are unsupervised multitask learners"."""

from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.pretrained.families.causal import PLAIN, head
from dtransformer.models.pretrained.families.family import (
    Family,
    activation,
    bias,
    norm,
    of_blocks,
    published_activation,
    refuse,
    require,
    table,
)
from dtransformer.models.pretrained.stored_tensor import StoredTensor

_KINDS = "kernel", "bias"


def _arguments(config):
    hidden = config["n_embd"]
    refuse(
        config,
        "GPT-2",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    return {
        "hidden_size": hidden,
        "num_heads": config["n_head"],
        "num_layers": config["n_layer"],
        "ffn_hidden_size": config.get("n_inner") or 4 * hidden,
        "max_length": config["n_positions"],
        "positions": "learned",
        "hidden_act": activation(config.get("activation_function", "gelu_new")),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
        "dropout_rate": config.get("resid_pdrop", 0.1),
        "attention_dropout_rate": config.get("attn_pdrop", 0.1),
        "embedding_dropout_rate": config.get("embd_pdrop", 0.1),
        "tied_head": config.get("tie_word_embeddings", True),
        "embedding_scale": 1.0,
    }


def _config(arguments):
    require(
        arguments,
        **PLAIN,
        positions="learned",
        norm="layer_norm",
        gated=False,
        use_bias=True,
        qkv_bias=True,
        num_kv_heads=arguments["num_heads"],
        head_dim=arguments["hidden_size"] // arguments["num_heads"],
        window=None,
    )
    return {
        "n_embd": arguments["hidden_size"],
        "n_head": arguments["num_heads"],
        "n_layer": arguments["num_layers"],
        "n_inner": arguments["ffn_hidden_size"],
        "n_positions": arguments["max_length"],
        "activation_function": published_activation(arguments),
        "layer_norm_epsilon": arguments["norm_epsilon"] or 1e-5,
        "resid_pdrop": arguments["dropout_rate"],
        "attn_pdrop": arguments["attention_dropout_rate"],
        "embd_pdrop": arguments["embedding_dropout_rate"],
    }


def _block(number):
    theirs, ours = f"h.{number}.", f"blocks/block_{number}/"
    attention, dense = f"{ours}attention/", f"{ours}feed_forward/"
    qkv = [[f"{attention}{x}_{kind}" for x in ("query", "key", "value")] for kind in _KINDS]
    output = f"{attention}output_kernel"
    return [
        *norm(f"{theirs}ln_1", f"{ours}attention_norm"),
        # GPT-2 has kernels as [inputs, outputs], those of queries, keys and values side by side.
        StoredTensor(f"{theirs}attn.c_attn.weight", tuple(qkv[0])),
        bias(f"{theirs}attn.c_attn.bias", *qkv[1]),
        StoredTensor(f"{theirs}attn.c_proj.weight", (output,), num_inputs=2),
        bias(f"{theirs}attn.c_proj.bias", f"{attention}output_bias"),
        *norm(f"{theirs}ln_2", f"{ours}feed_forward_norm"),
        StoredTensor(f"{theirs}mlp.c_fc.weight", (f"{dense}mapping_kernel",)),
        bias(f"{theirs}mlp.c_fc.bias", f"{dense}mapping_bias"),
        StoredTensor(f"{theirs}mlp.c_proj.weight", (f"{dense}projection_kernel",)),
        bias(f"{theirs}mlp.c_proj.bias", f"{dense}projection_bias"),
    ]


def _tensors(arguments):
    return [
        table("wte.weight", "embedding/table"),
        table("wpe.weight", "positions/table"),
        *norm("ln_f", "blocks/final_norm"),
        *head(arguments),
        *of_blocks(arguments["num_layers"], _block),
    ]


GPT2 = Family(
    "GPT2LMHeadModel",
    CausalLM,
    _arguments,
    _config,
    _tensors,
    prefix="transformer.",
    copies=("lm_head.weight",),
    ignored=(".attn.bias", ".attn.masked_bias"),
)
