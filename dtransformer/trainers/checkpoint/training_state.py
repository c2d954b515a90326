"""The state of a training run: the tensors it consists of, and what this rank holds of them.

Names do not depend on the layout: `network/PATH` is a weight, without the network's own name;
`optimizer/KIND/PATH` what an optimizer keeps for it, such as `optimizer/momentums/PATH`;
`optimizer/NAME` the optimizer's scalars; `metrics/NUMBER/NAME` sums since the epoch began.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.weights.shard_bounds import Bounds, FlatRange, num_elements
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor, tensors_of
from dtransformer.parallel.weights.sharded_variable import full_bounds, true_shape
from dtransformer.trainers.optimizer.states import optimizer_states

# Names of a network's variables that do not change from process to process.


_SEEDS = "seed_generator"  # Keras' own layers have these, under no layer's path


def names_of(network: keras.Model) -> dict[int, str]:
    """Return the names of a built network's variables, by their `id`."""
    counts, layer_names = collections.Counter(), {network.name: ""}
    for layer in _compat.flat_layers(network, include_self=False):
        if layer.path is not None and layer.path not in layer_names:
            outer, _, name = layer.path.rpartition("/")
            default = _compat.to_snake_case(type(layer).__name__)
            layer_names[layer.path] = _renumbered(name, default, outer, counts)
    names = {}
    for variable in network.variables:
        first, _, _ = variable.path.partition("/")
        if first not in layer_names:
            layer_names[first] = _renumbered(first, _SEEDS, "", counts)
        names[id(variable)] = _name(variable.path, layer_names)
    return names


def _renumbered(name, default, outer, counts):
    """Return a name; where Keras made it of the default name, with its number in the outer layer."""
    if not re.fullmatch(rf"{default}(_\d+)?", name):
        return name
    counts[outer, default] += 1
    number = counts[outer, default] - 1
    return f"{default}_{number}" if number else default


def _name(path, layer_names):
    """Return a path with the layers along it named as in `layer_names`."""
    words, along = [], ""
    for word in path.split("/"):
        along = f"{along}/{word}" if along else word
        words.append(layer_names.get(along, word))
    return "/".join(word for word in words if word)


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

    def tensors(self) -> list[ShardedTensor]:
        """Return all tensors of the state.

        Raises:
            ValueError: two variables have the same name.
        """
        names = names_of(self.network)
        tensors = network_tensors(self.network, names)
        for name, index, variable in optimizer_states(self.optimizer, len(self.optimizer_shards)):
            if index is None:
                tensors.append(_replicated(f"{OPTIMIZER}{name}", variable))
                continue
            weight, bounds, flat_range = self.optimizer_shards[index]
            name = f"{OPTIMIZER}{name}/{names[id(weight)]}"
            start, stop = flat_range or (0, num_elements(bounds))
            if math.prod(variable.shape) == stop - start:
                place = variable, bounds, flat_range
                tensors.append(ShardedTensor.of(name, true_shape(weight), *place))
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


def network_tensors(
    network: keras.Model, names: Mapping[int, str] | None = None
) -> list[ShardedTensor]:
    """Return the tensors of a built network; `names` are those of `names_of`."""
    names = names_of(network) if names is None else names
    return [
        tensor
        for variable in network.variables
        for tensor in tensors_of(NETWORK + names[id(variable)], variable)
    ]


def _replicated(name, variable):
    shape = tuple(variable.shape)
    return ShardedTensor.of(name, shape, variable, full_bounds(shape))


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


# Differences between the state of all ranks and what a file holds.


Shape = tuple[int, ...]


def differences(
    tensors: Sequence[ShardedTensor], in_file: Mapping[str, Shape]
) -> tuple[list[str], list[str], dict[str, tuple[Shape, Shape]]]:
    """Compare the names and shapes of all ranks' tensors with those of a file.

    All ranks have to call.

    Args:
        tensors: this rank's.
        in_file: the names of the file's tensors, and their shapes.

    Returns:
        The sorted names that the file lacks; the sorted names that only the file has; and the names
        whose shapes differ, with our shape and the file's.
    """
    own = {tensor.name: list(tensor.shape) for tensor in tensors}
    ours = {}
    for shapes in all_gather_json(own, "checkpoint/names"):
        ours.update({name: tuple(shape) for name, shape in shapes.items()})
    other_shapes = {
        name: (shape, in_file[name])
        for name, shape in ours.items()
        if in_file.get(name, shape) != shape
    }
    return sorted(ours.keys() - in_file.keys()), sorted(in_file.keys() - ours.keys()), other_shapes


_MAX_NAMES_TOLD = 10


def misfit(
    missing: Sequence[str],
    unexpected: Sequence[str],
    other_shapes: Mapping[str, tuple[Shape, Shape]],
) -> str:
    """Return what `differences` has found as a clause about the file; "" where it is nothing."""
    shapes = [f"{name} {ours}, there {its}" for name, (ours, its) in sorted(other_shapes.items())]
    kinds = {"it lacks": missing, "it also has": unexpected, "shapes differ": shapes}
    return "; ".join(
        f"{kind} {len(names)}: {_some(names)}" for kind, names in kinds.items() if names
    )


def _some(names):
    more = len(names) - _MAX_NAMES_TOLD
    return ", ".join(names[:_MAX_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
