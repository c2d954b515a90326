"""`dtransformer train --dry-run`: plan a run and check everything that training would reject."""

import contextvars
import math
import os
import pathlib
import tempfile
from collections.abc import Iterable

import tensorflow as tf

from dtransformer.errors import InputError, raise_as_input_error
from dtransformer.parallel.config.config import TransformerOpParallelConfig, parallel_config
from dtransformer.parallel.variable_factory import shapes_alone
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.grid import mismatch, supported_error
from dtransformer.planner.job import Job
from dtransformer.planner.machine import num_ranks, this_cluster, this_device
from dtransformer.planner.report import fit_line, get_changed_fields
from dtransformer.planner.search import cost
from dtransformer.runs import needs
from dtransformer.runs.automatic import get_run_shape, plan_run, typical_batch
from dtransformer.runs.callbacks import check_logs
from dtransformer.runs.config import RunConfig, load_config
from dtransformer.runs.distillation import load_teacher
from dtransformer.runs.exporting import check_export
from dtransformer.runs.optimizers import group_weights, make_optimizer
from dtransformer.runs.run import layout_plan
from dtransformer.runs.tasks import make_task
from dtransformer.runs.unread import check_read
from dtransformer.trainers.optimizer.checks import check_elementwise

_NUM_RECORDS = 3
_GREEN = "\033[32m"
_PLAIN = "\033[0m"


def dry_run(
    config_path: str | os.PathLike,
    settings: Iterable[str] = (),
    in_color: bool = False,
    overwrite: bool = False,
) -> None:
    """Print the plan and some records of a run, and check its network, weights and exports.

    The network gets shapes and no values, so neither memory nor devices are needed for it.
    Nothing is trained or written. If several ranks are started, rank 0 does all of this for
    them, and the others return immediately.

    Args:
        config_path: A YAML file.
        settings: Texts "section.key=value" that replace values of the file.
        in_color: Whether to print text with labels in green. Otherwise it stands between ⟦ and ⟧.
        overwrite: Whether training may replace existing exports.

    Raises:
        InputError: If training would reject the config, the data, the weights, the layout
            or the exports.
    """
    if os.environ.get("HOROVOD_RANK", "0") != "0":
        return
    config = load_config(config_path, settings, needs_task=True)
    check_read(config)
    parallel, cluster = _resolve_layout(config)
    print(f"Task: {config.task}\n{_describe_plan(config, parallel, cluster)}")
    data = config.data
    if not (getattr(data, "train", None) or getattr(data, "source", None)):
        print("data is not given, so neither records nor weights are checked")
        return
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(config, folder=pathlib.Path(folder) / "run")
        task.read()
        print("\n".join(task.summary_lines()))
        for record in task.preview(_NUM_RECORDS):
            print("".join(_mark_labels(text, has_label, in_color) for text, has_label in record))
        ranks = num_ranks()
        if cluster.num_devices > ranks * cluster.local_devices:
            ranks = math.inf  # They are not started, so the memory of their machines is unknown.
        contextvars.copy_context().run(_check_training, task, parallel, overwrite, ranks)


def _resolve_layout(config: RunConfig) -> tuple[TransformerOpParallelConfig, Cluster]:
    """Return the layout of a run and its devices.

    With several started ranks, the devices are theirs. A single process plans for the devices that
    the config's degrees need.

    Raises:
        InputError: If the layout does not fit the ranks, or the planner finds none.
    """
    parallel = config.parallel
    local_devices = config.training.local_devices
    ranks = num_ranks()
    if ranks > 1:
        cluster = this_cluster(local_devices=local_devices)
        plan = layout_plan(config)
    else:
        degrees = (parallel.model_parallel, parallel.pipeline_stage, parallel.context_parallel)
        devices = max(math.prod(degrees) * (parallel.data_parallel or 1), local_devices)
        ranks = max(devices // local_devices, 1)
        cluster = Cluster(this_device(devices), devices, local_devices=local_devices)
        plan = plan_run(config, cluster) if config.training.layout == "auto" else None
    if plan is not None:
        return plan.best.config, cluster
    with raise_as_input_error("parallel", ValueError):
        return parallel.resolve(ranks, local_devices), cluster


def _describe_plan(config, parallel, cluster):
    """Return lines on the size, the layout, the step time and the memory of a run.

    Raises:
        InputError: If the layout does not fit the network or the batch.
    """
    devices = cluster.num_devices
    training = config.training
    length, rows = typical_batch(config, devices)
    model = get_run_shape(config, length)
    fields = get_changed_fields(parallel)
    if not hasattr(config.data, "length"):
        fields.pop("context_parallel", None)  # The lengths of sentence pairs vary.
    job = Job(rows, training.precision, training.optimizer, fields, bool(training.ema))
    problem = supported_error(parallel, cluster.local_devices) or mismatch(model, cluster, job)
    if problem:
        raise InputError(f"parallel: {problem}")
    estimate = cost(model, cluster, job, parallel)
    source = getattr(config.model, "from_", None)
    weights = f"weights of {source}" if source else "random weights"
    ranks = devices // cluster.local_devices
    lines = [
        f"Model: {model.name}, {model.parameters():,} parameters, {weights}; rows of {length:,} "
        f"tokens, {rows:,} per step",
        f"Layout: {estimate.layout}, {devices} × {cluster.device.name}; about "
        f"{estimate.step_seconds:.3g} s/step. {fit_line(estimate)}",
    ]
    if ranks > num_ranks():
        lines.append(
            f"Start {ranks} ranks: dtransformer launch -np {ranks} -- dtransformer train …"
        )
    return "\n".join(lines)


def _mark_labels(text, has_label, in_color):
    if not has_label:
        return text
    return f"{_GREEN}{text}{_PLAIN}" if in_color else f"⟦{text}⟧"


def _check_training(task, parallel, overwrite, ranks):
    """Check the network, its weights, the optimizer and the exports of a task from shapes alone."""
    needs.planned_ranks.set(ranks)
    check_logs(task.config)
    with tf.device("CPU"):
        with shapes_alone():
            task.make_network()
            load_teacher(task)
            check_export(task, overwrite)
        group_weights(task.network, task.config)
        num_batches = len(task.batches("train"))
        task.batches("dev")
        optimizer = make_optimizer(task.config, num_batches)
    degrees = (parallel.model_parallel, parallel.context_parallel, parallel.expert_parallel)
    if math.prod(degrees) > 1 or (parallel.optimizer_shard and parallel.data_parallel > 1):
        with parallel_config(parallel), raise_as_input_error("training.optimizer"):
            check_elementwise(optimizer)
    trained = sum(math.prod(weight.shape) for weight in task.core.trainable_variables)
    total = sum(math.prod(weight.shape) for weight in task.core.variables)
    print(
        f"Checked: {trained:,} of {total:,} parameters are trained, {num_batches:,} batches per epoch; "
        "network, weights, optimizer and exports are in order"
    )
