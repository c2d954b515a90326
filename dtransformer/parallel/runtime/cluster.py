"""The DTensor mesh of this rank: over one process' devices, or over those of several."""

import os
import socket

from tensorflow.experimental import dtensor

from dtransformer import _compat
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.runtime.devices import logical_gpus
from dtransformer.parallel.watchdog.address import own_host

# DTensor reads who takes part in its cluster from these.
_CLUSTER = ("DTENSOR_JOB_NAME", "DTENSOR_JOBS", "DTENSOR_CLIENT_ID", "DTENSOR_NUM_CLIENTS")

# The pass that combines all-reduces leaves their results without a layout, so that a
# function cannot return them.
os.environ.setdefault("DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION", "0")
# Without it DTensor copies through the host on GPUs. NCCL takes no two devices of one card.
os.environ.setdefault("DTENSOR_GPU_USE_NCCL_COMMUNICATION", str(int(logical_gpus() == 1)))


def free_address(local: bool) -> str:
    """Return "host:port" where this rank can listen.

    Args:
        local: whether all ranks are on this host.
    """
    host = "localhost" if local else own_host()
    with socket.socket() as listener:
        listener.bind(("", 0))
        return f"{host}:{listener.getsockname()[1]}"


def start_mesh(
    topology: Topology, rank: int, addresses: list[str | None], device_type: str
) -> dtensor.Mesh | None:
    """Start DTensor for the ranks of this one's mesh; tensors made before are lost.

    Args:
        topology: the job's `Topology`.
        rank: this rank.
        addresses: `free_address` of every rank of the job.
        device_type: `"CPU"` or `"GPU"`.

    Returns:
        A mesh with those of `validators.MESH_AXES` that have more than one device, the first
        one outermost; None where it is one device, for which DTensor is not started.
    """
    sizes = {"data": topology.mesh_data, "context": topology.context, "model": topology.model}
    axes = [(axis, sizes[axis]) for axis in validators.MESH_AXES if sizes[axis] > 1]
    if not axes:
        return None
    ranks = topology.model_parallel_group(rank)
    if len(ranks) > 1:
        values = ("worker", ",".join(addresses[r] for r in ranks), str(ranks.index(rank)))
        os.environ.update(zip(_CLUSTER, (*values, str(len(ranks)))))
    _compat.read_long_errors()
    _compat.forget_context()
    dtensor.initialize_accelerator_system(
        device_type,
        experimental_reset_context=True,
        num_logical_cpu_devices=topology.local_devices,
        enable_coordination_service=False,
    )
    return dtensor.create_distributed_mesh(axes, device_type=device_type)


def stop_mesh():
    """Stop DTensor, once every rank of the mesh is done with it."""
    for name in _CLUSTER:  # it refuses to stop a cluster, and stops one process' part
        os.environ.pop(name, None)
    _compat.forget_context()
    dtensor.shutdown_accelerator_system()
    _compat.forget_dtensor_device()
