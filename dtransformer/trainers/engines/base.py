"""What the engines have in common: what they compute, and what they are asked.

An engine runs the forward–backward of a batch: on one device (`local`), on the mesh (`mesh`)
or in a pipeline (`pipeline`). It is given a `ForwardStep`, never the trainer.
"""

import dataclasses
import typing

import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.dropout_seed import dropout_seed
from dtransformer.parallel.sharded_variable import trained_value
from dtransformer.parallel.zero.gather import current_unsharding, unsharding
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.token_loss import hits


class Numbers(typing.NamedTuple):
    """The numbers of a training step, equal on all ranks but for the seed.

    Args:
        count: float32 scalar that the sum of losses is divided by: the weights of all tokens
            of the global batch, where they are known before the forward pass; else a guess,
            which the optimizer step makes up for.
        loss_scale: float32 scalar that the loss is multiplied with.
        seed: int32 [2], of the dropout masks.
    """

    count: tf.Tensor
    loss_scale: tf.Tensor
    seed: tf.Tensor


@dataclasses.dataclass(frozen=True)
class ForwardStep:
    """The network and what is made of its outputs: all that an engine computes.

    Args:
        network: the `keras.Model` that is trained.
        objective: the loss, with `per_token(outputs, labels, sample_weight)`; see `token_loss`.
            None where nothing but outputs is asked for.
        keeps_outputs: whether outputs are wanted, for metrics. They are large.
    """

    network: object
    objective: object = None
    keeps_outputs: bool = False

    @property
    def knows_count(self):
        """Whether the weights of tokens are known before the forward pass."""
        return hasattr(self.objective, "token_weights")

    def count(self, labels, sample_weight):
        """Return `Numbers.count` of a batch, from this rank's share of it."""
        if self.knows_count:
            own = tf.reduce_sum(self.objective.token_weights(labels, sample_weight))
        else:
            own = tf.cast(tf.size(tf.nest.flatten(labels)[0]), "float32")
        return grads.reduce_sum({"count": own}, name="count")["count"]

    def outputs(self, inputs, training=False):
        """Return the network's outputs."""
        if current_unsharding() is not None:
            return self.network(inputs, training=training)
        with unsharding("call"):
            return self.network(inputs, training=training)

    def loss_and_gradients(self, inputs, labels, sample_weight, numbers):
        """Return the gradients of Σ loss / count · scale, the outputs and this rank's sums.

        Gradients are those of `network.trainable_variables`, as their `trained_value` is.
        """
        weights = self.network.trainable_variables
        values = [trained_value(weight) for weight in weights]
        with tf.GradientTape() as tape, dropout_seed(numbers.seed), unsharding("train"):
            tape.watch(values)
            outputs = self.outputs(inputs, training=True)
            sums = self.sums(inputs, outputs, labels, sample_weight)
            loss = tf.math.divide_no_nan(sums["loss"], numbers.count)
            loss += self.added_losses(self.network.losses, sums["count"], numbers.count)
            loss *= numbers.loss_scale
        gradients = tape.gradient(loss, values)
        grads.check_used(weights, gradients)
        return gradients, outputs if self.keeps_outputs else None, sums

    def added_losses(self, losses, own_count, count):
        """Return this share of the batch's contribution to what layers add to the loss.

        Regularizers are the same on all ranks and for all micro-batches, whose losses are
        added up.
        """
        share = 1 / (job.data_shard()[1] * get_parallel_config().micro_batch_num)
        if not self.knows_count:
            share = tf.math.divide_no_nan(own_count, count)
        return tf.add_n([tf.zeros([]), *(tf.cast(loss, "float32") * share for loss in losses)])

    def outputs_and_sums(self, inputs, labels, sample_weight):
        """Return the outputs, where they are wanted, and this rank's sums."""
        outputs = self.outputs(inputs)
        sums = self.sums(inputs, outputs, labels, sample_weight)
        return outputs if self.keeps_outputs else None, sums

    def sums(self, inputs, outputs, labels, sample_weight):
        """Return this rank's sums, a dict of float32 scalars: what the logs are made of.

        `"loss"` and `"count"`, the weight of its tokens; `"accuracy"` of a classifier;
        `"tokens"`, and `"flops"` where the network tells them.
        """
        with tf.name_scope("loss"):
            values, weights = self.objective.per_token(outputs, labels, sample_weight)
        weights = tf.cast(weights, "float32")
        sums = {
            "loss": tf.reduce_sum(tf.cast(values, "float32") * weights),
            "count": tf.reduce_sum(weights),
        }
        with tf.name_scope("accuracy"):
            right = hits(outputs, labels)
        if right is not None:
            sums["accuracy"] = tf.reduce_sum(right * weights)
        sums["tokens"] = sums["count"]
        if hasattr(self.network, "num_tokens"):
            sums["tokens"] = tf.cast(self.network.num_tokens(inputs), "float32")
        if hasattr(self.network, "flops_per_step"):
            sums["flops"] = self.network.flops_per_step(inputs)
        return sums


class Engine(typing.Protocol):
    """What runs the forward–backward of this rank's share of a batch.

    All ranks of the job call the same methods in the same order. Labels and sample weights are
    nested tensors, or None.

    Attributes:
        compiles_itself: whether its methods run compiled functions of their own, and are called
            from Python; else they are traced into the caller's `tf.function`.
        takes_micro_batches: whether it divides a batch into micro-batches by itself.
        input_shapes: nested shapes of the inputs that were computed at once in the last
            training step; None where that is not known.
        num_kept: how many such activations are kept at once.
    """

    compiles_itself: bool
    takes_micro_batches: bool
    input_shapes: object
    num_kept: float

    def build(self, data) -> None:
        """Build this rank's part of the network, once, for what `fit` is given."""

    def forward_backward(self, inputs, labels, sample_weight, numbers):
        """Compute the gradients of Σ loss / count · scale.

        Returns:
            gradients, a list of tensors, one for each shard that this rank has of each trained
            weight; outputs, nested tensors, or None where they are not wanted or not here; and
            sums, see `ForwardStep.sums`.
        """

    def evaluate(self, inputs, labels, sample_weight):
        """Return outputs and sums, as `forward_backward` does."""

    def predict(self, inputs):
        """Return the network's outputs, on every rank."""

    def example_outputs(self):
        """Return zeros of the shapes and types of outputs, where they are on other ranks."""

    def collectives(self):
        """Return the list of `Collective`s of a whole step, as it was compiled last."""
