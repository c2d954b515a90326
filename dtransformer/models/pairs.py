"""Model that processes several sequences per record, such as preferred and rejected answers."""

import keras
import tensorflow as tf

from dtransformer.layers.preference import SequenceLogProbability
from dtransformer.models.base import TokenModel


class GroupModel(keras.Model):
    """Apply a network to every sequence of a record.

    Args:
        core: Built network: a `CausalLM`, or a network with a task head.
        scores: `SequenceLogProbability` layer that returns the log-probability of each
            sequence's labels, or `None` to return the outputs of `core`.

    Call arguments:
        inputs: Dict of int tensors [b, k, s]: `"tokens"`, `"segments"` (0 for padding) and,
            with `scores`, `"labels"`.
        training: Boolean. Whether to apply dropout.

    Output shape:
        [b, k], or [b, k, n] if `core` returns n > 1 outputs per sequence.
    """

    def __init__(self, core: TokenModel, scores: SequenceLogProbability | None = None):
        super().__init__(name="group")
        self.core = core
        self.scores = scores
        self.built = True

    def call(self, inputs: dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        _, k, s = inputs["tokens"].shape
        # [b, k, s] -> [b·k, s]
        flat = {name: tf.reshape(x, [-1, s]) for name, x in inputs.items()}
        labels = flat.pop("labels", None)
        x = self.core(flat, training=training)
        if self.scores is not None:
            return tf.reshape(self.scores(x, labels), [-1, k])
        return tf.reshape(x, [-1, k] if x.shape[-1] == 1 else [-1, k, x.shape[-1]])
