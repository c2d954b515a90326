"""All layouts of a number of devices that there are: every divisor of everything."""

import itertools
import math
import re

import numpy as np

from dtransformer.errors import InputError, nearest, shown
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.config.topology import divisors
from dtransformer.parallel.config.validators import check_supported
from dtransformer.parallel.schedules.schedules import SCHEDULES
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.job import Job
from dtransformer.planner.layouts import COLUMNS, RECOMPUTES, SCHEDULE_NAMES, Layouts, number_of
from dtransformer.planner.shape import ModelShape

_MAX_CHUNKS = 8


def grid_of(model: ModelShape, cluster: Cluster, job: Job) -> Layouts:
    """Return every layout of a cluster's devices that a job's fixed fields leave.

    The model axis stays inside of a node, unless it is fixed.

    Raises:
        InputError: a fixed field is none of the config's, or no layout has it.
    """
    fixed, others = _fixed_columns(job)
    parts = _parts(model, cluster, job.global_batch, fixed)
    if not parts:
        raise InputError(_why_none(model, cluster, job, fixed))
    layouts = Layouts.joined(parts)
    supported = _is_supported(layouts, others)
    if not supported.any():
        raise InputError(f"no layout is trained so: {supported_error(layouts.config(0, others))}")
    return layouts[supported]


