"""Base class of engines, the forward step that all compute, and the engine of one device.

An engine runs the forward–backward of a batch: on one device (`LocalEngine`), on the mesh (`mesh`)
or in a pipeline (`pipeline`). It is given a `ForwardStep`, never the trainer.
"""

import contextlib
import dataclasses
import types
import typing
import warnings

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.transport import never_constant
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import collecting
from dtransformer.parallel.tracing.dropout_seed import dropout_seed
from dtransformer.parallel.tracing.shared_blocks import tape_opened_here
from dtransformer.parallel.tracing.tensor_specs import number_of_rows
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use, trained_value
from dtransformer.parallel.zero.gather import current_unsharding, unsharding
from dtransformer.trainers.data import input_symbols
from dtransformer.trainers.expert_loads import EXPERTS
from dtransformer.trainers.layer_states import LayerStates
from dtransformer.trainers.optimizer.phases import with_zeros
from dtransformer.trainers.optimizer.reduce import reduce_sum


class Numbers(typing.NamedTuple):
    """The numbers of a training step, equal on all ranks but for the seed.

    Args:
        counts: float32 [n], what is counted of the global batch before the forward pass; see
            `Objective.counts`.
        loss_scale: float32 scalar that the loss is multiplied with.
        seed: int64 [2], of the dropout masks.
    """

    counts: tf.Tensor
    loss_scale: tf.Tensor
    seed: tf.Tensor


@contextlib.contextmanager
def training_forward(seed: tf.Tensor):
    """Trace the forward pass of a training step.

    Args:
        seed: Int tensor [2], the dropout seed.

    Yields:
        A dict of the auxiliary metrics that layers report.
    """
    with trace.training_step(), dropout_seed(seed), collecting() as metrics:
        yield metrics


class Parts(typing.NamedTuple):
    """Which parts a step has under a layout, besides those on one device.

    Args:
        adds_up: whether other data shards compute rows of the batch, so that sums are reduced.
        has_shares: whether a batch is computed in shares, by data shards or in micro-batches.
        unshards: whether weights are unsharded where they are used.
    """

    adds_up: bool
    has_shares: bool
    unshards: bool

    @classmethod
    def of_layout(cls):
        """Return those of the current layout."""
        config, adds_up = get_parallel_config(), job.data_parallel_group().size > 1
        has_shares = job.data_shard()[1] > 1 or config.micro_batch_num > 1
        return cls(adds_up, has_shares, adds_up and config.optimizer_shard == 3)


