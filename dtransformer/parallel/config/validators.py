"""Validation of configs: what fields may hold, and which of them work together."""

import dataclasses
import re
from collections.abc import Callable

from dtransformer.errors import nearest
from dtransformer.parallel.schedules import schedules

RECOMPUTE_PARTS = ("attention", "feed_forward", "norm")
# What dimensions are sharded over; the first one is outermost.
MESH_AXES = ("data", "context", "model")
GRADIENT_DTYPES = ("float32", "float16", "bfloat16")
PARTITIONS = ("flat", "whole")
CONTEXT_MODES = ("auto", "ulysses", "all_gather", "ring")
ROUTERS = ("softmax", "sigmoid")


def check_type(name: str, value, is_right: bool, what: str) -> None:
    """Raise a TypeError of what a field has to be, unless it is that."""
    if not is_right:
        raise TypeError(f"{name} must be {what}, got {value!r} ({type(value).__name__})")


def count(name: str, value, least: int = 1) -> None:
    """Check a degree of parallelism or another count: an int of at least 1."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    check_type(name, value, is_int, "an int")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def optional_count(name: str, value) -> None:
    """Check a `count`, or None."""
    if value is not None:
        count(name, value)


def count_or_zero(name: str, value) -> None:
    """Check an int of at least 0."""
    count(name, value, least=0)


def flag(name: str, value) -> None:
    """Check a bool."""
    check_type(name, value, isinstance(value, bool), "True or False")


def non_negative(name: str, value) -> None:
    """Check a finite number of at least 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    check_type(name, value, is_number, "a number")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")


def positive(name: str, value) -> None:
    """Check a finite number greater than 0."""
    non_negative(name, value)
    if value == 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")


def fraction(name: str, value) -> None:
    """Check a number in [0, 1)."""
    non_negative(name, value)
    if value >= 1:
        raise ValueError(f"{name} must be less than 1, got {value}")


def shard_level(name: str, value) -> None:
    """Check a level of `optimizer_shard`: a bool, or an int from 0 to 3."""
    allowed = "False, True (level 1) or a level 0 to 3"
    check_type(name, value, isinstance(value, int), allowed)
    if not 0 <= value <= 3:
        raise ValueError(f"{name} must be {allowed}, got {value}")


def recompute_parts(name: str, value) -> None:
    """Check a tuple of `RECOMPUTE_PARTS`."""
    check_type(name, value, isinstance(value, (tuple, list)), "a tuple of names")
    for part in value:
        if part not in RECOMPUTE_PARTS:
            raise ValueError(f"{name} may hold {', '.join(RECOMPUTE_PARTS)}; got {part!r}")


def patterns(name: str, value) -> None:
    """Check a tuple of regular expressions."""
    are_texts = isinstance(value, (tuple, list)) and all(isinstance(v, str) for v in value)
    check_type(name, value, are_texts, "a tuple of regular expressions")
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{name} takes regular expressions, got {value!r}: {pattern!r} is none ({error})"
            ) from error


def one_of(*allowed: str) -> Callable:
    """Return a check of a str that is one of those allowed."""

    def check(name, value):
        check_type(name, value, isinstance(value, str), "a str")
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")

    return check


def pipeline_schedule(name: str, value) -> None:
    """Check the name of a pipeline schedule."""
    one_of(*schedules.SCHEDULES)(name, value)


def axis_rules(name: str, value) -> None:
    """Check a dict of logical names and mesh axes, or None."""
    if value is None:
        return
    check_type(name, value, isinstance(value, dict), "a dict")
    for logical, axis in value.items():
        allowed = (*MESH_AXES, None)
        if not isinstance(logical, str) or axis not in allowed:
            raise ValueError(
                f"{name} maps names to one of {', '.join(map(repr, allowed))}; got {value!r}"
            )


def field(default, check: Callable):
    """Return a field of a `Checked` dataclass.

    Args:
        default: its default.
        check: a function of its name and a value, which raises if that is not allowed.
    """
    return dataclasses.field(default=default, metadata={"check": check})


