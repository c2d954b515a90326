"""A student network and its frozen teacher, computed in one step."""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers import DistillationLoss
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import collecting


class DistilledModel(keras.Model):
    """Student network that attaches the logits of a frozen teacher to its logits.

    The teacher has the student's layout. It runs without dropout and without gradients. Paths of
    its weights begin with `teacher/`.

    Args:
        student: Network of `dtransformer.models`.
        teacher: Network of the same class and vocabulary. It is frozen.

    Call arguments:
        inputs: Inputs of both networks.
        training: Boolean. Whether the student runs in training mode.

    Returns:
        The student's logits. Their attribute `teacher_logits` has the teacher's logits.
    """

    def __init__(self, student: keras.Model, teacher: keras.Model):
        super().__init__(name=student.name)
        for network in (student, teacher):
            if not network.built:
                network.build()
        teacher.trainable = False
        _compat.replace_root(teacher, "teacher")
        self.student = student
        self.teacher = teacher
        self.built = True

    def call(self, inputs: tf.Tensor | dict[str, tf.Tensor], training: bool = False) -> tf.Tensor:
        # Run the teacher before the student stores activations.
        with trace.training_step(False), trace.with_gradients(False), collecting(False):
            teacher_logits = self.teacher(inputs, training=False)
        logits = self.student(inputs, training=training)
        logits.teacher_logits = teacher_logits
        return logits


def check_teacher(network: keras.Model, teacher: keras.Model, loss: object) -> None:
    """Check that a teacher suits a network and its loss.

    Raises:
        ValueError: If the teacher has another class or vocabulary than the network, or if the loss
            is no `DistillationLoss`.
    """
    if not isinstance(loss, DistillationLoss):
        raise ValueError("`teacher` has no effect without a DistillationLoss. Pass one as `loss`.")
    if type(teacher) is not type(network) or not hasattr(network, "logits_vocab_size"):
        raise ValueError(
            f"The teacher is a {type(teacher).__name__}, but the trained network is a "
            f"{type(network).__name__}. Use two networks of the same class of dtransformer.models."
        )
    if teacher.logits_vocab_size() != network.logits_vocab_size():
        raise ValueError(
            f"The teacher has a vocabulary of {teacher.logits_vocab_size()} entries, but the trained "
            f"network has {network.logits_vocab_size()}. Choose two networks of equal vocabularies."
        )
