"""Collectives: differentiable ones to call by hand, and those that an optimizer step uses."""

from dtransformer.parallel.collectives.differentiable import (
    all_gather,
    all_reduce_max,
    all_reduce_min,
    all_reduce_sum,
    all_to_all,
    broadcast,
    gather,
    recv,
    reduce_scatter_sum,
    reduce_sum,
    scatter,
    send,
)

__all__ = [
    "all_gather",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_sum",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "reduce_scatter_sum",
    "reduce_sum",
    "scatter",
    "send",
]