class Checked:
    """A dataclass whose fields, made by `field`, are checked on every assignment."""

    def __setattr__(self, name, value):
        field = self.__dataclass_fields__.get(name)
        if field is None:
            hint = nearest(name, self.__dataclass_fields__)
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; {hint}")
        field.metadata["check"](name, value)
        copies = {list: tuple, dict: dict}
        object.__setattr__(self, name, copies.get(type(value), lambda x: x)(value))


# What each stage of a pipeline would have to do once for every micro-batch.
_NOT_WITH_A_PIPELINE = {
    "optimizer_shard": "every weight would be gathered twice for each micro-batch; level 2 shards "
    "gradients and optimizer states, and a stage has its own weights only",
    "gradient_accumulation_shard": "gradients would be sent for each micro-batch; leave it False",
}


def check_supported(config, local_devices: int = 1) -> None:
    """Refuse a config that this version cannot carry out, instead of ignoring it.

    Args:
        config: a `TransformerOpParallelConfig`.
        local_devices: number of devices that each rank drives.

    Raises:
        ValueError: fields do not work together; says why.
    """
    if config.optimizer_shard_partition == "whole" and int(config.optimizer_shard) not in (1, 2):
        why = (
            "level 3 shards the weights themselves" if config.optimizer_shard else "none is sharded"
        )
        raise ValueError(
            f"optimizer_shard_partition='whole' does not work with "
            f"optimizer_shard={config.optimizer_shard}, as {why}: set optimizer_shard=1 or 2, or "
            "optimizer_shard_partition='flat'"
        )
    if config.sequence_parallel and config.context_parallel > 1 and config.model_parallel > 1:
        raise ValueError(
            f"sequence_parallel=True does not work with context_parallel={config.context_parallel}: "
            "a dimension is sharded over one axis of a mesh, and the sequence is over the context "
            "axis; set sequence_parallel=False, and a greater context_parallel for less memory"
        )
    if config.pipeline_stage > 1 or config.pipeline_chunks > 1:
        degree = "pipeline_stage" if config.pipeline_stage > 1 else "pipeline_chunks"
        for name, value in settings_without_chunks(config).items():
            raise ValueError(
                f"{name}={value} does not work with {degree}={getattr(config, degree)}: "
                f"{_NOT_WITH_A_PIPELINE[name]}"
            )
        schedules.check(
            config.pipeline_schedule,
            config.pipeline_stage,
            config.micro_batch_num,
            config.pipeline_chunks,
        )
        divides = schedules.SCHEDULES[config.pipeline_schedule].divides_backward
        degrees = config.model_parallel * config.context_parallel * config.expert_parallel
        if divides and degrees * local_devices > 1:
            raise ValueError(
                f"pipeline_schedule={config.pipeline_schedule!r} needs stages of one device, as on "
                "a mesh the gradients of weights are not computed apart; got "
                f"model_parallel={config.model_parallel}, expert_parallel={config.expert_parallel}, "
                f"context_parallel={config.context_parallel} and local_devices={local_devices}: set "
                "pipeline_schedule='1f1b' or 'interleaved'"
            )


def settings_without_chunks(config) -> dict:
    """Return the fields and values of a config that work in no pipeline, of one stage or more."""
    values = {name: getattr(config, name) for name in _NOT_WITH_A_PIPELINE}
    return {name: value for name, value in values.items() if value is True or value == 3}


def check_joined(config, topology, placement) -> None:
    """Check that a job was joined with a config.

    Args:
        config: a `TransformerOpParallelConfig`.
        topology: the job's `Topology`.
        placement: the job's `Placement`.

    Raises:
        RuntimeError: operations are to be sharded, or blocks to be put on stages, and `init` has
            joined the job without.
    """
    for name, asked, joined in (
        ("model_parallel=", config.model_parallel, topology.model),
        ("context_parallel=", config.context_parallel, topology.context),
        ("expert_parallel=", config.expert_parallel, topology.expert),
        ("pipeline_stage=", config.pipeline_stage, topology.stage),
        ("model chunks on stages ", config.placement.stage_of_chunk, placement.stage_of_chunk),
    ):
        if asked != joined:
            raise RuntimeError(
                f"the config has {name}{asked}, and the job was joined with {joined}: call "
                "dtransformer.init(config) before the network is made"
            )
