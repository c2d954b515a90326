"""The automatic mode: at its start every rank of a job gets the planner's layout, and says why."""

from collections.abc import Mapping

from dtransformer.errors import InputError
from dtransformer.planner import report
from dtransformer.planner.clusters import Cluster, Device, device_named
from dtransformer.planner.job import Job
from dtransformer.planner.machine import this_cluster
from dtransformer.planner.models import from_network, named
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
    """Return the plan of this job: that of as many devices as its ranks drive.

    Every rank makes the same, from the environment that horovodrun sets.

    Args:
        model: a `ModelShape`, the name of a published one, or a network that was made.
        global_batch: sequences of a step, of all replicas.
        device: a `Device` or its name; that of this host by default.
        cluster: a `Cluster` instead, where the job is not this one.
        local_devices: number of devices of each rank.
        precision: of the job, as `Job` has it.
        optimizer: name of a Keras optimizer.
        fixed: dict of fields of the config that are given.
        averages: as `Job` has it.

    Raises:
        InputError: nothing fits, or no layout has what is fixed; one line.
    """
    if isinstance(model, str):
        model = named(model)
    elif not isinstance(model, ModelShape):
        model = from_network(model)
    if cluster is None:
        device = device_named(device) if isinstance(device, str) else device
        cluster = this_cluster(device, local_devices)
    found = plan(model, cluster, Job(global_batch, precision, optimizer, fixed or {}, averages))
    if not found.fits:
        raise InputError(f"{report.fit_line(found.best)} {found.why}")
    return found


def summary(found: Plan) -> str:
    """Return what is chosen and why, in one line.

    Example:

    >>> cluster = Cluster(device_named("a100"), 4)
    >>> print(summary(automatic_plan("gpt2_small", 32, cluster=cluster)))
    Layout: data 4 · ..., by the planner: ... the fastest of ... that fit...; ...
    """
    best = found.best
    return (
        f"Layout: {best.layout}, by the planner: {found.why}; {best.step_seconds:,.3g} s/step and "
        f"{best.memory_bytes / 1e9:,.3g} GB/device on {found.cluster}"
    )