def _parts(model, cluster, batch, fixed):
    """Return the layouts that the columns that are fixed leave, in parts of the same degrees."""
    allowed = lambda column, values: [v for v in values if fixed.get(column, v) == v]
    devices, parts = cluster.num_devices, []
    for t in divisors(devices):
        may_cross = "model" in fixed
        if t not in allowed("model", [t]) or _does_not_divide(model, t):
            continue
        if t > cluster.devices_per_node and not may_cross:
            continue
        for p, c in itertools.product(divisors(devices // t), repeat=2):
            if devices % (t * p * c) or p > model.num_blocks or _no_context(model, c):
                continue
            data = devices // (t * p * c)
            if batch % data or not allowed("stage", [p]) or not allowed("context", [c]):
                continue
            if not allowed("data", [data]):
                continue
            experts = divisors(np.gcd(data, model.num_experts)) if model.num_experts > 1 else [1]
            for e in allowed("expert", experts):
                parts.append(
                    _options(model, allowed, t=t, p=p, c=c, e=e, data=data, batch=batch // data)
                )
    return [part for part in parts if part is not None]


def _does_not_divide(model, t):
    return model.num_heads % t or model.num_kv_heads % t or model.ffn_hidden_size % t


def _no_context(model, c):
    return c > 1 and any(kind.length % c for kind in model.kinds)


def _options(model, allowed, *, t, p, c, e, data, batch):
    """Return the layouts of some degrees: micro-batches, schedules, recompute, levels."""
    rows = []
    numbers = [m for m in divisors(batch) if m >= p]
    for name in allowed("schedule", range(len(SCHEDULE_NAMES))):
        schedule = SCHEDULES[SCHEDULE_NAMES[name]]
        if p == 1 and name and len(allowed("schedule", range(2))) > 1:
            continue  # it has no meaning there
        most = min(schedule.max_chunks or _MAX_CHUNKS, _MAX_CHUNKS, model.num_blocks // p)
        for v in allowed("chunks", range(schedule.min_chunks if p > 1 else 1, most + 1)):
            if p == 1 and v > 1:
                continue
            if v > 1 and model.num_blocks % (p * v):
                continue  # chunks would be uneven
            some = [m for m in numbers if not schedule.full_turns or p == 1 or m % p == 0]
            rows += itertools.product(allowed("micro_batches", some), [v], [name])
    levels = allowed("level", range(4) if data * c > 1 else [0])
    recomputes = allowed("recompute", range(len(RECOMPUTES)))
    sequences = allowed("sequence", [0, 1] if t > 1 else [0])
    others = list(itertools.product(recomputes, levels, sequences))
    if not rows or not others:
        return None
    m, v, schedule = np.repeat(np.array(rows), len(others), axis=0).T
    recompute, level, sequence = np.tile(np.array(others), (len(rows), 1)).T
    return Layouts.of(
        model=t, stage=p, context=c, expert=e, data=data, micro_batch=batch // m, micro_batches=m,
        chunks=v, schedule=schedule, recompute=recompute, level=level, sequence=sequence,
        rows=allowed("rows", [1]) or 0,
    )  # fmt: skip


def _fixed_columns(job):
    """Return what a job fixes of the columns, as numbers, and of the config's other fields."""
    names = TransformerOpParallelConfig.__dataclass_fields__
    for name in job.fixed:
        if name not in names:
            raise InputError(f"there is no field {shown(name)} to fix; {nearest(name, names)}")
    try:
        config = job.fixed_config()
    except (TypeError, ValueError) as error:
        raise InputError(f"fixed: {error}") from None
    columns, others = {}, {}
    for name in job.fixed:
        value = getattr(config, name)
        if name not in COLUMNS:
            others[name] = value
        elif value is not None:
            columns[COLUMNS[name]] = number_of(name, value)
    return columns, others


def _is_supported(layouts, others):
    """Return a mask of the layouts that the trainer takes, by its own check.

    What it refuses depends on which techniques meet, not on how large their degrees are: one
    layout of each meeting is asked for.
    """
    columns = {
        "model": np.minimum(layouts.model, 2),
        "stage": np.minimum(layouts.stage, 2),
        "context": np.minimum(layouts.context, 2),
        "expert": np.minimum(layouts.expert, 2),
        "chunks": np.minimum(layouts.chunks, 3),
    }
    for name in ("schedule", "recompute", "level", "sequence"):
        columns[name] = getattr(layouts, name)
    key = np.ravel_multi_index(tuple(columns.values()), (3, 3, 3, 3, 4, 8, 4, 4, 2))
    _, firsts, places = np.unique(key, return_index=True, return_inverse=True)
    answers = [supported_error(layouts.config(first, others)) is None for first in firsts]
    return np.array(answers)[places]


def supported_error(config: TransformerOpParallelConfig) -> str | None:
    """Return why the trainer would refuse a config; None where it takes it."""
    try:
        check_supported(config)
    except ValueError as error:
        return re.sub(r"\s+", " ", str(error))
    return None


def _why_none(model, cluster, job, fixed):
    """Return one line: which demand leaves no layout."""
    names = {column: name for name, column in COLUMNS.items()}
    word = lambda column: f"{names[column]}={job.fixed[names[column]]}"
    devices, batch = cluster.num_devices, job.global_batch
    degrees = [column for column in ("data", "model", "stage", "context") if column in fixed]
    if devices % math.prod(fixed[column] for column in degrees):
        words = " · ".join(map(word, degrees))
        return f"{words} does not divide {devices} devices: change --fix, or --devices"
    if _does_not_divide(model, fixed.get("model", 1)):
        return (
            f"{word('model')} does not divide num_heads={model.num_heads}, "
            f"num_kv_heads={model.num_kv_heads} and ffn_hidden_size={model.ffn_hidden_size} of "
            f"{model.name}: fix a common divisor"
        )
    if fixed.get("stage", 1) > model.num_blocks:
        return (
            f"{word('stage')} is more than the {model.num_blocks} blocks of {model.name}: fix "
            "fewer stages"
        )
    if model.num_experts % fixed.get("expert", 1):
        return f"{word('expert')} does not divide num_experts={model.num_experts} of {model.name}"
    if _no_context(model, fixed.get("context", 1)):
        return (
            f"{word('context')} does not divide sequences of {model.sequence_length}: fix a divisor"
        )
    shares = [column for column in ("data", "micro_batches") if column in fixed]
    share = math.prod(fixed[column] for column in shares)
    if batch % share:
        words = " · ".join(map(word, shares))
        return f"global_batch={batch} is not divisible by {words}: give a multiple of {share}"
    without = [
        names[column]
        for column in fixed
        if _parts(model, cluster, batch, {k: v for k, v in fixed.items() if k != column})
    ]
    if without:
        return (
            f"no layout of {devices} devices with global_batch={batch} has all of "
            f"{', '.join(map(word, fixed))}: there are some without {', or without '.join(without)}"
        )
    return (
        f"no layout of {devices} devices divides global_batch={batch}: give a batch that has more "
        f"divisors, such as {-(-batch // devices) * devices}"
    )
