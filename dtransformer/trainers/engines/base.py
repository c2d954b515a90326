"""Base class of engines, the forward step that all engines compute, and the single-device engine.

An engine runs the forward and backward passes of a batch: on one device (`LocalEngine`), on a mesh
(`MeshEngine`) or in a pipeline (`PipelineEngine`). It receives a `ForwardStep`, not the trainer.
"""

import contextlib
import dataclasses
import itertools
import types
import typing
import warnings

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.transport import never_constant
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tensor_parallel.chunked_cross_entropy import (
    chunk_size,
    get_product,
    logit_bytes,
)
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import collecting
from dtransformer.parallel.tracing.dropout_seed import dropout_seed
from dtransformer.parallel.tracing.tensor_specs import count_rows
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use, trained_value
from dtransformer.parallel.zero.gather import current_unsharding, unsharding
from dtransformer.trainers.compile_checks import find_trained_batch_norms
from dtransformer.trainers.data import input_symbols
from dtransformer.trainers.expert_loads import EXPERTS
from dtransformer.trainers.layer_states import LayerStates
from dtransformer.trainers.optimizer.phases import with_zeros
from dtransformer.trainers.optimizer.reduce import reduce_sum


class StepScalars(typing.NamedTuple):
    """Scalars of a training step, identical on all ranks except for `first_rows`.

    Args:
        counts: Float32 tensor [n]. Counts of the global batch, see `Objective.counts`.
        loss_scale: Float32 scalar that multiplies the loss.
        seed: Int64 tensor [2]. Seed of the dropout masks.
        first_rows: Int64 tensor [m]. Index in the global batch of the first local row of each
            micro-batch.
    """

    counts: tf.Tensor
    loss_scale: tf.Tensor
    seed: tf.Tensor
    first_rows: tf.Tensor

    def of_micro_batch(self, i: int | tf.Tensor) -> "StepScalars":
        """Return the scalars of micro-batch `i`."""
        return self._replace(first_rows=tf.expand_dims(self.first_rows[i], 0))

    @property
    def dropout_seed(self) -> tf.Tensor:
        """Int64 tensor [3]: the seed and the first row of one micro-batch."""
        return tf.concat([self.seed, self.first_rows], 0)