@dataclasses.dataclass(frozen=True)
class ForwardStep:
    """The network and what is made of its outputs: all that an engine computes.

    Args:
        network: the `keras.Model` that is trained.
        objective: the `Objective`; None where nothing but outputs is asked for.
        keeps_outputs: whether outputs are wanted, for metrics. They are large.
        states: the `LayerStates` of its layers.
        parts: the `Parts` of a step.
    """

    network: object
    objective: object = None
    keeps_outputs: bool = False
    states: LayerStates = dataclasses.field(default_factory=LayerStates)
    parts: Parts = dataclasses.field(default_factory=Parts.of_layout)

    def counts(self, inputs, labels, sample_weight):
        """Return `Numbers.counts` of a batch, from this rank's share of it."""
        with tf.device("CPU:0"):  # where labels are: a check of them there waits for no device
            own = self.objective.counts(inputs, labels, sample_weight)
        return reduce_sum({"counts": own}, name="counts")["counts"] if self.parts.adds_up else own

    def outputs(self, inputs, training=False, layers=None):
        """Return the network's outputs; what layers set by that is forgotten."""
        return self.outputs_and_states(inputs, training, layers)[0]

    def outputs_and_states(self, inputs, training=False, layers=None):
        """Return the network's outputs, and what `LayerStates.collected` yields for layers."""
        unsharded, collected = contextlib.nullcontext(), contextlib.nullcontext({})
        if self.parts.unshards and current_unsharding() is None:
            unsharded = unsharding("call")
        if self.states.is_used:
            collected = self.states.collected(layers)
        with unsharded, collected as found:
            outputs = self.network(inputs, training=training)
        if outputs is None:
            raise ValueError(
                f"the network {self.network.name!r} returned None: its call has to return a tensor, "
                "or several"
            )
        return outputs, found

    def loss_and_gradients(self, inputs, labels, sample_weight, numbers):
        """Return the gradients of loss · scale, the outputs and this rank's sums.

        Gradients are those of `network.trainable_variables`, as their `trained_value` is.
        """
        weights = self.network.trainable_variables
        check_any_trained(bool(weights))
        values = [trained_value(weight) for weight in weights]
        tape = tf.GradientTape(watch_accessed_variables=False)  # not those that are frozen
        unsharded = unsharding("train") if self.parts.unshards else contextlib.nullcontext()
        with (
            tape,
            unsharded,
            tape_opened_here(),
            training_forward(numbers.seed) as reported,
        ):
            tape.watch(values)
            outputs, found = self.outputs_and_states(inputs, training=True)
            if not self.objective.losses and not self.network.losses:
                raise ValueError(
                    "there is no loss: give compile one, or a layer that calls add_loss"
                )
            batch = inputs, outputs, labels, sample_weight
            sums = self.sums(*batch, numbers.counts, self.network.losses, training=True)
            sums |= self.of_layers(found, inputs, numbers.counts, reported)
            loss = (sums["loss"] + sums["added"]) * numbers.loss_scale
        gradients = tape.gradient(loss, values)
        gradients = with_zeros(weights, gradients, lambda i: _zeros(values[i]))
        return list(map(_dense, gradients, values)), self.kept(outputs), sums

    def outputs_and_sums(self, inputs, labels, sample_weight, counts):
        """Return the outputs, where they are wanted, and this rank's sums."""
        outputs, found = self.outputs_and_states(inputs)
        sums = self.sums(inputs, outputs, labels, sample_weight, counts, self.network.losses)
        return self.kept(outputs), sums | self.of_layers(found, inputs, counts)

    def kept(self, outputs):
        """Return (outputs, their masks by `_compat.masks_of`) for metrics; None where none looks."""
        return (outputs, _compat.masks_of(outputs)) if self.keeps_outputs else None

    def sums(self, inputs, outputs, labels, sample_weight, counts, losses=(), training=False):
        """Return this rank's sums, a dict of float32 scalars: what the logs are made of.

        Those of `Objective.sums`, and `"added"`, see `added`.
        """
        own_is_all = not (self.parts.has_shares if training else self.parts.adds_up)
        sums = self.objective.sums(outputs, labels, sample_weight, counts, own_is_all)
        if "divided" in sums:
            self._check_divided(losses)
        sums["added"] = self.added(losses, inputs, counts, sums.get("divided"))
        return sums

    def added(self, losses, inputs, counts, divided=None):
        """Return this share's part of what layers add to the loss: the mean over rows.

        Regularizers are the same on all ranks and for all micro-batches, whose losses are
        added up; what a mixture of experts adds is a mean over the rows of each.

        Args:
            losses: list of scalars.
            inputs: nested tensors [b, ...].
            counts: as from `counts`, of the global batch.
            divided: of `Objective.sums`, where the loss has it.
        """
        if not losses:
            return tf.zeros([])
        share = self.share(inputs, counts) if divided is None else divided
        # The mean over no rows is no number.
        parts = [tf.math.multiply_no_nan(tf.cast(loss, "float32"), share) for loss in losses]
        return tf.add_n(parts)

    def of_layers(self, found, inputs, counts, reported=types.MappingProxyType({})):
        """Return what layers set and reported, as it adds up over the shares of a step.

        Args:
            found: what `outputs_and_states` returned of states.
            inputs: nested tensors [b, ...].
            counts: as from `counts`, of the global batch.
            reported: dict of auxiliary metrics.
        """
        sums = {f"{EXPERTS}{layer}": value for layer, value in reported.items()}
        return sums | self.states.shares(found, self.share(inputs, counts)) if found else sums

    def share(self, inputs, counts):
        """Return the share of the global batch's rows that `inputs` are."""
        rows = number_of_rows(tf.nest.flatten(inputs)[0])
        return tf.math.divide_no_nan(tf.cast(rows, "float32"), self.objective.rows(counts))

    def _check_divided(self, losses):
        """Refuse a mean over a mask, known after the forward pass, beside means over rows.

        Those of layers that are not this package's are weighed as the loss is, which one warning
        says.

        Raises:
            ValueError: there are both.
        """
        adding = self.states.take_adding()
        if losses and adding and job.is_chief():
            warnings.warn(
                f"{', '.join(adding)}: what layers add to a loss that is a mean over a mask is weighed "
                "by what the mask leaves of a data shard or micro-batch, not by rows: the numbers are "
                "not Keras'; one data shard and micro_batch_num=1 give Keras'",
                stacklevel=2,
            )
        layers = _compat.flat_layers(self.network)
        if losses and any(getattr(layer, "adds_means", False) for layer in layers):
            raise ValueError(
                "a loss that is a mean over a mask and what a mixture of experts adds to it do not "
                "go together over several ranks or micro-batches: use sample weights and "
                "reduction='mean_with_sample_weight' instead of the mask"
            )


