"""Engines that run forward and backward passes: on one device, on a mesh or in a pipeline."""

from functools import partial

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.trainers.engines.accumulation import accumulate_gradients
from dtransformer.trainers.engines.local import LocalEngine
from dtransformer.trainers.engines.mesh import MeshEngine
from dtransformer.trainers.engines.output_gradients import compute_outputs_first
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


def make_forward_backward(step, engine, reduction, compiler):
    """Return a function like `Engine.forward_backward` for full batches.

    It divides batches into the micro-batches of the parallel config.

    Args:
        step: The `ForwardStep`.
        engine: Its `Engine`, built.
        reduction: `Reduction` of the gradients of each micro-batch, or `None`.
        compiler: The `StepCompiler`.
    """
    if engine.takes_micro_batches:
        return partial(engine.forward_backward, reduction=reduction)
    num_micro_batches = get_parallel_config().micro_batch_num
    if num_micro_batches == 1:
        return engine.forward_backward
    if step.training_objective is step.objective:
        return accumulate_gradients(engine.forward_backward, num_micro_batches, reduction)
    return compute_outputs_first(step, engine, num_micro_batches, reduction, compiler)
