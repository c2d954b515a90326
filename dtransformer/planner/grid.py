"""Grid of all layouts for a number of devices: every combination of divisors."""

import contextlib
import itertools
import math
import re

import numpy as np

from dtransformer.errors import InputError, raise_as_input_error, short_repr, suggest
from dtransformer.parallel.config.config import NOT_ELEMENTWISE, TransformerOpParallelConfig
from dtransformer.parallel.config.topology import Topology, divisors
from dtransformer.parallel.config.validators import check_supported
from dtransformer.parallel.context_parallel.plan import make_plan
from dtransformer.parallel.schedules.schedules import SCHEDULES
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.job import Job
from dtransformer.planner.layouts import COLUMNS, RECOMPUTES, SCHEDULE_NAMES, Layouts, column_value
from dtransformer.planner.shape import ModelShape

_MAX_CHUNKS = 8
_FIELD_NAMES = {column: name for name, column in COLUMNS.items()}


def enumerate_layouts(model: ModelShape, cluster: Cluster, job: Job) -> Layouts:
    """Return all layouts of a cluster that the trainer supports and the job's fixed fields allow.

    The model axis stays inside a node unless `model_parallel` is fixed.

    Raises:
        InputError: If a fixed field is not a field of the config, or if no layout has all
            fixed fields.
    """
    fixed, other_fields = _fixed_columns(job)
    groups = _layout_groups(model, cluster, job, fixed)
    if not groups:
        reason = mismatch(model, cluster, job) or _explain_conflict(model, cluster, job, fixed)
        raise InputError(reason)
    layouts = Layouts.concatenate(groups)
    supported = _is_supported(layouts, other_fields, cluster.local_devices)
    if not supported.any():
        reason = supported_error(layouts.config(0, other_fields))
        raise InputError(f"No layout with these fixed fields is supported: {reason}")
    return layouts[supported]


