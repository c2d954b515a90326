"""The engine of one device: its functions are traced into the training step's."""

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.sharded_variable import is_unsharded_for_use
from dtransformer.trainers.data import input_symbols


class LocalEngine:
    """Forward and backward on this rank's one device.

    Args:
        step: the `ForwardStep`.
        jit_compile: whether forward and backward are compiled with XLA.

    Raises:
        ValueError: on `build`: XLA would have to compile collectives, or shapes that change.
    """

    compiles_itself = takes_micro_batches = False
    input_shapes = None
    num_kept = 1

    def __init__(self, step, jit_compile=False):
        self._step, self._jit_compile = step, jit_compile
        self._compute = step.loss_and_gradients
        if jit_compile:
            self._compute = tf.function(self._compute, jit_compile=True, reduce_retracing=True)

    def build(self, first):
        if not self._step.network.built:
            self._step.network(input_symbols(first))
        unsharded = [w for w in self._step.network.weights if is_unsharded_for_use(w)]
        if self._jit_compile and unsharded:
            raise ValueError(
                "jit_compile=True does not work with optimizer_shard=3, which communicates while "
                "the network is computed: leave it at 'auto'"
            )
        layers = _compat.flat_layers(self._step.network)
        if self._jit_compile and any(getattr(layer, "sorts_tokens", False) for layer in layers):
            raise ValueError(
                "jit_compile=True does not work with experts, whose numbers of tokens are not known "
                "when XLA compiles: leave it at 'auto'"
            )

    def forward_backward(self, inputs, labels, sample_weight, numbers):
        return self._compute(inputs, labels, sample_weight, numbers)

    def evaluate(self, inputs, labels, sample_weight, counts):
        return self._step.outputs_and_sums(inputs, labels, sample_weight, counts)

    def predict(self, inputs):
        return self._step.outputs(inputs)

    def collectives(self):
        return []
