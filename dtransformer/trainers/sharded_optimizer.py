"""The update plane: what happens once a step on the parts of the weights that this rank has.

It knows nothing of layers: gradients come in, weights have changed when it is done.
"""

import math

import keras
import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.config import get_parallel_config
from dtransformer.parallel.dtensor.variable import share_of
from dtransformer.parallel.sharded_variable import own_shards, places_of
from dtransformer.parallel.zero.flat_parameter import FlatParameter
from dtransformer.parallel.zero.partition import Partition
from dtransformer.parallel.zero.variables import (
    FlatShardedVariable,
    FullyShardedVariable,
    MasterShardedVariable,
)
from dtransformer.trainers import gradients as grads
from dtransformer.trainers.loss_scale import LossScale

# Entries of the weights that a function of XLA's updates, but for the last weight's.
_ENTRIES_AT_ONCE = 2**22


class ShardedOptimizer:
    """Reduces gradients and updates weights, under the current config.

    Args:
        optimizer: a Keras optimizer; it is built, if it is not yet.
        weights: list of the Keras variables that are trained.
        group_ids: for each weight the group that its gradient is reduced with, or None.
        compiles: whether the update is compiled with XLA.
        copies: those of the weights that another stage has, too, and counts in the norm of
            all gradients.

    Attributes:
        plan: the `ShardPlan`.
        loss_scale: the `LossScale`.
        gradient_bytes: bytes of the gradients that this rank keeps until it has them all:
            whole ones, and from level 2 on their slices; None before the first step.

    Raises:
        ValueError: the optimizer cannot update parts of weights, and has to.
    """

    def __init__(self, optimizer, weights, group_ids, compiles, copies=()):
        self.loss_scale = LossScale(optimizer)
        self.plan, self.gradient_bytes = partition_of(weights), None
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._group = job.data_parallel_group()
        self._weights = weights
        self._shards, self._owners, self._shares = [], [], []
        for number, weight in enumerate(weights):
            parts = own_shards([weight])
            self._shards += parts
            self._owners += [number] * len(parts)
            self._shares += [share_of(weight)] * len(parts)
        self.is_sliced = [row.num_slices > 1 for row in self.plan.rows]
        # Those that are stored as slices: their gradients come as slices, too.
        owners = [weights[owner] for owner in self._owners]
        self._is_stored = [isinstance(owner, FullyShardedVariable) for owner in owners]
        self._units = [
            FlatParameter(shard, row.slice_entries)
            if row.num_slices > 1 and not isinstance(owner, FlatShardedVariable)
            else shard
            for shard, row, owner in zip(self._shards, self.plan.rows, owners)
        ]
        # What is whole of those whose slices are updated: variables that slices are gathered to.
        self._wholes = {
            i: owner.copy if isinstance(owner, MasterShardedVariable) else self._shards[i].value
            for i, owner in enumerate(owners)
            if isinstance(owner, MasterShardedVariable) or isinstance(self._units[i], FlatParameter)
        }
        self._flat = [i for i, unit in enumerate(self._units) if isinstance(unit, FlatParameter)]
        self._clips = any(self.is_sliced) or any(share is not None for share in self._shares)
        self._clips = self._clips or job.stage()[1] > 1
        is_copy = {id(weight) for weight in copies}
        self._counted = [i for i, owner in enumerate(owners) if id(owner) not in is_copy]
        if any(self.is_sliced):
            check_elementwise(self._optimizer)
            _check_slices(self._optimizer)
        if not optimizer.built:
            optimizer.build(self._units)
        if self._clips:
            leave_clipping(self._optimizer)
        groups = grads.fusion_groups(
            [group_ids[owner] for owner in self._owners],
            get_parallel_config().gradient_aggregation_group,
        )
        self._groups = [[i for i in group if not self._is_stored[i]] for group in groups]
        self._compute = self._compiled() if compiles else self._update_some

    def updated_parts(self):
        """Return (weight, box, range) of what the optimizer's states belong to, in its order.

        See `PartedVariable.places` for boxes and ranges.
        """
        found = [(weight, *place) for weight in self._weights for place in places_of(weight)]
        for i in self._flat:
            weight, box, _ = found[i]
            found[i] = weight, box, flat_shards.own_range(self._units[i].shape[0], self._group)
        return found

    def reduce(self, gradients):
        """Return the sums of the gradients over the data group: slices where so planned."""
        dtype = get_parallel_config().gradient_dtype
        dtype = None if dtype == "float32" else dtype
        shapes = [self._wholes.get(i, shard).shape for i, shard in enumerate(self._shards)]
        for gradient, shape in zip(gradients, shapes):
            if not isinstance(gradient, tf.IndexedSlices):
                gradient.set_shape(shape)  # XLA's results have none
        kept = gradients
        gradients = [
            gradient if stored else grads.cast(gradient, unit.dtype)
            for gradient, unit, stored in zip(gradients, self._units, self._is_stored)
        ]
        reduced = grads.reduce(gradients, self._groups, self.is_sliced, dtype)
        if self.plan.level >= 2:
            shapes, kept = [gradient.shape for gradient in reduced], reduced
        self.gradient_bytes = sum(
            math.prod(shape) * gradient.dtype.size for shape, gradient in zip(shapes, kept)
        )
        return reduced

    def apply(self, gradients):
        """Update the weights with what `reduce` returned; return the norm of all gradients."""
        squares = grads.square_norms(gradients, self.is_sliced, self._shares)
        counted = [squares[i] for i in self._counted]
        norm = tf.sqrt(grads.sum_over_stages(tf.add_n([tf.zeros([]), *counted])))
        scale = self.loss_scale.value()
        norm /= scale
        if self.loss_scale.is_used:
            gradients = grads.scale(gradients, 1 / scale)
            squares = [square / scale**2 for square in squares]
        if self._clips:
            gradients = grads.clip_as_whole(self._optimizer, gradients, squares, self._owners, norm)
        # Weight decay needs no gradient: at the end of the data, where the step fails for want
        # of a batch, it would go on without one.
        with tf.control_dependencies([norm]):
            self.loss_scale.run(norm, lambda: self._update(gradients))
        return norm

    def _update(self, gradients):
        old = [
            flat_shards.own_shard(tf.convert_to_tensor(self._shards[i].value), self._group)
            for i in self._flat
        ]
        new = dict(zip(self._flat, self._compute(gradients, old)))
        for i, whole in self._wholes.items():
            if i not in new:  # the master weights have changed
                new[i] = tf.cast(self._units[i].value, whole.dtype)
        for number, positions in enumerate(self._groups):
            messages = {}  # of one type each
            for i in positions:
                if i in new:
                    messages.setdefault(new[i].dtype.name, []).append(i)
            for kind, together in messages.items():
                shapes = [self._wholes[i].shape for i in together]
                name = f"weights_{number}_{kind}"
                parts = [new[i] for i in together]
                whole = flat_shards.all_gather(parts, shapes, self._group, name)
                for i, value in zip(together, whole):
                    self._wholes[i].assign(value)

    def _update_some(self, gradients, values, numbers=None):
        """Let the optimizer update some of the units; return the new values of the slices."""
        units = self._units if numbers is None else [self._units[number] for number in numbers]
        flat = [unit for unit in units if isinstance(unit, FlatParameter)]
        for unit, value in zip(flat, values, strict=True):
            unit.hold(value)
        self._optimizer.apply(gradients, units)
        return [unit.release() for unit in flat]

    def _compiled(self):
        """Return the update, compiled with XLA.

        A function of XLA's runs on one device, and has the old and the new values of all that
        it updates in memory. So there is one for each device and for every few weights.
        """
        on_device = {}
        for number in range(len(self._units)):
            parts = on_device.setdefault(self._shards[number].value.device, [[]])
            if sum(math.prod(self._units[i].shape) for i in parts[-1]) > _ENTRIES_AT_ONCE:
                parts.append([])
            parts[-1].append(number)
        if [len(parts) for parts in on_device.values()] == [1]:
            return tf.function(self._update_some, jit_compile=True)
        if not _updates_shards_alone(self._optimizer):
            return self._update_some
        scalars = [self._optimizer.iterations, self._optimizer._learning_rate]
        scalars = [scalar for scalar in scalars if isinstance(scalar, keras.Variable)]

        def compiled(numbers):
            def update(gradients, values, scalar_values):
                # The scalars lie on one device; each part counts the step for itself.
                with keras.StatelessScope(list(zip(scalars, scalar_values))):
                    new = self._update_some(gradients, values, numbers)
                return new, tf.zeros([])  # what the next part waits for

            return tf.function(update, jit_compile=True)

        functions = {
            device: [(numbers, compiled(numbers)) for numbers in parts]
            for device, parts in on_device.items()
        }

        def update(gradients, values):
            given = dict(zip(self._flat, values, strict=True))
            scalar_values = [tf.identity(scalar.value) for scalar in scalars]
            new = {}
            for device, parts in functions.items():
                done = []
                for numbers, function in parts:
                    own = [number for number in numbers if number in given]
                    with tf.device(device), tf.control_dependencies(done):
                        results, done = function(
                            [gradients[number] for number in numbers],
                            [given[number] for number in own],
                            scalar_values,
                        )
                    done = [done]
                    new.update(zip(own, results))
            self._optimizer.iterations.assign_add(1)
            return [new[number] for number in given]

        return update


