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
    read,
    refuse,
    require,
    table,
    written,
)
from dtransformer.models.pretrained.stored_tensor import StoredTensor

# Our arguments -> fields of configs, and what they are where a config says nothing.
_FIELDS = {
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "num_layers": "n_layer",
    "max_length": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
    "dropout_rate": "resid_pdrop",
    "attention_dropout_rate": "attn_pdrop",
    "embedding_dropout_rate": "embd_pdrop",
}
_USUAL = {
    "norm_epsilon": 1e-5,
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
    "embedding_dropout_rate": 0.1,
}
_KINDS = "kernel", "bias"


def _arguments(config):
    refuse(
        config,
        "GPT-2",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    return {
        **read(config, _FIELDS, **_USUAL),
        "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
        "positions": "learned",
        "hidden_act": activation(config.get("activation_function", "gelu_new")),
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
        **written(arguments, _FIELDS),
        "n_inner": arguments["ffn_hidden_size"],
        "activation_function": published_activation(arguments),
        "layer_norm_epsilon": arguments["norm_epsilon"] or 1e-5,
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
    usual_ids={"bos_token_id": 50256, "eos_token_id": 50256},
    prefix="transformer.",
    copies=("lm_head.weight",),
    ignored=(".attn.bias", ".attn.masked_bias"),
)
