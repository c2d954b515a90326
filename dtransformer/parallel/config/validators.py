"""Validation of config fields and of their combinations."""

import functools
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Literal

import numpy as np
import pydantic
from pydantic import AfterValidator, Field

from dtransformer.errors import suggest
from dtransformer.parallel.schedules import schedules

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Level = Annotated[int, Field(ge=0, le=3)]
MeshAxis = Literal["data", "context", "model"]
LayoutAxis = Literal["data", "model"]
# Mesh axes, outermost first.
MESH_AXES = typing.get_args(MeshAxis)


# These functions only check. `checked_value` ignores their results.


def _schedule(name):
    if name not in schedules.SCHEDULES:
        raise ValueError(f"should be one of {', '.join(schedules.SCHEDULES)}")


def _pattern(text):
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"should be regular expressions ({error})") from None


_SCHEMA = pydantic.WithJsonSchema({"enum": [*schedules.SCHEDULES]})
Schedule = Annotated[str, AfterValidator(_schedule), _SCHEMA]
Pattern = Annotated[str, AfterValidator(_pattern)]


def layout_dict(layout_map: object) -> object:
    """Convert a `keras.distribution.LayoutMap` or a mapping from a file to a dict of tuples.

    Other values are returned unchanged. `checked_value` rejects them.
    """
    if not isinstance(layout_map, Mapping):
        return layout_map
    layouts = {}
    for pattern, layout in layout_map.items():
        axes = getattr(layout, "axes", layout)  # A `keras.distribution.TensorLayout` has axes.
        if isinstance(axes, (list, tuple)):
            # KerasHub's layout maps name the data axis "batch".
            axes = tuple("data" if axis == "batch" else axis for axis in axes)
        layouts[pattern] = axes
    return layouts


@functools.cache
def field_validators(kind: type) -> dict[str, pydantic.TypeAdapter]:
    """Return a validator for each field of a dataclass, built from its annotations.

    Validation is strict: 1.0 is not an int, and 1 is not a bool.
    """
    config = pydantic.ConfigDict(strict=True, allow_inf_nan=False)
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: pydantic.TypeAdapter(hint, config=config) for name, hint in hints.items()}


def checked_value(kind: type, name: str, value):
    """Validate a value for a field and return the value to store.

    Lists and ranges become tuples, dicts are copied, and NumPy scalars become Python scalars.

    Raises:
        ValueError: If the value is invalid. The message has the field, the allowed values and the
            value.
    """
    value = value.item() if isinstance(value, np.generic) else value
    stored = tuple(value) if isinstance(value, (list, range)) else value
    stored = dict(stored) if isinstance(stored, dict) else stored
    try:
        field_validators(kind)[name].validate_python(stored)
    except pydantic.ValidationError as error:
        messages = [re.sub("^(Input|Value error,) ", "", x["msg"]) for x in error.errors()]
        raise ValueError(f"{name} {' or '.join(messages)}, got {value!r}") from None
    return stored


class Checked:
    """Base class for dataclasses that validate every assignment to a field."""

    def __setattr__(self, name, value):
        checks = field_validators(type(self))
        if name not in checks:
            hint = suggest(name, checks)
            raise AttributeError(f"{type(self).__name__} has no field {name!r}; {hint}")
        object.__setattr__(self, name, checked_value(type(self), name, value))


def check_supported(config, local_devices: int = 1) -> None:
    """Check that the fields of a config work together.

    Args:
        config: `TransformerOpParallelConfig`.
        local_devices: Integer. Number of devices per rank. Defaults to `1`.

    Raises:
        ValueError: If fields conflict. The message has the reason.
    """
    if config.optimizer_shard_partition == "whole" and int(config.optimizer_shard) not in (1, 2):
        why = (
            "level 3 shards the weights themselves"
            if config.optimizer_shard
            else "nothing is sharded"
        )
        raise ValueError(
            f"`optimizer_shard_partition='whole'` does not work with "
            f"`optimizer_shard={config.optimizer_shard}`, because {why}. Set `optimizer_shard=1` or "
            "`2`, or `optimizer_shard_partition='flat'`."
        )
    if config.gradient_accumulation_shard and config.optimizer_shard < 2:
        raise ValueError(
            "`gradient_accumulation_shard=True` does not work with `optimizer_shard="
            f"{config.optimizer_shard}`, which does not shard gradients. Set `optimizer_shard=2` or "
            "`3`."
        )
    if config.sequence_parallel and config.context_parallel > 1 and config.model_parallel > 1:
        raise ValueError(
            "`sequence_parallel=True` does not work with "
            f"`context_parallel={config.context_parallel}`, because both shard the sequence. Set "
            "`sequence_parallel=False`, and increase `context_parallel` to save more memory."
        )
    if config.ulysses_shards is not None:
        _check_ulysses_shards(config)
    if config.pipeline_stage > 1 or config.pipeline_chunks > 1:
        degree = "pipeline_stage" if config.pipeline_stage > 1 else "pipeline_chunks"
        if any("data" in axes for axes in (config.layout_map or {}).values()):
            raise ValueError(
                f"`layout_map` shards weights over the axis 'data', which does not work with "
                f"`{degree}={getattr(config, degree)}`: a stage would store the gathered weights of "
                "every micro-batch. Use 'model' or None in `layout_map`."
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
                f"`pipeline_schedule={config.pipeline_schedule!r}` needs stages of one device, "
                "because a mesh cannot compute weight gradients separately, but got "
                f"model_parallel={config.model_parallel}, expert_parallel={config.expert_parallel}, "
                f"context_parallel={config.context_parallel} and local_devices={local_devices}. Set "
                "`pipeline_schedule` to '1f1b' or 'interleaved'."
            )


def _check_ulysses_shards(config):
    if config.context_parallel_mode != "ulysses_ring":
        raise ValueError(
            f"`ulysses_shards={config.ulysses_shards}` does not work with "
            f"`context_parallel_mode={config.context_parallel_mode!r}`. Set `context_parallel_mode` "
            "to 'ulysses_ring', or `ulysses_shards` to None."
        )
    if config.context_parallel % config.ulysses_shards:
        raise ValueError(
            f"`ulysses_shards={config.ulysses_shards}` must divide "
            f"`context_parallel={config.context_parallel}`. Change one of them, or set "
            "`ulysses_shards` to None."
        )


def check_joined(config, topology, placement) -> None:
    """Check that the config matches the layout that `init` created.

    Args:
        config: `TransformerOpParallelConfig`.
        topology: `Topology` of the job.
        placement: `Placement` of the job.

    Raises:
        RuntimeError: If a degree of parallelism or the placement differs from the job.
    """
    for name, requested, joined in (
        ("model_parallel=", config.model_parallel, topology.model),
        ("context_parallel=", config.context_parallel, topology.context),
        ("expert_parallel=", config.expert_parallel, topology.expert),
        ("pipeline_stage=", config.pipeline_stage, topology.stage),
        ("model chunks on stages ", config.placement.stage_of_chunk, placement.stage_of_chunk),
    ):
        if requested != joined:
            raise RuntimeError(
                f"The config has {name}{requested}, but the job was started with {joined}. Call "
                "`dtransformer.init(config)` before you create the network."
            )