def _layout_groups(model, cluster, job, fixed):
    """Return the layouts that the fixed columns allow, as one `Layouts` per set of degrees."""

    def allowed(column, values):
        return [v for v in values if fixed.get(column, v) == v]

    devices = cluster.num_devices
    batch = job.global_batch
    config = job.fixed_config()
    shapes = [model] if model.teacher is None else [model, model.teacher]
    max_stages = min(shape.num_blocks for shape in shapes)
    groups = []
    for t in divisors(devices):
        crosses = t > cluster.devices_per_node and "model" not in fixed
        is_indivisible = any(_is_indivisible(shape, t) for shape in shapes)
        if crosses or not allowed("model", [t]) or is_indivisible:
            continue
        for p, c in itertools.product(divisors(devices // t), repeat=2):
            if (
                devices % (t * p * c)
                or p > max_stages
                or any(_context_obstacle(shape, config, t, c) for shape in shapes)
            ):
                continue
            data = devices // (t * p * c)
            axes = {"stage": p, "context": c, "data": data}
            if batch % data or not all(allowed(axis, [size]) for axis, size in axes.items()):
                continue
            experts = (
                divisors(np.gcd(data, model.experts.expert_num))
                if model.experts.expert_num > 1
                else [1]
            )
            for e in allowed("expert", experts):
                axes = {"stage": p, "data": data, "context": c, "model": t, "expert": e}
                levels = _supported_levels(
                    allowed("level", range(4)), cluster.local_devices, job, axes
                )
                sizes = {"t": t, "p": p, "c": c, "e": e, "data": data, "batch": batch // data}
                sizes["local"] = cluster.local_devices
                groups.append(_expand_degrees(model, allowed, levels, **sizes))
    return [group for group in groups if group is not None]


def _supported_levels(levels, local_devices, job, axes):
    """Return the `optimizer_shard` levels that `Topology` and the optimizer support."""
    supported = []
    needs_full_weights = job.optimizer in NOT_ELEMENTWISE
    is_divided = axes["context"] * axes["model"] * axes["expert"] > 1
    on_mesh = is_divided or local_devices > 1
    for level in levels:
        spans = level == 3 and is_divided
        with contextlib.suppress(ValueError):
            topology = Topology(**axes, local_devices=local_devices, mesh_spans_data=spans)
            factor = axes["context"] if spans else 1 / topology.mesh_data
            is_used = level == 0 or axes["data"] * factor > 1 or (needs_full_weights and on_mesh)
            # Optimizers that are not elementwise compute with full weights.
            is_unsupported = needs_full_weights and (level == 3 or (level == 0 and on_mesh))
            if is_used and not is_unsupported:
                supported.append(level)
    return supported


def _is_indivisible(model, t):
    inner = model.config.ffn_hidden_size, model.expert_hidden_size or t
    return model.config.num_heads % t or model.num_kv_heads % t or any(size % t for size in inner)


def _context_obstacle(model, config, t, c):
    """Return why c shards of a sequence and t model shards cannot divide attention, or `None`."""
    ulysses_shards = config.ulysses_shards
    if ulysses_shards and c % ulysses_shards:
        return f"`ulysses_shards={ulysses_shards}` does not divide `context_parallel={c}`."
    mode = config.context_parallel_mode
    heads = model.config.num_heads // t, model.num_kv_heads // t
    try:
        for kind in model.kinds:
            queries, keys = ((1, n, kind.length, model.head_dim) for n in heads)
            make_plan(mode, c, queries, keys, False, False, ulysses_shards=ulysses_shards)
    except ValueError as error:
        return str(error)
    return None


def _expand_degrees(model, allowed, levels, *, t, p, c, e, data, batch, local):
    """Return the layouts for fixed degrees, or `None` if there are no valid options.

    Options are micro-batches, chunks, schedules, recomputation, levels, reductions per micro-batch
    and sequence sharding.
    """
    rows = []
    micro_batch_counts = [m for m in divisors(batch) if m >= p]
    for schedule_index in allowed("schedule", range(len(SCHEDULE_NAMES))):
        schedule = SCHEDULES[SCHEDULE_NAMES[schedule_index]]
        if p == 1 and schedule_index and len(allowed("schedule", range(2))) > 1:
            continue  # Without a pipeline, one schedule represents all.
        max_chunks = min(schedule.max_chunks or _MAX_CHUNKS, _MAX_CHUNKS, model.num_blocks // p)
        for v in allowed("chunks", range(schedule.min_chunks if p > 1 else 1, max_chunks + 1)):
            if v > 1 and (p == 1 or model.num_blocks % (p * v)):
                continue  # Chunks need a pipeline and an equal number of blocks.
            counts = [
                m for m in micro_batch_counts if not schedule.full_turns or p == 1 or m % p == 0
            ]
            rows += itertools.product(allowed("micro_batches", counts), [v], [schedule_index])
    recomputes = allowed("recompute", range(len(RECOMPUTES)))
    sequences = allowed("sequence", [0, 1] if t > 1 else [0])
    variants = list(itertools.product(recomputes, levels, allowed("reduces", [0, 1]), sequences))
    if not rows or not variants:
        return None
    m, v, schedule = np.repeat(np.array(rows), len(variants), axis=0).T
    recompute, level, reduces, sequence = np.tile(np.array(variants), (len(rows), 1)).T
    layouts = Layouts.from_columns(
        model=t, stage=p, context=c, expert=e, data=data, micro_batch=batch // m, micro_batches=m,
        chunks=v, schedule=schedule, recompute=recompute, level=level, reduces=reduces,
        sequence=sequence, rows=allowed("rows", [1]) or 0, local=local,
    )  # fmt: skip
    if len(allowed("reduces", [0, 1])) == 1:
        return layouts
    # Level 3 always accumulates shards. Without reductions per micro-batch, level 2 equals level 1.
    may_reduce = (layouts.level == 2) & (layouts.micro_batches > 1)
    is_full = layouts.reduces == 0
    is_level_1 = may_reduce & is_full & (1 in levels)
    return layouts[(is_full | may_reduce) & ~is_level_1]


def _fixed_columns(job):
    """Split a job's fixed fields into layout columns and other config fields.

    Returns:
        A tuple of two dicts: column name to integer, and config field name to value.
    """
    names = TransformerOpParallelConfig.__dataclass_fields__
    for name in job.fixed:
        if name not in names:
            raise InputError(f"Unknown field {short_repr(name)} in `fixed`: {suggest(name, names)}")
    with raise_as_input_error("fixed"):
        config = job.fixed_config()
    columns = {}
    other_fields = {}
    for name in job.fixed:
        value = getattr(config, name)
        if name not in COLUMNS:
            other_fields[name] = value
        elif value is not None:
            columns[COLUMNS[name]] = column_value(name, value)
    return columns, other_fields


def _is_supported(layouts, other_fields, local_devices):
    """Return a mask of the layouts that pass the trainer's own check.

    The check depends only on the combination of techniques, not on their degrees. So one layout
    of each combination is checked.
    """
    max_degrees = {"model": 2, "stage": 2, "context": 2, "expert": 2, "chunks": 3}
    max_degrees |= dict.fromkeys(("schedule", "recompute", "level", "reduces", "sequence"), 7)
    columns = [np.minimum(getattr(layouts, name), size) for name, size in max_degrees.items()]
    key = np.ravel_multi_index(columns, [size + 1 for size in max_degrees.values()])
    _, first_indices, inverse = np.unique(key, return_index=True, return_inverse=True)
    configs = [layouts.config(first, other_fields) for first in first_indices]
    is_valid = [supported_error(config, local_devices) is None for config in configs]
    return np.array(is_valid)[inverse]


def supported_error(config: TransformerOpParallelConfig, local_devices: int = 1) -> str | None:
    """Return the reason why the trainer rejects a config, or `None` if the config is supported."""
    try:
        check_supported(config, local_devices)
    except ValueError as error:
        return re.sub(r"\s+", " ", str(error))
    return None


def mismatch(model: ModelShape, cluster: Cluster, job: Job) -> str | None:
    """Return why a job's fixed degrees do not fit the model, the devices or the batch.

    Returns:
        One line, or `None` if they fit.
    """
    devices = cluster.num_devices
    batch = job.global_batch
    fixed, _ = _fixed_columns(job)

    def product(*columns):
        return math.prod(fixed.get(column, 1) for column in columns)

    def fields(*columns):
        return " · ".join(_field_texts(job, fixed, columns))

    degrees = "data", "model", "stage", "context"
    batch_axes = "data", "micro_batches"
    if devices % product(*degrees):
        text = f"{fields(*degrees)} does not divide {devices} devices"
    elif _is_indivisible(model, product("model")):
        text = (
            f"{fields('model')} does not divide num_heads={model.config.num_heads}, "
            f"num_kv_heads={model.num_kv_heads} and ffn_hidden_size={model.config.ffn_hidden_size}"
        )
    elif product("stage") > model.num_blocks:
        text = f"{fields('stage')} is more than the {model.num_blocks} blocks"
    elif model.experts.expert_num % product("expert"):
        text = f"{fields('expert')} does not divide num_experts={model.experts.expert_num}"
    elif "context" in fixed and (
        obstacle := _context_obstacle(
            model, job.fixed_config(), product("model"), product("context")
        )
    ):
        return f"{model.name}: {obstacle}"
    elif batch % product(*batch_axes):
        return (
            f"global_batch={batch} is not divisible by {fields(*batch_axes)}. "
            f"Use a multiple of {product(*batch_axes)}."
        )
    else:
        return None if model.teacher is None else mismatch(model.teacher, cluster, job)
    return f"{model.name}: {text}. Change one of them."


def _field_texts(job, fixed, columns):
    """Return texts such as "field=value" for the fixed columns among `columns`."""
    return [f"{_FIELD_NAMES[x]}={job.fixed[_FIELD_NAMES[x]]}" for x in columns if x in fixed]


def _explain_conflict(model, cluster, job, fixed):
    """Return the reason why no layout has all fixed fields although each of them fits."""
    devices = cluster.num_devices
    batch = job.global_batch
    removable = []
    for column in fixed:
        remaining = {name: value for name, value in fixed.items() if name != column}
        if _layout_groups(model, cluster, job, remaining):
            removable.append(_FIELD_NAMES[column])
    if removable:
        requested = ", ".join(_field_texts(job, fixed, fixed))
        return (
            f"No layout of {devices} devices with global_batch={batch} has {requested}. "
            f"Remove {' or '.join(removable)}."
        )
    return (
        f"No layout of {devices} devices divides global_batch={batch}. Use a batch with more "
        f"divisors, such as {-(-batch // devices) * devices}."
    )
