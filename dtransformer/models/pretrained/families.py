"""The families of published models, as data: what their configs say, and where weights lie.

A family is a row of `FAMILIES`: how a published config becomes arguments of `CausalLM`, how those
become a config again, and the names of the tensors of a block and around the blocks.
"""

import dataclasses
from collections.abc import Callable

from dtransformer.errors import InputError
from dtransformer.models.pretrained.stored_tensor import StoredTensor

# Names of activations in published configs -> ours.
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "relu": "relu",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of published models.

    Args:
        architecture: the class in `transformers` that has a language model's head.
        arguments: a function of a published config that returns arguments of `CausalLM`.
        config: a function of a network's arguments that returns a published config.
        block: a function of a block's number, a network's arguments, that returns its
            `StoredTensor`s.
        around: a function of a network's arguments that returns those of no block.
        prefix: what names may begin with, or not.
        ignored: endings of names that hold no weights.
    """

    architecture: str
    arguments: Callable[[dict], dict]
    config: Callable[[dict], dict]
    block: Callable[[int, dict], list[StoredTensor]]
    around: Callable[[dict], list[StoredTensor]]
    prefix: str = ""
    ignored: tuple[str, ...] = ()

    def tensors(self, arguments: dict) -> list[StoredTensor]:
        """Return what a file of a network holds."""
        blocks = range(arguments["num_layers"])
        own = [tensor for number in blocks for tensor in self.block(number, arguments)]
        return self.around(arguments) + own


def linear(name: str, *weights: str, num_inputs: int = 1) -> StoredTensor:
    """Return a kernel as PyTorch's `Linear` has it: [outputs, inputs]."""
    return StoredTensor(name, weights, is_transposed=True, num_inputs=num_inputs)


def bias(name: str, *weights: str) -> StoredTensor:
    """Return a tensor [features]: a bias, or what a norm multiplies with."""
    return StoredTensor(name, weights, num_inputs=0)


def _gpt2_arguments(config):
    hidden = config["n_embd"]
    usual = {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    }
    for name, value in usual.items():
        if config.get(name, value) != value:
            raise InputError(f"{name}={config[name]!r} is not built for GPT-2's blocks")
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
    }


def _gpt2_config(arguments):
    require(
        arguments,
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
        "activation_function": _published_activation(arguments),
        "layer_norm_epsilon": arguments["norm_epsilon"] or 1e-5,
        "resid_pdrop": arguments["dropout_rate"],
        "attn_pdrop": arguments["attention_dropout_rate"],
        "embd_pdrop": arguments["embedding_dropout_rate"],
    }


def _gpt2_block(number, arguments):
    theirs, ours = f"h.{number}.", f"blocks/block_{number}/"
    attention, dense = f"{ours}attention/", f"{ours}feed_forward/"
    qkv = [[f"{attention}{x}_{kind}" for x in ("query", "key", "value")] for kind in _KINDS]
    output = f"{attention}output_kernel"
    return [
        *_norm(f"{theirs}ln_1", f"{ours}attention_norm"),
        # GPT-2 has kernels as [inputs, outputs], those of queries, keys and values side by side.
        StoredTensor(f"{theirs}attn.c_attn.weight", tuple(qkv[0])),
        bias(f"{theirs}attn.c_attn.bias", *qkv[1]),
        StoredTensor(f"{theirs}attn.c_proj.weight", (output,), num_inputs=2),
        bias(f"{theirs}attn.c_proj.bias", f"{attention}output_bias"),
        *_norm(f"{theirs}ln_2", f"{ours}feed_forward_norm"),
        StoredTensor(f"{theirs}mlp.c_fc.weight", (f"{dense}mapping_kernel",)),
        bias(f"{theirs}mlp.c_fc.bias", f"{dense}mapping_bias"),
        StoredTensor(f"{theirs}mlp.c_proj.weight", (f"{dense}projection_kernel",)),
        bias(f"{theirs}mlp.c_proj.bias", f"{dense}projection_bias"),
    ]


_KINDS = "kernel", "bias"


def _norm(theirs, ours):
    return [bias(f"{theirs}.weight", f"{ours}/gamma"), bias(f"{theirs}.bias", f"{ours}/beta")]


def _gpt2_around(arguments):
    return [
        StoredTensor("wte.weight", ("embedding/table",)),
        StoredTensor("wpe.weight", ("positions/table",)),
        *_norm("ln_f", "blocks/final_norm"),
        *_head(arguments),
    ]


def _head(arguments):
    return [] if arguments["tied_head"] else [linear("lm_head.weight", "head/kernel")]


def _llama_arguments(config):
    """Llama's, and those of the families that differ by a few fields only."""
    if config.get("mlp_bias"):
        raise InputError("mlp_bias=true is not built for Llama's blocks")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "num_layers": config["num_hidden_layers"],
        "ffn_hidden_size": config["intermediate_size"],
        "max_length": config["max_position_embeddings"],
        "positions": "rotary",
        **_rotary(config),
        "hidden_act": activation(config.get("hidden_act", "silu")),
        "norm": "rms_norm",
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "gated": True,
        "use_bias": False,
        "qkv_bias": False,
        "dropout_rate": 0.0,
        "attention_dropout_rate": config.get("attention_dropout", 0.0),
        "tied_head": config.get("tie_word_embeddings", False),
    }


