"""Shapes of published models and of network objects."""

import dataclasses
from collections.abc import Mapping

from dtransformer.architectures import Architecture, architecture_named
from dtransformer.block_forms import Latent, arguments_of_block, placement_of
from dtransformer.errors import InputError, shown
from dtransformer.planner.shape import ModelShape

_STACKS = ("num_layers", "encoder_layers", "decoder_layers")
_RELATIVE_RANGES = 32
_DEFAULT_LENGTH = 512  # Training length of models without a maximum length.


def named(name: str, /, **changes) -> ModelShape:
    """Return the shape of a published model.

    Args:
        name: Key of `dtransformer.architectures.ARCHITECTURES`. "-" is read as "_".
        **changes: Values for fields of `ModelShape`, such as `sequence_length`.

    Raises:
        InputError: If no such model exists. The message lists all names.

    Example:

    >>> named("llama2-7b").num_layers, named("bert_base", sequence_length=128).sequence_length
    (32, 128)
    """
    try:
        key, architecture = architecture_named(name)
    except InputError as error:
        hint = "A YAML file or the folder of a published model is also possible."
        raise InputError(f"{error} {hint}") from None
    return from_architecture(key, architecture, **changes)


def from_architecture(name: str, architecture: Architecture, /, **changes) -> ModelShape:
    """Return the shape of a network from its class name and arguments.

    Args:
        name: Name of the shape.
        architecture: Its `Architecture`.
        **changes: Values for fields of `ModelShape` that replace the computed ones.
    """
    arguments = architecture.arguments
    network = architecture.network
    length = arguments.get("max_length") or arguments.get("max_target_length")
    stacks = {key: arguments.get(key, 0) for key in _STACKS}
    num_stacks = sum(blocks > 0 for blocks in stacks.values())
    is_last = arguments.get("post_layernorm_residual", network in ("MaskedLM", "EncoderDecoderLM"))
    fields = {
        "name": name,
        **stacks,
        "hidden_size": arguments["hidden_size"],
        "num_heads": arguments["num_heads"],
        "ffn_hidden_size": arguments.get("ffn_hidden_size"),
        "vocab_size": arguments.get("vocab_size") or arguments.get("target_vocab_size"),
        "sequence_length": length or _DEFAULT_LENGTH,
        "num_kv_heads": arguments.get("num_kv_heads"),
        "head_dim": arguments.get("head_dim"),
        "gated": bool(arguments.get("gated", False)),
        "use_bias": arguments.get("use_bias", True),
        "qkv_bias": arguments.get("qkv_bias"),
        "rms_norm": arguments.get("norm", "layer_norm")
        not in ("layer_norm", "layer_norm_unit_offset"),
        "sublayer_norms": placement_of({"post_layernorm_residual": is_last, **arguments}).number,
        "latent": Latent.of(arguments.get("latent")),
        "other_block_parameters": _vector_parameters(arguments),
        "tied_head": arguments.get("tied_head", True),
        "is_causal": network != "MaskedLM",
        "final_norms": 0 if is_last else num_stacks,
        **_expert_fields(arguments, stacks["num_layers"]),
    }
    learned = "learned" if network in ("MaskedLM", "EncoderDecoderLM", "CausalLM") else None
    if arguments.get("positions", learned) == "learned":
        default = 1024 if network == "EncoderDecoderLM" else 512
        entries = arguments.get("max_length", default) + arguments.get("position_offset", 0)
        fields["learned_positions"] = entries * num_stacks
    # A MaskedLM has a dense layer before the logits. Its sentence-pair head has two.
    if network == "MaskedLM":
        h = arguments["hidden_size"]
        size = {**fields, **changes}["sequence_length"]
        pair = h * (h + 2) * bool(arguments.get("next_sentence"))
        fields["head_products"] = size * h * (h + fields["vocab_size"]) + pair
    fields["other_parameters"] = _other_parameters(network, arguments, fields, num_stacks)
    return checked(ModelShape, {**fields, **changes})


