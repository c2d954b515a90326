"""The planner's layout for the ranks that are left, where the command is `dtransformer train`."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence

from dtransformer.cli.launching.processes import is_here
from dtransformer.cli.options import make_parser
from dtransformer.errors import InputError
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.machine import this_device
from dtransformer.planner.report import fields_of
from dtransformer.planner.search import Plan
from dtransformer.runs.automatic import plan_of_run
from dtransformer.runs.config import RunConfig, load_config

# Fields of the config that are another layout's. All others stay as they are given.
_FREE = (
    *("data_parallel", "model_parallel", "context_parallel", "expert_parallel"),
    *("pipeline_stage", "pipeline_schedule", "pipeline_chunks", "micro_batch_num"),
    *("sequence_parallel", "vocab_emb_dp", "recompute"),
)
_NAMES = ("dtransformer", "dtransformer.cli")


def replanned(command: Sequence[str], ranks: Mapping[str, int]) -> Plan | None:
    """Return the plan for as many ranks as there are.

    None where the command's own layout fits them, or its model is not known, or nothing fits;
    then `dtransformer.parallel.config.elastic_config` has the rule.

    Args:
        command: the command of each rank.
        ranks: {host: number of ranks}.
    """
    config = config_of(command)
    if config is None or config.training.layout == "auto" or not any(map(is_here, ranks)):
        return None
    number, local_devices = sum(ranks.values()), config.training.local_devices
    try:
        config.parallel.resolve(number, local_devices)
        return None
    except ValueError:  # it does not fit
        pass
    # The optimizer may not be one that can update shards.
    fixed = fields_of(config.parallel) | {"optimizer_shard": int(config.parallel.optimizer_shard)}
    fixed = {name: value for name, value in fixed.items() if name not in _FREE}
    per_host = max(ranks.values())
    try:
        device = this_device(per_host)
        cluster = Cluster(device, number * local_devices, per_host * local_devices)
        return plan_of_run(config, cluster, fixed)
    except InputError:
        return None


def fields_of_layout(plan: Plan) -> str:
    """Return what a plan says of the layout, as `launch.fitting` reads it."""
    fields = dataclasses.asdict(plan.best.config)
    return json.dumps({name: fields[name] for name in _FREE})


def config_of(command: Sequence[str]) -> RunConfig | None:
    """Return the config of a command that is `dtransformer train`; None where it is another.

    Example:

    >>> config_of(["python", "train.py", "--config", "x.yaml"]) is None
    True
    """
    names = [pathlib.PurePath(word).name for word in command]
    for place in range(1, len(command)):
        if command[place] == "train" and names[place - 1] in _NAMES:
            break
    else:
        return None
    try:
        arguments = make_parser().parse_args(list(command[place:]))
        return load_config(arguments.config, arguments.set)
    except InputError:  # which the ranks tell
        return None