def _rotary(config):
    """Return the arguments of rotary positions, which configs hold in one of two forms."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = given.pop("rope_theta", None) or config.get("rope_theta", 10000.0)
    kind = given.pop("rope_type", None) or given.pop("type", "default")
    given.pop("type", None)
    fraction = given.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor", 1.0)
    scaling = None if kind == "default" else {"type": kind, **given}
    return {
        "rotary_base": float(base),
        "rotary_fraction": float(fraction or 1.0),
        "rotary_scaling": scaling,
    }


def _llama_config(arguments):
    require(
        arguments,
        positions="rotary",
        norm="rms_norm",
        gated=True,
        use_bias=False,
        rotary_fraction=1.0,
    )
    hidden, heads = arguments["hidden_size"], arguments["num_heads"]
    scaling = dict(arguments["rotary_scaling"] or {"type": "default"})
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": arguments["num_kv_heads"] or heads,
        "head_dim": arguments["head_dim"] or hidden // heads,
        "num_hidden_layers": arguments["num_layers"],
        "intermediate_size": arguments["ffn_hidden_size"],
        "max_position_embeddings": arguments["max_length"],
        "rope_theta": arguments["rotary_base"],
        "rope_parameters": {
            "rope_theta": arguments["rotary_base"],
            "rope_type": scaling.pop("type"),
            **scaling,
        },
        "hidden_act": _published_activation(arguments),
        "rms_norm_eps": arguments["norm_epsilon"] or 1e-6,
        "attention_dropout": arguments["attention_dropout_rate"],
        "attention_bias": False,
        "mlp_bias": False,
    }


def _llama_block(number, arguments):
    theirs, ours = f"model.layers.{number}.", f"blocks/block_{number}/"
    attention, dense = f"{ours}attention/", f"{ours}feed_forward/"
    projections = {"q": "query", "k": "key", "v": "value"}
    own, mlp = f"{theirs}self_attn.", f"{theirs}mlp."
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
        linear(f"{mlp}gate_proj.weight", f"{dense}gate_kernel"),
        linear(f"{mlp}up_proj.weight", f"{dense}mapping_kernel"),
        linear(f"{mlp}down_proj.weight", f"{dense}projection_kernel"),
    ]


def _llama_around(arguments):
    return [
        StoredTensor("model.embed_tokens.weight", ("embedding/table",)),
        bias("model.norm.weight", "blocks/final_norm/gamma"),
        *_head(arguments),
    ]


def _plain_llama_arguments(config):
    if config.get("attention_bias"):
        raise InputError("attention_bias=true is not built for Llama's blocks")
    return _llama_arguments(config)


def _mistral_arguments(config):
    # A config that says nothing of it means 4096, as that of the first Mistral.
    return {**_llama_arguments(config), "window": config.get("sliding_window", 4096)}


def _mistral_config(arguments):
    require(arguments, qkv_bias=False)
    return {**_llama_config(arguments), "sliding_window": arguments["window"]}


def _qwen2_arguments(config):
    if config.get("use_sliding_window"):
        raise InputError("use_sliding_window=true, windows of some blocks only, is not built")
    return {**_llama_arguments(config), "qkv_bias": True}


def _qwen2_config(arguments):
    require(arguments, qkv_bias=True, window=None)
    return {**_llama_config(arguments), "use_sliding_window": False}


def _only_llama_config(arguments):
    require(arguments, qkv_bias=False, window=None)
    return _llama_config(arguments)


_LLAMA = {"block": _llama_block, "around": _llama_around, "ignored": ("rotary_emb.inv_freq",)}

# The `model_type` of a config -> the family.
FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _gpt2_arguments,
        _gpt2_config,
        _gpt2_block,
        _gpt2_around,
        prefix="transformer.",
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    "llama": Family("LlamaForCausalLM", _plain_llama_arguments, _only_llama_config, **_LLAMA),
    "mistral": Family("MistralForCausalLM", _mistral_arguments, _mistral_config, **_LLAMA),
    "qwen2": Family("Qwen2ForCausalLM", _qwen2_arguments, _qwen2_config, **_LLAMA),
}


def activation(name: str) -> str:
    """Return our name of a published config's activation.

    Raises:
        InputError: it has none.
    """
    if name not in _ACTIVATIONS:
        raise InputError(f"the activation {name!r} is none of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _published_activation(arguments):
    theirs = {ours: name for name, ours in reversed(_ACTIVATIONS.items())}
    name = arguments["hidden_act"]
    if name not in theirs:
        raise InputError(f"hidden_act={name!r} has no name in published configs")
    return theirs[name]


def require(arguments: dict, **wanted) -> None:
    """Check that a network has what its family's config cannot say otherwise.

    Raises:
        InputError: names the argument that differs.
    """
    wanted |= {"embedding_scale": 1.0, "head_bias": False, "post_layernorm_residual": False}
    heads = arguments["num_heads"]
    usual = {
        "qkv_bias": arguments["use_bias"],
        "num_kv_heads": heads,
        "head_dim": arguments["hidden_size"] // heads,
    }
    for name, value in wanted.items():
        own = usual.get(name) if arguments[name] is None else arguments[name]
        if own != value:
            raise InputError(
                f"the network has {name}={own!r}, the published family {value!r}: it cannot be "
                "saved as one of that family"
            )
