"""The forward step: the network and its loss, on the rows of one device, mesh or micro-batch."""

import contextlib
import dataclasses
import typing
import warnings

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.transport import never_constant
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tensor_parallel.chunked_cross_entropy import use_all_logits
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import count_rows
from dtransformer.parallel.weights.weight import trained_value
from dtransformer.parallel.zero.gather import current_unsharding, unsharding
from dtransformer.trainers.compile_checks import check_added_means
from dtransformer.trainers.expert_loads import EXPERTS
from dtransformer.trainers.layer_states import LayerStates
from dtransformer.trainers.optimizer.reduction import reduce_sum


class StepScalars(typing.NamedTuple):
    """Scalars of a training step, identical on all ranks except for the seed.

    Args:
        counts: Float32 tensor [n]. Counts of the global batch, see `Objective.counts`.
        loss_scale: Float32 scalar that multiplies the loss.
        seed: Int64 tensor [2]. Seed of the dropout masks.
    """

    counts: tf.Tensor
    loss_scale: tf.Tensor
    seed: tf.Tensor


class StepLayout(typing.NamedTuple):
    """Consequences of the current layout for a step.

    Args:
        needs_reduce: Whether sums must be reduced, because other data shards compute rows of the
            batch.
        splits_batch: Whether data shards or micro-batches divide the batch.
        unshards_weights: Whether weights are unsharded for use.
    """

    needs_reduce: bool
    splits_batch: bool
    unshards_weights: bool

    @classmethod
    def current(cls):
        """Return the values for the current layout."""
        config = get_parallel_config()
        needs_reduce = job.data_parallel_group().size > 1
        splits_batch = job.data_shard()[1] > 1 or config.micro_batch_num > 1
        return cls(needs_reduce, splits_batch, needs_reduce and config.optimizer_shard == 3)


