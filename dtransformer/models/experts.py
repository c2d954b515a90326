"""Counts of networks with mixtures of experts: products for each token, and active weights.

All are functions of a network's arguments, and of which of its blocks have experts.
"""

from dtransformer.layers.settings import as_moe_config
from dtransformer.parallel.config.config import MoEConfig


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