def check_any_trained(is_any: bool) -> None:
    """Check that there is a weight to train.

    Raises:
        ValueError: there is none.
    """
    if not is_any:
        raise ValueError("every weight of the network is frozen: there is nothing to train")


class Engine:
    """What runs the forward–backward of this rank's share of a batch.

    On one device its methods are traced into the caller's `tf.function`; on a mesh and in a pipeline
    they run compiled functions of their own, and are called from Python. All ranks of the job call
    the same methods in the same order. Labels and sample weights are nested tensors, or None.

    Attributes:
        takes_micro_batches: whether it divides a batch into micro-batches by itself.
        input_shapes: nested shapes of the inputs that were computed at once in the last
            training step; None where that is not known.
        num_kept: how many such activations are kept at once.
    """

    takes_micro_batches = False
    input_shapes = None
    num_kept = 1

    def build(self, first) -> None:
        """Build this rank's part of the network, once, for batches like a first one.

        Args:
            first: the batch, see `trainers.data.peek`; None where it is not known.
        """

    def forward_backward(self, inputs, labels, sample_weight, numbers):
        """Compute the gradients of loss · scale.

        Returns:
            gradients, a list of tensors, one for each shard that this rank has of each trained
            weight; outputs and masks, see `ForwardStep.kept`, None where they are not wanted or
            not here; and sums, see `ForwardStep.sums`.
        """

    def evaluate(self, inputs, labels, sample_weight, counts):
        """Return outputs and sums, as `forward_backward` does; `counts` as in `Numbers`."""

    def predict(self, inputs):
        """Return the network's outputs, on every rank."""

    def example_outputs(self):
        """Return zeros of the shapes and types of outputs, where they are on other ranks."""

    def collectives(self):
        """Return the list of `Collective`s of a whole step, as it was compiled last."""
        return []


def _dense(gradient, value):
    """Return a gradient of a value, that of rows of a table as one of the full table."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = gradient.values if gradient.dtype.size > 2 else tf.cast(gradient.values, "float32")
    total = tf.math.unsorted_segment_sum(rows, gradient.indices, value.shape[0])
    return tf.cast(total, gradient.dtype)


def _zeros(value):
    """Return a gradient of zeros, which TensorFlow cannot compute beforehand where ranks add it."""
    zeros = tf.zeros_like(value)
    is_added = job.data_shard()[1] > 1 and not trace.is_on_mesh()
    return never_constant(zeros) if is_added and not _compat.is_compiled_by_xla() else zeros


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
