"""Counts of networks with mixtures of experts: weights, and products for each token.

All are functions of a network's arguments, and of which of its blocks have experts.
"""

from dtransformer.block_forms import has_experts
from dtransformer.layers.settings import as_moe_config
from dtransformer.parallel.config.config import MoEConfig

Shapes = dict[str, tuple[int, ...]]


def experts_of(arguments: dict) -> MoEConfig | None:
    """Return the `MoEConfig` of a network's arguments; None where there is one expert alone."""
    given = arguments.get("moe_config")
    config = None if given is None else as_moe_config(given)
    return None if config is None or config.expert_num == 1 else config


def with_experts(arguments: dict, **stacks) -> dict:
    """Return a network's arguments, and which blocks have experts.

    Args:
        arguments: the network's.
        **stacks: name of each stack and its `BlockStack`, or None.
    """
    found = {
        name: [block.has_experts for block in stack.blocks] if stack is not None else []
        for name, stack in stacks.items()
    }
    return {**arguments, "has_experts": found}


def experts_by_arguments(arguments: dict) -> dict:
    """Return the arguments of a network of one stack, and which blocks its arguments give experts."""
    number, is_there = arguments["num_layers"], experts_of(arguments) is not None
    found = [is_there and has_experts(arguments, i) for i in range(number)]
    return {**arguments, "has_experts": {"blocks": found}}


def moe_shapes(arguments: dict, feed_forward: Shapes) -> Shapes:
    """Return the shapes of a `MoE`'s weights, of those of one expert alone."""
    config, h = experts_of(arguments), arguments["hidden_size"]
    experts = config.expert_num
    shapes = {name: (experts, *shape) for name, shape in feed_forward.items()}
    shapes["router/kernel"] = (h, experts)
    if config.router_type == "sigmoid":
        shapes["router/bias"] = (experts,)
    if config.shared_experts:
        for name, shape in feed_forward.items():
            sizes = _SIZES_OF[name.split("_")[-1]][name.startswith("projection")]
            of_layer = tuple(
                size * config.shared_experts if is_inner else size
                for size, is_inner in zip(shape, sizes)
            )
            shapes[f"shared_experts/{name}"] = of_layer
    return shapes


# Which dimensions of a mapping's, and of the projection's, kernel or bias are features inside.
_SIZES_OF = {"kernel": ((False, True), (True, False)), "bias": ((True,), (False,))}


def feed_forward_products(arguments: dict, stack: str) -> float:
    """Return how many numbers are multiplied for a token in all feed-forward layers of a stack.

    Of experts these are the active ones, to which the token is sent.

    Args:
        arguments: of `with_experts`.
        stack: name of the stack.
    """
    config, h = experts_of(arguments), arguments["hidden_size"]
    each = (3 if arguments.get("gated") else 2) * h
    dense, blocks = each * arguments["ffn_hidden_size"], arguments["has_experts"][stack]
    if config is None:
        return dense * len(blocks)
    active = config.num_experts_chosen + config.shared_experts
    size = config.ffn_hidden_size or arguments["ffn_hidden_size"]
    of_experts = active * each * size + h * config.expert_num
    return sum(of_experts if is_sent else dense for is_sent in blocks)


def active_share(path: str, shape: tuple[int, ...], arguments: dict) -> float:
    """Return which share of a weight's elements a token is computed with.

    Args:
        path: the weight's.
        shape: its shape; experts are its first dimension.
        arguments: the network's.
    """
    config, of_expert = experts_of(arguments), {"kernel": 3, "bias": 2}
    is_one = config is not None and "/feed_forward/" in path
    rank = of_expert.get(path.split("_")[-1])
    if not is_one or "/router/" in path or "/shared_experts/" in path or len(shape) != rank:
        return 1.0
    return config.num_experts_chosen / config.expert_num
