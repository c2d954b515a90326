"""Engines of a forward–backward: on one device, on the mesh, or in a pipeline."""

from dtransformer.parallel.runtime import job
from dtransformer.trainers.engines.base import LocalEngine
from dtransformer.trainers.engines.mesh import MeshEngine
from dtransformer.trainers.engines.pipeline import PipelineEngine


def make_engine(step, jit_compile=False):
    """Return the engine of this rank's layout.

    Args:
        step: the `ForwardStep`.
        jit_compile: whether forward and backward are compiled with XLA, on one device.
    """
    if job.placement().num_chunks > 1:
        return PipelineEngine(step)
    if job.mesh() is not None:
        return MeshEngine(step)
    return LocalEngine(step, jit_compile)
