"""The engine of one device: its functions are traced into the training step's."""

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use
from dtransformer.trainers.data import input_symbols
from dtransformer.trainers.engines.base import Engine


class LocalEngine(Engine):
    """Forward and backward on this rank's one device.

    Args:
        step: the `ForwardStep`.
        jit_compile: whether forward and backward are compiled with XLA.

    Raises:
        ValueError: on `build`: XLA would have to compile collectives, or shapes that change.
    """

    def __init__(self, step, jit_compile=False):
        self._step, self._jit_compile = step, jit_compile
        self._compute = step.loss_and_gradients
        if jit_compile:
            self._compute = tf.function(self._compute, jit_compile=True, reduce_retracing=True)

    def build(self, first):
        network = self._step.network
        if not network.built:
            network(input_symbols(first))
        if not self._jit_compile:
            return
        sends = None
        if any(is_unsharded_for_use(weight) for weight in network.weights):
            sends = "optimizer_shard=3"
        elif any(getattr(layer, "sends", False) for layer in _compat.flat_layers(network)):
            sends = "expert_group_size=None on data ranks"
        if sends is not None:
            raise ValueError(
                f"jit_compile=True does not work with {sends}, which communicates while the network "
                "is computed: leave it at 'auto'"
            )

    def forward_backward(self, inputs, labels, sample_weight, numbers):
        return self._compute(inputs, labels, sample_weight, numbers)

    def evaluate(self, inputs, labels, sample_weight, counts):
        return self._step.outputs_and_sums(inputs, labels, sample_weight, counts)

    def predict(self, inputs):
        return self._step.outputs(inputs)
