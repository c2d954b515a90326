"""Options of `Trainer.compile` and their defaults."""

import dataclasses

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import check_int
from dtransformer.layers.loss import CrossEntropyLoss
from dtransformer.parallel.ops.fused import enable_fusion
from dtransformer.parallel.runtime.devices import takes_gpu_branch
from dtransformer.trainers.objective import Objective
from dtransformer.trainers.optimizer.guard import SpikeGuard
from dtransformer.trainers.padded_vocabulary import exclude_padding_classes
from dtransformer.trainers.step_runner import StepCompiler


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Resolved arguments of `Trainer.compile`.

    Args:
        objective: The `Objective`, or `None` before `compile`.
        optimizer: The Keras optimizer, or `None` before `compile`.
        compiled_metrics: Keras' container of the compiled metrics, or `None` without any.
        compiler: The `StepCompiler`.
        log_every: Interval in steps between reading logs from the device.
        steps_per_execution: Maximum number of steps per call of the training function.
        guard: `SpikeGuard`, or `None`.
        log_gradient_norms: Whether the logs contain the gradient norm of each layer.
        teacher: Frozen network whose logits a `DistillationLoss` reads, or `None`.
    """

    objective: Objective | None = None
    optimizer: keras.optimizers.Optimizer | None = None
    compiled_metrics: object = None
    compiler: StepCompiler = dataclasses.field(default_factory=StepCompiler)
    log_every: int = 1
    steps_per_execution: int = 1
    guard: SpikeGuard | None = None
    log_gradient_norms: bool = False
    teacher: keras.Model | None = None


def resolve_optimizer(network, optimizer, auto_scale_loss):
    """Return the Keras optimizer of a trainer.

    Without an optimizer it uses the optimizer of the network's last `compile`, with new states if
    it has been used, or else AdamW.

    Args:
        network: The `keras.Model`.
        optimizer: As in `Trainer.compile`.
        auto_scale_loss: Whether to scale the loss if the network computes in `mixed_float16`.
    """
    if optimizer is None and network.compiled:
        optimizer = network.optimizer
        if optimizer is not None and optimizer.built:
            optimizer = type(optimizer).from_config(optimizer.get_config())
    optimizer = keras.optimizers.get("adamw" if optimizer is None else optimizer)
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if auto_scale_loss and network.dtype_policy.name == "mixed_float16" and not is_scaled:
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


def resolve_losses(network, loss, loss_weights):
    """Return the `Objective` of a trainer.

    Without a loss it uses the loss and weights of the network's last `compile`, or else
    `CrossEntropyLoss()` if the network has the method `logits_vocab_size`.

    Args:
        network: The `keras.Model`.
        loss, loss_weights: As in `Trainer.compile`.
    """
    if loss is None:
        compiled = _compat.compile_options(network)
        loss = compiled.get("loss")
        loss_weights = loss_weights or compiled.get("loss_weights")
    if loss is None and hasattr(network, "logits_vocab_size"):
        loss = CrossEntropyLoss()
    loss = exclude_padding_classes(loss, network)
    return Objective(loss, loss_weights, getattr(network, "output_names", None))


def resolve_metrics(network, metrics, weighted_metrics):
    """Return `(metrics, weighted_metrics)`. If both are `None`, use the network's compiled metrics."""
    if metrics is None and weighted_metrics is None:
        compiled = _compat.compile_options(network)
        return compiled.get("metrics"), compiled.get("weighted_metrics")
    return metrics, weighted_metrics


def resolve_log_every(log_every):
    """Return the interval in steps between reads of the logs: by default 1 on CPUs, 10 on GPUs."""
    if log_every is None:
        return 10 if takes_gpu_branch() else 1
    return check_int("log_every", log_every)


def set_tensorflow_options(jit_compile: bool | str) -> None:
    """Set the graph optimizations of the whole process.

    Args:
        jit_compile: As in `Trainer.compile`.
    """
    # The arithmetic optimizer reorders sums depending on the rest of the graph, so recompute would
    # change the last bits. The function optimizer only copies functions; inlining works without it.
    tf.config.optimizer.set_experimental_options(
        {"arithmetic_optimization": False, "function_optimization": False}
    )
    enable_fusion(jit_compile == "auto")
    if takes_gpu_branch():  # XLA fuses elementwise operations, which are bound by memory there.
        tf.config.optimizer.set_jit("autoclustering" if jit_compile == "auto" else False)
