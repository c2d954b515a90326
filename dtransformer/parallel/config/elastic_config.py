"""Adapt a layout to the remaining devices without changing the global batch and the network."""

import dataclasses
import itertools
import math

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.config.topology import divisors

# Environment variables set by `dtransformer launch`: the maximum number of ranks per host of an
# elastic job, and the launcher's part of the command.
FITS_LAYOUT = "DTRANSFORMER_FIT_LAYOUT"
LAUNCHER = "DTRANSFORMER_LAUNCHER"


def refit(config: TransformerOpParallelConfig, num_devices: int) -> TransformerOpParallelConfig:
    """Return a config for a number of devices that is as close as possible to a given one.

    If the other degrees divide `num_devices`, they are kept, and `data_parallel` takes the rest.
    Otherwise they shrink to divisors of their values. The largest product wins, and ties keep
    `model_parallel` before `context_parallel` before `pipeline_stage`. `expert_parallel` becomes
    its greatest common divisor with the data shards, and `ulysses_shards` with `context_parallel`.
    `fit` divides batches according to the layout, so a step computes the same result. Every
    checkpoint can be loaded.

    Args:
        config: Requested `TransformerOpParallelConfig`.
        num_devices: Integer. Number of available devices.

    Returns:
        A `TransformerOpParallelConfig`.

    Example:

    >>> config = TransformerOpParallelConfig(data_parallel=2, model_parallel=2, pipeline_stage=2)
    >>> found = [refit(config, number) for number in (8, 4, 3, 2)]
    >>> [(c.data_parallel, c.model_parallel, c.pipeline_stage) for c in found]
    [(2, 2, 2), (1, 2, 2), (3, 1, 1), (1, 2, 1)]
    """
    degrees_before = config.model_parallel, config.context_parallel, config.pipeline_stage
    fitting = [
        degrees
        for degrees in itertools.product(*map(divisors, degrees_before))
        if num_devices % math.prod(degrees) == 0
    ]
    model, context, stages = max(fitting, key=lambda degrees: (math.prod(degrees), degrees))
    data = num_devices // (model * context * stages)
    changes = {"model_parallel": model, "context_parallel": context}
    if config.ulysses_shards is not None:
        changes["ulysses_shards"] = math.gcd(config.ulysses_shards, context)
    if config.data_parallel is not None:
        changes["data_parallel"] = data
    experts = math.gcd(config.expert_parallel, data)
    # Meshes span all data shards under ZeRO level 3, so experts use all of them or none.
    all_or_none = config.optimizer_shard == 3 and experts != data
    changes["expert_parallel"] = 1 if all_or_none else experts
    if stages == 1 and config.pipeline_stage > 1:
        changes |= {"pipeline_schedule": "1f1b", "pipeline_chunks": 1}
    if model == 1:
        changes["sequence_parallel"] = False
    return dataclasses.replace(config, **changes, pipeline_stage=stages)
