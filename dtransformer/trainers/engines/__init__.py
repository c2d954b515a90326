"""Engines that run forward and backward passes: on one device, on a mesh or in a pipeline."""

from dtransformer.parallel.runtime import job
from dtransformer.trainers.engines.base import LocalEngine
from dtransformer.trainers.engines.mesh import MeshEngine
from dtransformer.trainers.engines.pipeline import PipelineEngine


def make_engine(step, jit_compile=False):
    """Return the engine for the current layout.

    Args:
        step: The `ForwardStep`.
        jit_compile: Whether XLA compiles the forward and backward passes. Only used on one device.
    """
    if job.placement().num_chunks > 1:
        return PipelineEngine(step)
    if job.mesh() is not None:
        return MeshEngine(step)
    return LocalEngine(step, jit_compile)
