"""Active weights of networks with mixtures of experts, by their arguments."""

from dtransformer.layers.settings import as_moe_config
from dtransformer.parallel.config.config import MoEConfig


def experts_of(arguments: dict) -> MoEConfig | None:
    """Return the `MoEConfig` of a network's arguments; None where there is one expert alone."""
    given = arguments.get("moe_config")
    config = None if given is None else as_moe_config(given)
    return None if config is None or config.expert_num == 1 else config


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
