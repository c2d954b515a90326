"""What the three engines have in common: what they compute, and what they are asked.

An engine runs the forward–backward of a batch, on one device (`local`), on the mesh (`mesh`)
or in a pipeline (`pipeline`). It is given a `ForwardStep`, never the trainer.
"""

import dataclasses
import typing

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ForwardStep:
    """The network and what is made of its outputs: all that an engine computes.

    Args:
        network: the `keras.Model` that is trained, built.
        objective: the loss, with `per_token(outputs, labels, sample_weight)`; see `token_loss`.
        keeps_outputs: whether outputs are wanted, for metrics. They are large.
    """

    network: object
    objective: object
    keeps_outputs: bool = False


class Numbers(typing.NamedTuple):
    """The numbers of a training step.

    Args:
        count: float32 scalar, Σ weights of the tokens of the global batch; None where it is not
            known before the forward pass.
        loss_scale: float32 scalar that the loss is multiplied with.
        seed: int32 [2], of the dropout masks.
    """

    count: tf.Tensor | None
    loss_scale: tf.Tensor
    seed: tf.Tensor


class Engine(typing.Protocol):
    """What runs the forward–backward of this rank's share of a batch.

    All ranks of the job call the same methods in the same order. `labels` and `sample_weight`
    are nested tensors, or None.

    Attributes:
        input_shapes: nested shapes of the inputs that were computed at once in the last
            training step; None before it.
        num_kept: how many such activations are kept at once.
    """

    input_shapes: object
    num_kept: float

    def build(self, data) -> None:
        """Build this rank's part of the network, for what `fit` is given."""

    def forward_backward(self, inputs, labels, sample_weight, numbers):
        """Compute the gradients of Σ loss / count · scale.

        Returns:
            gradients, a list of tensors, one for each shard of each trained weight that this
            rank has, in the order of `own_shards(network.trainable_variables)`; outputs, nested
            tensors, or None where they are not wanted or not here; and sums, a dict of float32
            scalars of this rank's share: `"loss"`, `"count"`, and what else the logs show.
        """

    def evaluate(self, inputs, labels, sample_weight):
        """Return outputs and sums, as `forward_backward` does."""

    def predict(self, inputs):
        """Return the network's outputs, on every rank."""

    def collectives(self):
        """Return the list of `Collective`s of the training step that was compiled last."""
