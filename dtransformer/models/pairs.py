"""A network that sees several sequences of a record at once: answers of a preference, or texts alike."""

import keras
import tensorflow as tf

from dtransformer.layers.preference import SequenceLogProbability
from dtransformer.models.base import TokenModel


class GroupModel(keras.Model):
    """Give each sequence of a record what a network makes of it.

    Args:
        core: the network, built: a `CausalLM`, or one with a task's head.
        scores: None for the core's own output of each sequence; a `SequenceLogProbability` for how
            likely its labels are.

    Call arguments:
        inputs: a dict of int tensors [b, k, s], `"tokens"`, `"segments"`, 0 for padding, and, with
            `scores`, `"labels"`.
        training: whether dropout applies.

    Output shape:
        [b, k], or [b, k, n] where the core has n outputs of a sequence.
    """

    def __init__(self, core: TokenModel, scores: SequenceLogProbability | None = None):
        super().__init__(name="group")
        self.core, self.scores = core, scores
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