def partition_of(weights):
    """Return the `ShardPlan` of a list of weights under the current config."""
    described = [
        (weight.path, part.shape, tf.as_dtype(part.dtype).size, weight.constraint is not None)
        for weight in weights
        for part in ([weight] if isinstance(weight, FlatShardedVariable) else own_shards([weight]))
    ]
    return Partition.of(described, get_parallel_config(), job.data_parallel_group().size)


def leave_clipping(optimizer):
    """Let a Keras optimizer clip no gradients, which are slices: `clip_as_whole` did.

    Raises:
        ValueError: the optimizer is to clip sums of several steps' gradients.
    """
    clips = optimizer.clipvalue or optimizer.clipnorm or optimizer.global_clipnorm
    if clips and optimizer.gradient_accumulation_steps:
        raise ValueError(
            f"{type(optimizer).__name__} is to accumulate gradients "
            f"(gradient_accumulation_steps={optimizer.gradient_accumulation_steps}) and to clip "
            "them, which does not work where weights are cut: use micro_batch_num instead"
        )
    optimizer._clip_gradients = lambda gradients: gradients


def _updates_shards_alone(optimizer):
    """Return whether all that an update changes belongs to one weight, but for the step."""
    scalars = [variable for variable in optimizer.variables if variable.shape == ()]
    known = [optimizer.iterations, getattr(optimizer, "_learning_rate", None)]
    others = [s for s in scalars if not any(s is k for k in known)]
    return not others and not optimizer.use_ema and not optimizer.gradient_accumulation_steps


# What Keras' optimizers compute from all entries of a weight together.
_NOT_ELEMENTWISE = ("Adafactor", "Lamb", "Muon")


def check_elementwise(optimizer):
    """Check that an optimizer can update the slices of a weight one by one.

    Raises:
        ValueError: names the optimizer, and others that can.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _NOT_ELEMENTWISE:
            raise ValueError(
                f"{type(optimizer).__name__} computes with whole weights, and model_parallel or "
                "optimizer_shard cuts them: use an optimizer that updates each entry by itself, "
                "such as AdamW, Adam, Lion, SGD, RMSprop or Nadam"
            )


def _check_slices(optimizer):
    """Refuse what an optimizer keeps of whole weights, or does not do in every step."""
    for name in ("use_ema", "gradient_accumulation_steps"):
        if getattr(optimizer, name):
            raise ValueError(
                f"{type(optimizer).__name__} has {name}={getattr(optimizer, name)}, which does not "
                "work where optimizer_shard cuts weights"
                + ("" if name == "use_ema" else ": use micro_batch_num instead")
            )
