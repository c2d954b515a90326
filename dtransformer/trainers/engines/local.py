"""Engine for a single device per rank."""

from functools import partial

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use
from dtransformer.trainers.compile_checks import find_trained_batch_norms
from dtransformer.trainers.data import input_symbols
from dtransformer.trainers.engines.base import Engine
from dtransformer.trainers.engines.output_gradients import training_outputs


class LocalEngine(Engine):
    """Engine for a single device per rank. Its passes are methods of `ForwardStep`.

    Args:
        step: The `ForwardStep`.
        jit_compile: Whether XLA compiles the forward and backward passes.

    Raises:
        ValueError: If `jit_compile` is set and the network would communicate during its forward
            pass. Raised by `build`.
    """

    def __init__(self, step, jit_compile=False):
        self._step = step
        self._jit_compile = jit_compile
        self.forward_backward = step.loss_and_gradients
        self.training_outputs = partial(training_outputs, step)
        if jit_compile:
            compiled = tf.function(jit_compile=True, reduce_retracing=True)
            self.forward_backward = compiled(self.forward_backward)
            self.training_outputs = compiled(self.training_outputs)

    def build(self, first):
        network = self._step.network
        if not network.built:
            network(input_symbols(first))
        if not self._jit_compile:
            return
        cause = None
        if any(is_unsharded_for_use(weight) for weight in network.weights):
            cause = "optimizer_shard=3"
        elif any(
            getattr(layer, "exchanges_counts", False) for layer in _compat.flat_layers(network)
        ):
            cause = "expert_group_size=None on data ranks"
        elif job.data_shard()[1] > 1 and find_trained_batch_norms(network):
            cause = "a synchronized BatchNormalization on data ranks"
        if cause is not None:
            raise ValueError(
                f"`jit_compile=True` does not work with {cause}, which communicates during the "
                "forward pass. Use `jit_compile='auto'`."
            )

    def evaluate(self, inputs, labels, sample_weight, counts):
        return self._step.outputs_and_sums(inputs, labels, sample_weight, counts)

    def predict(self, inputs):
        return self._step.outputs(inputs)