@contextlib.contextmanager
def training_forward(seed: tf.Tensor, inputs: object):
    """Trace the forward pass of a training step.

    Args:
        seed: Int64 tensor [3], or [4] on a mesh: seed, first row and coordinate, see `dropout_seed`.
        inputs: Nested tensors [b, ...], whose rows are counted.

    Yields:
        A dict of the auxiliary metrics that layers report.
    """
    num_rows = tf.cast(count_rows(tf.nest.flatten(inputs)[0]), seed.dtype)
    seed = tf.concat([seed[:3], tf.expand_dims(num_rows, 0), seed[3:]], 0)
    with trace.training_step(), dropout_seed(seed), collecting() as metrics:
        yield metrics


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
        needs_outputs: Whether metrics need the outputs, which are large.
        states: `LayerStates` of the network.
        layout: `StepLayout` of the current layout.
        traced_bytes: Dict with the bytes of the `"logits"` that a device computes together in training;
            see `logit_bytes`.
    """

    network: object
    objective: object = None
    needs_outputs: bool = False
    states: LayerStates = dataclasses.field(default_factory=LayerStates)
    layout: StepLayout = dataclasses.field(default_factory=StepLayout.current)
    traced_bytes: dict = dataclasses.field(default_factory=dict)

    @property
    def repeats_forward(self) -> bool:
        """True if a step needs the outputs of all micro-batches before their backward passes.

        This holds for a loss that compares rows, see `output_gradients.py`.
        """
        return self.objective.compares_rows and get_parallel_config().micro_batch_num > 1

    def counts(self, inputs, labels, sample_weight):
        """Return the counts of the global batch from the local rows, see `Objective.counts`."""
        with tf.device("CPU:0"):  # The labels are on the CPU, so checking them there blocks no GPU.
            counts = self.objective.counts(inputs, labels, sample_weight)
        if self.layout.needs_reduce:
            counts = reduce_sum({"counts": counts}, name="counts")["counts"]
        return counts

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
        unsharded = contextlib.nullcontext()
        collecting_changes = contextlib.nullcontext({})
        if self.layout.unshards_weights and current_unsharding() is None:
            unsharded = unsharding("call")
        if self.states.is_used:
            collecting_changes = self.states.collect_changes(layers)
        with unsharded, collecting_changes as changes:
            outputs = self.network(inputs, training=training)
        if outputs is None:
            raise ValueError(
                f"The network {self.network.name!r} returned None. Its call must return one or "
                "more tensors."
            )
        return outputs, changes

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
        unsharded = contextlib.nullcontext()
        if self.layout.unshards_weights:
            unsharded = unsharding("train")
        with (
            tape,
            unsharded,
            trace.tape_opened_here(),
            training_forward(scalars.dropout_seed, inputs) as reported,
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

    def training_outputs(self, inputs, seed):
        """Return the outputs of a training step without storing activations.

        State changes are discarded.

        Args:
            inputs: Nested tensors [b, ...].
            seed: Int64 tensor [3]. Seed of the dropout masks.

        Raises:
            ValueError: If the outputs have masks.
        """
        with trace.with_gradients(False), training_forward(seed, inputs):
            outputs = self.outputs(inputs, training=True)
        if _compat.get_keras_masks(outputs):
            raise ValueError(
                "The loss compares all rows of a batch, and the network's outputs have a mask, which "
                "does not work with several micro-batches. Pass sample weights instead of the mask, "
                "or set `micro_batch_num=1`."
            )
        return outputs

    def output_gradients(self, outputs, labels, sample_weight, counts):
        """Return the gradients of the loss with respect to the outputs.

        Args:
            outputs, labels, sample_weight: Nested tensors [b, ...] with all local rows, or `None`
                for the last two.
            counts: `counts` of the global batch.

        Returns:
            A `(gradients, sums)` tuple: nested float32 tensors in the shapes of the outputs, and
            the result of `Objective.sums`.
        """
        values = tf.nest.map_structure(lambda x: tf.cast(x, "float32"), outputs)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            is_full_batch = not self.layout.needs_reduce
            sums = self.objective.sums(values, labels, sample_weight, counts, is_full_batch)
        return tape.gradient(sums["loss"], values, unconnected_gradients="zero"), sums

    def outputs_and_sums(self, inputs, labels, sample_weight, counts):
        """Return `metric_outputs` and the local sums of a batch, in inference mode."""
        outputs, changes = self.outputs_and_states(inputs)
        sums = self.sums(inputs, outputs, labels, sample_weight, counts, self.network.losses)
        return self.metric_outputs(outputs), sums | self.layer_sums(changes, inputs, counts)

    def metric_outputs(self, outputs):
        """Return `(outputs, masks)` for metrics, or `None` if no metric needs the outputs."""
        return (outputs, _compat.get_keras_masks(outputs)) if self.needs_outputs else None

    def sums(self, inputs, outputs, labels, sample_weight, counts, losses=(), training=False):
        """Return the local sums for the logs, a dict of float32 scalars.

        The dict contains the items of `Objective.sums`, and `added_loss` as `"added"`. In a
        training step with `repeats_forward`, `labels` are the gradients from `output_gradients`.
        The item `"loss"` then has the gradients of the loss, but not its value.
        """
        if self.needs_outputs:
            self._use_all_logits(outputs)
        if training and self.objective.is_token_loss and tf.is_tensor(outputs):
            chunk_tokens = getattr(self.objective.losses[0], "chunk_tokens", None)
            self.traced_bytes["logits"] = logit_bytes(outputs, chunk_tokens)
        is_full_batch = not (self.layout.splits_batch if training else self.layout.needs_reduce)
        if training and self.repeats_forward:
            sums = {"loss": _weighted_sum(outputs, labels)}
        else:
            sums = self.objective.sums(outputs, labels, sample_weight, counts, is_full_batch)
        if "normalizer_ratio" in sums:
            self._check_added_means(losses)
        sums["added"] = self.added_loss(losses, inputs, counts, sums.get("normalizer_ratio"))
        return sums

    def _use_all_logits(self, outputs):
        """Compute losses from all logits, because metrics read them. Warn if they are large."""
        logits = [x for x in tf.nest.flatten(outputs) if get_product(x) is not None]
        chunk_options = [getattr(loss, "chunk_tokens", None) for loss in self.objective.losses]
        for x, chunk_tokens in itertools.product(logits, chunk_options):
            if chunk_size(x, chunk_tokens) is not None and job.is_chief():
                warnings.warn(
                    f"Metrics read all logits of shape {tuple(x.shape)}, so the loss is not computed "
                    "in chunks. To save memory, call `compile` without `metrics`. The logs then "
                    "contain the loss and the accuracy.",
                    stacklevel=2,
                )
        for x in logits:
            x.head_product = None

    def added_loss(self, losses, inputs, counts, normalizer_ratio=None):
        """Return the local part of the losses that layers add, a float32 scalar.

        The losses are averaged over the rows of the global batch. This is correct for regularizers,
        which are identical for all parts of the batch, and for the losses of mixture-of-experts
        layers, which are means over the rows of a part.

        Args:
            losses: List of scalars.
            inputs: Nested tensors [b, ...].
            counts: `counts` of the global batch, possibly with more elements.
            normalizer_ratio: The item `"normalizer_ratio"` of `Objective.sums`, if present.
        """
        if not losses:
            return tf.zeros([])
        fraction = normalizer_ratio
        if fraction is None:
            fraction = self.batch_fraction(inputs, counts)
        # The mean over zero rows is NaN.
        parts = [tf.math.multiply_no_nan(tf.cast(loss, "float32"), fraction) for loss in losses]
        return tf.add_n(parts)

    def layer_sums(self, changes, inputs, counts, reported=types.MappingProxyType({})):
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

    def _check_added_means(self, losses):
        """Check losses that layers add if the loss normalizer depends on the forward pass.

        The losses of other packages' layers are then weighted like the loss, with one warning.

        Raises:
            ValueError: If a layer adds a mean over rows, such as a mixture of experts.
        """
        names = self.states.pop_row_loss_layers()
        if losses and names and job.is_chief():
            warnings.warn(
                f"The loss is a mean over a mask. The losses that {', '.join(names)} add to it "
                "are weighted by the unmasked positions of each data shard and micro-batch, not by "
                "rows, and differ from Keras'. Use one data shard and `micro_batch_num=1` for "
                "Keras' results.",
                stacklevel=2,
            )
        layers = _compat.flat_layers(self.network)
        if losses and any(getattr(layer, "aux_loss_is_mean", False) for layer in layers):
            raise ValueError(
                "A loss that is a mean over a mask cannot be combined with the losses of a mixture "
                "of experts over several ranks or micro-batches. Use sample weights and "
                "`reduction='mean_with_sample_weight'` instead of the mask."
            )


def check_any_trained(has_trained_weight: bool) -> None:
    """Check that the network has a trainable weight.

    Raises:
        ValueError: If it has none.
    """
    if not has_trained_weight:
        raise ValueError("All weights of the network are frozen. Unfreeze a weight to train.")


class Engine:
    """Base class of objects that run the forward and backward passes of this rank's rows.

    The methods of the single-device engine are traced into the caller's `tf.function`. The other
    engines are called from Python and compile their functions themselves. All ranks must call the
    same methods in the same order. Labels and sample weights are nested tensors, or `None`.

    Attributes:
        takes_micro_batches: Whether the engine divides a batch into micro-batches itself.
        input_shapes: Nested shapes of the inputs of one forward pass in the last training step, or
            `None` if unknown.
        num_stored_passes: Number of such forward passes whose activations are stored at the same time.
    """

    takes_micro_batches = False
    input_shapes = None
    num_stored_passes = 1

    def build(self, first) -> None:
        """Build this rank's part of the network, unless it is built.

        Args:
            first: First batch, see `trainers.data.peek`. `None` if it is unknown.
        """

    def forward_backward(self, inputs, labels, sample_weight, scalars):
        """Run the forward and backward passes of a batch.

        Returns:
            A `(gradients, outputs, sums)` tuple: a list of the gradients of the scaled loss, one
            tensor per local shard of each trainable weight, the outputs for metrics (see
            `ForwardStep.metric_outputs`), `None` if they are on another rank, and the local sums
            (see `ForwardStep.sums`).
        """

    def training_outputs(self, inputs, seed):
        """Return `ForwardStep.training_outputs`."""

    def evaluate(self, inputs, labels, sample_weight, counts):
        """Return `(outputs, sums)` as in `forward_backward`; `counts` as in `StepScalars`."""

    def predict(self, inputs):
        """Return the network's outputs on every rank."""

    def example_outputs(self):
        """Return zeros with the shapes and dtypes of outputs that are on other ranks."""

    def collectives(self):
        """Return the list of `Collective`s of a step, as it was compiled last."""
        return []


def _weighted_sum(outputs, weights):
    """Return the sum of outputs times weights, both nested tensors of equal shapes."""
    pairs = zip(tf.nest.flatten(outputs), tf.nest.flatten(weights))
    return tf.add_n([tf.reduce_sum(tf.cast(x, "float32") * weight) for x, weight in pairs])


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


class LocalEngine(Engine):
    """Engine for a single device per rank.

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
        self._compute = step.loss_and_gradients
        self._compute_outputs = step.training_outputs
        if jit_compile:
            compiled = tf.function(jit_compile=True, reduce_retracing=True)
            self._compute = compiled(self._compute)
            self._compute_outputs = compiled(self._compute_outputs)

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

    def forward_backward(self, inputs, labels, sample_weight, scalars):
        return self._compute(inputs, labels, sample_weight, scalars)

    def training_outputs(self, inputs, seed):
        return self._compute_outputs(inputs, seed)

    def evaluate(self, inputs, labels, sample_weight, counts):
        return self._step.outputs_and_sums(inputs, labels, sample_weight, counts)

    def predict(self, inputs):
        return self._step.outputs(inputs)