@dataclasses.dataclass(frozen=True)
class ForwardStep:
    """The network and its objective: the computation that an engine runs.

    Args:
        network: The `keras.Model` that is trained.
        objective: The `Objective`, or `None` if only outputs are computed.
        training_objective: Objective of each forward pass in training; see `training_objective`.
        needs_outputs: Whether metrics need the outputs, which are large.
        states: `LayerStates` of the network.
        layout: `StepLayout` of the current layout.
    """

    network: object
    objective: object = None
    training_objective: object = None
    needs_outputs: bool = False
    states: LayerStates = dataclasses.field(default_factory=LayerStates)
    layout: StepLayout = dataclasses.field(default_factory=StepLayout.current)

    def counts(self, inputs, labels, sample_weight):
        """Return the counts of the global batch from the local rows, see `Objective.counts`."""
        with tf.device("CPU:0"):  # The labels are on the CPU, so checking them there blocks no GPU.
            counts = self.objective.counts(inputs, labels, sample_weight)
        if self.layout.needs_reduce:
            counts = reduce_sum({"counts": counts}, name="counts")["counts"]
        return counts

    def loss_and_gradients(self, inputs, labels, sample_weight, scalars):
        """Return gradients, outputs and local sums of a batch.

        Args:
            inputs, labels, sample_weight: Nested tensors [b, ...], or `None` for the last two.
            scalars: `StepScalars` of the step.

        Returns:
            A `(gradients, outputs, sums)` tuple: a list of the gradients of the scaled loss, one
            dense tensor per trainable weight in the shape of its `trained_value`,
            `metric_outputs(outputs)`, and `sums`.

        Raises:
            ValueError: If no weight is trainable, or if there is no loss.
        """
        weights = self.network.trainable_variables
        check_any_trained(bool(weights))
        values = [trained_value(weight) for weight in weights]
        tape = tf.GradientTape(watch_accessed_variables=False)  # Do not watch frozen weights.
        with (
            tape,
            self._unsharding("train"),
            trace.tape_opened_here(),
            trace.training_forward(scalars.seed) as reported,
        ):
            tape.watch(values)
            outputs, changes = self.outputs_and_states(inputs, training=True)
            if not self.objective.losses and not self.network.losses:
                raise ValueError(
                    "The network has no loss. Pass a loss to `compile`, or call `add_loss` in a "
                    "layer."
                )
            batch = inputs, outputs, labels, sample_weight
            sums = self.sums(*batch, scalars.counts, self.network.losses, training=True)
            sums |= self.layer_sums(changes, inputs, scalars.counts, reported)
            loss = (sums["loss"] + sums["added"]) * scalars.loss_scale
        gradients = tape.gradient(loss, values)
        gradients = with_zeros(weights, gradients, lambda i: _zeros(values[i]))
        return list(map(_dense, gradients, values)), self.metric_outputs(outputs), sums

    def outputs(self, inputs, training=False, layers=None):
        """Return the network's outputs and discard all state changes."""
        return self.outputs_and_states(inputs, training, layers)[0]

    def outputs_and_states(self, inputs, training=False, layers=None):
        """Return the network's outputs and the state changes of its layers.

        Args:
            inputs: Nested tensors [b, ...].
            training: Whether the network runs in training mode.
            layers: As in `LayerStates.collect_changes`, whose yielded dict is the second result.

        Raises:
            ValueError: If the network returns `None`.
        """
        collecting_changes = contextlib.nullcontext({})
        if self.states.is_used:
            collecting_changes = self.states.collect_changes(layers)
        with self._unsharding("call"), collecting_changes as changes:
            outputs = self.network(inputs, training=training)
        if outputs is None:
            raise ValueError(
                f"The network {self.network.name!r} returned None. Its call must return one or "
                "more tensors."
            )
        return outputs, changes

    def _unsharding(self, part):
        """Return a context manager that unshards weights on use, if the layout needs it."""
        if self.layout.unshards_weights and current_unsharding() is None:
            return unsharding(part)
        return contextlib.nullcontext()

    def outputs_and_sums(self, inputs, labels, sample_weight, counts):
        """Return `metric_outputs` and the local sums of a batch, in inference mode."""
        outputs, changes = self.outputs_and_states(inputs)
        sums = self.sums(inputs, outputs, labels, sample_weight, counts, self.network.losses)
        return self.metric_outputs(outputs), sums | self.layer_sums(changes, inputs, counts, {})

    def metric_outputs(self, outputs):
        """Return `(outputs, masks)` for metrics, or `None` if no metric needs the outputs."""
        return (outputs, _compat.get_keras_masks(outputs)) if self.needs_outputs else None

    def sums(self, inputs, outputs, labels, sample_weight, counts, losses=(), training=False):
        """Return the local sums for the logs, a dict of float32 scalars.

        The dict contains the items of `Objective.sums`, and `added_loss` as `"added"`.
        """
        if self.needs_outputs:
            use_all_logits(outputs, self.objective.losses)
        objective = self.objective
        is_full_batch = not self.layout.needs_reduce
        if training:
            objective = self.training_objective
            is_full_batch = not self.layout.splits_batch
        sums = objective.sums(outputs, labels, sample_weight, counts, is_full_batch)
        if "normalizer_ratio" in sums:
            check_added_means(self.network, losses, self.states.pop_row_loss_layers())
        sums["added"] = self.added_loss(losses, inputs, counts, sums.get("normalizer_ratio"))
        return sums

    def added_loss(self, losses, inputs, counts, fraction=None):
        """Return the local part of the losses that layers add, a float32 scalar.

        The losses are averaged over the rows of the global batch. This is correct for regularizers,
        which are identical for all parts of the batch, and for the losses of mixture-of-experts
        layers, which are means over the rows of a part.

        Args:
            losses: List of scalars.
            inputs: Nested tensors [b, ...].
            counts: `counts` of the global batch, possibly with more elements.
            fraction: Fraction of the global batch, the item `"normalizer_ratio"` of
                `Objective.sums`. Defaults to the fraction of rows.
        """
        if not losses:
            return tf.zeros([])
        if fraction is None:
            fraction = self.batch_fraction(inputs, counts)
        # The mean over zero rows is NaN.
        parts = [tf.math.multiply_no_nan(tf.cast(loss, "float32"), fraction) for loss in losses]
        return tf.add_n(parts)

    def layer_sums(self, changes, inputs, counts, reported):
        """Return sums of state changes and metrics that layers have reported.

        Args:
            changes: State changes from `outputs_and_states`.
            inputs: Nested tensors [b, ...].
            counts: `counts` of the global batch, possibly with more elements.
            reported: Dict of auxiliary metrics.
        """
        sums = {f"{EXPERTS}{layer}": value for layer, value in reported.items()}
        if changes:
            sums |= self.states.weight_changes(changes, self.batch_fraction(inputs, counts))
        return sums

    def batch_fraction(self, inputs, counts):
        """Return the fraction of the global batch's rows that `inputs` contain."""
        rows = count_rows(tf.nest.flatten(inputs)[0])
        return tf.math.divide_no_nan(tf.cast(rows, "float32"), self.objective.num_rows(counts))


def check_any_trained(has_trained_weight):
    """Check that the network has a trainable weight.

    Raises:
        ValueError: If it has none.
    """
    if not has_trained_weight:
        raise ValueError("All weights of the network are frozen. Unfreeze a weight to train.")


def with_zeros(weights, gradients, zeros):
    """Replace missing gradients by zeros. Warn once per data-parallel group.

    Args:
        weights: List of Keras variables.
        gradients: List of tensors. `None` for a weight that the loss does not depend on.
        zeros: Function of a weight's index that returns a gradient of zeros.

    Returns:
        A list of tensors.
    """
    unused = [w.path for w, gradient in zip(weights, gradients) if gradient is None]
    if unused and not job.data_shard()[0]:
        warnings.warn(
            f"The loss does not depend on the weights {', '.join(unused)}. Only weight decay "
            "changes them. Check that compile received a loss for each output.",
            stacklevel=2,
        )
    return [zeros(i) if gradient is None else gradient for i, gradient in enumerate(gradients)]


def _dense(gradient, value):
    """Return a gradient as a dense tensor in the shape of `value`."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = gradient.values if gradient.dtype.size > 2 else tf.cast(gradient.values, "float32")
    total = tf.math.unsorted_segment_sum(rows, gradient.indices, value.shape[0])
    return tf.cast(total, gradient.dtype)


def _zeros(value):
    """Return a zero gradient.

    TensorFlow must not fold it to a constant if ranks reduce it.
    """
    zeros = tf.zeros_like(value)
    is_reduced = job.data_shard()[1] > 1 and not trace.is_on_mesh()
    return never_constant(zeros) if is_reduced and not _compat.is_compiled_by_xla() else zeros
