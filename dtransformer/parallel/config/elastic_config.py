"""Another layout for as many devices as are left: the global batch and the network stay the same."""

import dataclasses
import itertools
import math

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.config.topology import divisors

# Environment variables that `dtransformer launch` sets: the number of ranks of a host at most, if
# ranks may come and go; and the launcher's own part of the command.
FITS_LAYOUT = "DTRANSFORMER_FIT_LAYOUT"
LAUNCHER = "DTRANSFORMER_LAUNCHER"


def refit(config: TransformerOpParallelConfig, num_devices: int) -> TransformerOpParallelConfig:
    """Return a config for a number of devices, as near to a given one as that allows.

    The other degrees stay where they divide the number, and `data_parallel` takes what they leave.
    Elsewhere they become smaller: of those that divide the given ones, the largest, with
    `model_parallel` kept before `context_parallel` and `pipeline_stage`. `expert_parallel` becomes
    what of it divides the data shards that are left. What a batch is divided
    into by `fit` follows the layout, so that a step computes the same. Any checkpoint fits.

    Args:
        config: what was asked for.
        num_devices: how many there are.

    Example:

    >>> config = TransformerOpParallelConfig(data_parallel=2, model_parallel=2, pipeline_stage=2)
    >>> found = [refit(config, number) for number in (8, 4, 3, 2)]
    >>> [(c.data_parallel, c.model_parallel, c.pipeline_stage) for c in found]
    [(2, 2, 2), (1, 2, 2), (3, 1, 1), (1, 2, 1)]
    """
    given = config.model_parallel, config.context_parallel, config.pipeline_stage
    fitting = [
        degrees
        for degrees in itertools.product(*map(divisors, given))
        if num_devices % math.prod(degrees) == 0
    ]
    model, context, stages = max(fitting, key=lambda degrees: (math.prod(degrees), degrees))
    data = num_devices // (model * context * stages)
    changes = {"model_parallel": model, "context_parallel": context}
    if config.data_parallel is not None:
        changes["data_parallel"] = data
    experts = math.gcd(config.expert_parallel, data)
    all_or_none = config.optimizer_shard == 3 and experts != data  # meshes span all data shards
    changes["expert_parallel"] = 1 if all_or_none else experts
    if stages == 1 and config.pipeline_stage > 1:
        changes |= {"pipeline_schedule": "1f1b", "pipeline_chunks": 1}
    if model == 1:
        changes["sequence_parallel"] = False
    return dataclasses.replace(config, **changes, pipeline_stage=stages)
