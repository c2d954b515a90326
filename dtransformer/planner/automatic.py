"""Automatic mode: every rank of a job computes the planner's layout when it starts."""

import os
from collections.abc import Mapping

from dtransformer.errors import InputError
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner import report
from dtransformer.planner.clusters import Cluster, Device, get_device
from dtransformer.planner.job import Job
from dtransformer.planner.machine import this_cluster
from dtransformer.planner.models import from_network, get_model
from dtransformer.planner.search import Plan, plan
from dtransformer.planner.shape import ModelShape


def automatic_plan(
    model,
    global_batch: int,
    *,
    device: Device | str | None = None,
    cluster: Cluster | None = None,
    local_devices: int = 1,
    precision: str = "float32",
    optimizer: str = "adamw",
    fixed: Mapping | None = None,
    averages: bool = False,
) -> Plan:
    """Return the planner's layout for the running job or for a given cluster.

    Every rank computes the same plan, because all ranks read the same environment variables
    from horovodrun.

    Args:
        model: A `ModelShape`, the name of a published model, or a network object.
        global_batch: Integer. Sequences per step over all replicas.
        device: A `Device` or its name. Defaults to the device of this host.
        cluster: A `Cluster` to plan for. Defaults to the devices of this job's ranks.
        local_devices: Integer. Number of devices per rank.
        precision: Precision of the job, see `Job`.
        optimizer: Name of a Keras optimizer.
        fixed: Dict of config fields that the planner must not change.
        averages: Boolean, whether the optimizer keeps moving averages of the weights.

    Returns:
        A `Plan` with at least one layout that fits.

    Raises:
        InputError: If no layout fits into memory, or if no layout has the fixed fields.
    """
    if isinstance(model, str):
        model = get_model(model)
    elif not isinstance(model, ModelShape):
        model = from_network(model)
    if cluster is None:
        device = get_device(device) if isinstance(device, str) else device
        cluster = this_cluster(device, local_devices)
    result = plan(model, cluster, Job(global_batch, precision, optimizer, fixed or {}, averages))
    if not result.fits:
        raise InputError(f"{report.fit_line(result.best)} {result.why}")
    return result


def auto_config(model: object, global_batch: int, **options: object) -> TransformerOpParallelConfig:
    """Return the planner's layout for this job.

    The result is identical on all ranks. Rank 0 prints it with the reason. A network need not be
    built. To create it later, pass its name or its `ModelShape`.

    Args:
        model: Network, `ModelShape`, or name of a published model.
        global_batch: Integer. Sequences per step, over all replicas.
        **options: Options of `automatic_plan`: `device`, `precision`, `optimizer`,
            `local_devices`, and `fixed`, a dict of fields to keep.

    Raises:
        InputError: If no layout fits into memory or has the fixed fields.

    Example:

    >>> config = auto_config("gpt2_small", 8, device="a100")
    Layout: one device · 2 micro-batches of 4. Chosen by the planner: ...
    >>> config.resolve(1).data_parallel
    1
    """
    result = automatic_plan(model, global_batch, **options)
    if os.environ.get("HOROVOD_RANK", "0") == "0":
        print(summary(result))
    return result.best.config


def summary(result: Plan) -> str:
    """Return one line with the chosen layout, the reason, its step time and its memory.

    Example:

    >>> cluster = Cluster(get_device("a100"), 4)
    >>> print(summary(automatic_plan("gpt2_small", 32, cluster=cluster)))
    Layout: data 4 · ... Chosen by the planner: ... s/step and ... GB/device on ... fit...
    """
    best = result.best
    return (
        f"Layout: {best.layout}. Chosen by the planner: {best.step_seconds:,.3g} s/step and "
        f"{best.memory_bytes / 1e9:,.3g} GB/device on {result.cluster}. {result.why}"
    )