def _vector_parameters(arguments):
    """Return the number of parameters of a block's small vectors: norms, sinks and xIELU."""
    n = arguments["num_heads"]
    latent = Latent.of(arguments.get("latent"))
    d = arguments.get("head_dim") or arguments["hidden_size"] // n
    m = arguments.get("num_kv_heads") or n
    gains = {None: 0, "rms_norm_all_heads": (n + m) * d, "layer_norm": 4 * d}
    latents = 0 if latent is None else latent.kv_rank + (latent.query_rank or 0)
    sinks = n * bool(arguments.get("sinks"))
    activation = 2 * (arguments.get("hidden_act") == "xielu")
    return gains.get(arguments.get("qk_norm"), 2 * d) + latents + sinks + activation


def _expert_fields(arguments, num_layers):
    """Return the fields of `ModelShape` for experts."""
    experts = arguments.get("moe_config")
    if not experts:
        return {}
    fields = dict(experts) if isinstance(experts, Mapping) else dataclasses.asdict(experts)
    num_experts = fields.get("expert_num", 1)
    return {
        "num_experts": num_experts,
        "experts_chosen": min(fields.get("num_experts_chosen", 1), num_experts),
        "experts_every": arguments.get("moe_every", 1),
        "expert_hidden_size": fields.get("ffn_hidden_size"),
        "dense_blocks": tuple(
            i
            for i in range(num_layers)
            if not arguments_of_block(arguments, i).get("experts", True)
        ),
        "shared_experts": fields.get("shared_experts", 0),
        "capacity_factor": 0.0
        if fields.get("dropless", False)
        else float(fields.get("capacity_factor", 1.1)),
        "router_biases": (fields.get("router_type", "softmax") == "sigmoid")
        + bool(fields.get("router_bias")),
    }


def _other_parameters(network, arguments, fields, stacks):
    """Return the number of parameters outside blocks, embedding tables and the head.

    The result can be negative, because it subtracts norms that some blocks lack.
    """
    h = arguments["hidden_size"]
    total = fields["vocab_size"] * bool(arguments.get("head_bias"))
    if fields["encoder_layers"]:
        total += (
            0 if arguments.get("shared_embeddings", True) else h * arguments["source_vocab_size"]
        )
        total += 2 * h * stacks * bool(arguments.get("embedding_norm"))
    if arguments.get("positions") == "relative":
        total += (
            stacks * arguments["num_heads"] * arguments.get("relative_ranges", _RELATIVE_RANGES)
        )
    blocks_without_norm = [
        i
        for i in range(arguments.get("num_layers", 0))
        if not arguments_of_block(arguments, i).get("attention_norm", True)
    ]
    total -= len(blocks_without_norm) * (h if fields["rms_norm"] else 2 * h)
    if network == "MaskedLM":
        types = arguments.get("num_token_types", 2)
        pair = arguments.get("next_sentence", False)
        dense = h * h + h
        norm = h if fields["rms_norm"] else 2 * h
        biases = h * fields["use_bias"]
        total += 2 * norm + h * types + h * h + biases + fields["vocab_size"]
        total += pair * (dense + 2 * h + 2)
    return total


def from_network(network: object, **changes) -> ModelShape:
    """Return the shape of a network object, built or not.

    Args:
        network: A network from `dtransformer.models`.
        **changes: Values for fields of `ModelShape` that replace the computed ones.

    Raises:
        InputError: If the network has no dict `arguments`.
    """
    if not isinstance(getattr(network, "arguments", None), Mapping):
        raise InputError(
            f"The network of class {type(network).__name__} has no dict `arguments` with its "
            "sizes. Use a network from dtransformer.models, or a ModelShape."
        )
    if getattr(network, "has_task_head", False):
        products = network.arguments["hidden_size"] * network.head.num_labels
        changes = {"head_products": products, **changes}
    architecture = Architecture(type(network).__name__, dict(network.arguments), "")
    return from_architecture(network.name, architecture, **changes)


def checked(kind, fields: Mapping):
    """Return `kind(**fields)` for a dataclass `kind`, with one-line errors for wrong fields.

    Raises:
        InputError: If a field is unknown or missing. The message lists the known fields.
    """
    names = [field.name for field in dataclasses.fields(kind)]
    for name in fields:
        if name not in names:
            raise InputError(
                f"{kind.__name__} has no field {shown(name)}. Its fields are {', '.join(names)}."
            )
    try:
        return kind(**fields)
    except TypeError as error:
        raise InputError(f"{kind.__name__}: {str(error).split('__init__() ')[-1]}") from None
