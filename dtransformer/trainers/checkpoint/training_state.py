"""The state of a training run: the tensors it consists of, and what this rank holds of them.

Names do not depend on the layout: `network/PATH` is a weight, without the network's own name;
`optimizer/KIND/PATH` what an optimizer keeps for it, such as `optimizer/momentums/PATH`;
`optimizer/NAME` the optimizer's scalars; `metrics/NUMBER/NAME` sums since the epoch began.
"""

import dataclasses
import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from dtransformer.parallel.weights.shard_bounds import Bounds, FlatRange, num_elements
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor, tensors_of
from dtransformer.parallel.weights.sharded_variable import full_bounds
from dtransformer.trainers.checkpoint.names import names_of
from dtransformer.trainers.optimizer.apply import optimizer_states

NETWORK, OPTIMIZER, METRICS = "network/", "optimizer/", "metrics/"


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """What checkpoints save and restore; a trainer hands it over.

    Args:
        network: a built `keras.Model`.
        optimizer: a built Keras optimizer.
        optimizer_shards: what the optimizer updates on this rank, in the order of its states:
            for each shard the weight, the bounds of the shard in it, and the range of the
            flattened rectangle that it is, None where it is all of it.
        skipped_steps: variable with the number of steps that were skipped, int64 scalar.
        metrics: the Keras metrics that sum over an epoch.
    """

    network: keras.Model
    optimizer: keras.optimizers.Optimizer
    optimizer_shards: Sequence[tuple[keras.Variable, Bounds, FlatRange | None]]
    skipped_steps: tf.Variable
    metrics: Sequence[keras.metrics.Metric]

    @property
    def step(self) -> int:
        """The number of steps that the optimizer has done."""
        return int(self.optimizer.iterations)

    def tensors(self) -> list[ShardedTensor]:
        """Return all tensors of the state.

        Raises:
            ValueError: two variables have the same name.
        """
        names = names_of(self.network)
        tensors = _tensors_of_network(self.network, names)
        for name, index, variable in optimizer_states(self.optimizer, len(self.optimizer_shards)):
            if index is None:
                tensors.append(_replicated(f"{OPTIMIZER}{name}", variable))
                continue
            weight, bounds, flat_range = self.optimizer_shards[index]
            name = f"{OPTIMIZER}{name}/{names[id(weight)]}"
            start, stop = flat_range or (0, num_elements(bounds))
            if math.prod(variable.shape) == stop - start:
                shape = _shape_without_padding(weight)
                tensors.append(ShardedTensor.of(name, shape, variable, bounds, flat_range))
            else:  # not a number for each element, such as Adafactor's sums over rows
                tensors.append(_replicated(name, variable))
        tensors.append(_replicated(f"{OPTIMIZER}skipped_steps", self.skipped_steps))
        _check_names(tensors, self.network)
        return tensors + self.metric_tensors()

    def metric_tensors(self) -> list[ShardedTensor]:
        """Return the sums since the epoch began."""
        variables = [variable for metric in self.metrics for variable in metric.variables]
        return [
            _replicated(f"{METRICS}{number}/{variable.name}", variable)
            for number, variable in enumerate(variables)
        ]


def network_tensors(network: keras.Model) -> list[ShardedTensor]:
    """Return the tensors of a built network."""
    return _tensors_of_network(network, names_of(network))


def _tensors_of_network(network, names):
    return [
        tensor
        for variable in network.variables
        for tensor in tensors_of(NETWORK + names[id(variable)], variable)
    ]


def _replicated(name, variable):
    shape = tuple(variable.shape)
    return ShardedTensor.of(name, shape, variable, full_bounds(shape))


def _shape_without_padding(variable):
    return tuple(getattr(variable, "true_shape", variable.shape))


def _check_names(tensors, network):
    variables, shapes = {}, {}
    for tensor in (tensor for tensor in tensors if tensor.is_saved):
        own = [
            variables.setdefault((tensor.name, shard.bounds), tensor.variable) is tensor.variable
            for shard in tensor.shards
        ]
        if not all(own) or shapes.setdefault(tensor.name, tensor.shape) != tensor.shape:
            raise ValueError(
                f"two variables of {network.name} have the name {tensor.name}, and a checkpoint "
                "could not tell them apart: give their layers different names"
            )
