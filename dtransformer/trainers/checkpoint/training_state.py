"""State of a training run: its tensors, and this rank's shards of them.

Names of tensors do not depend on the layout:

- `network/PATH`: a weight. The path excludes the network's name.
- `optimizer/KIND/PATH`: an optimizer state of the weight, such as `optimizer/momentums/PATH`.
- `optimizer/NAME`: a scalar of the optimizer.
- `metrics/INDEX/NAME`: a sum since the epoch began.
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
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor, get_sharded_tensors
from dtransformer.parallel.weights.sharded_variable import full_bounds, true_shape
from dtransformer.trainers.optimizer.guard import StepGuard
from dtransformer.trainers.optimizer.states import optimizer_states

# Names of a network's variables that are identical in all processes.


_SEED_PATH = "seed_generator"  # Keras' seed generators have this path, without a layer.


def variable_names(network: keras.Model) -> dict[int, str]:
    """Return a dict that maps the `id` of each variable of a built network to its name."""
    counts = collections.Counter()
    layer_names = {network.name: ""}
    for layer in _compat.flat_layers(network, include_self=False):
        if layer.path is not None and layer.path not in layer_names:
            outer, _, name = layer.path.rpartition("/")
            default = _compat.to_snake_case(type(layer).__name__)
            layer_names[layer.path] = _renumbered(name, default, outer, counts)
    names = {}
    for variable in network.variables:
        first, _, _ = variable.path.partition("/")
        if first not in layer_names:
            layer_names[first] = _renumbered(first, _SEED_PATH, "", counts)
        names[id(variable)] = _name(variable.path, layer_names)
    return names


def _renumbered(name, default, outer, counts):
    """Replace the counter in a default layer name by its index in the outer layer.

    Keras counts all layers of a class in the process. Custom names are returned unchanged.
    """
    if not re.fullmatch(rf"{default}(_\d+)?", name):
        return name
    counts[outer, default] += 1
    index = counts[outer, default] - 1
    return f"{default}_{index}" if index else default


def _name(path, layer_names):
    """Replace the layers' names along a path as in `layer_names`."""
    names = []
    prefix = ""
    for part in path.split("/"):
        prefix = f"{prefix}/{part}" if prefix else part
        names.append(layer_names.get(prefix, part))
    return "/".join(name for name in names if name)


NETWORK = "network/"
OPTIMIZER = "optimizer/"
METRICS = "metrics/"
GUARD = "guard/"


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """State that checkpoints save and restore.

    Args:
        network: A built `keras.Model`.
        optimizer: A built Keras optimizer.
        optimizer_shards: Weight shards that the optimizer updates on this rank, in the order of its
            states. Tuples of the weight, the shard's bounds, and the range of the flattened shard,
            `None` for the full shard.
        skipped_steps: Int64 scalar variable, the number of skipped steps.
        metrics: Keras metrics that sum over an epoch.
        guard: `StepGuard`, or `None`.
    """

    network: keras.Model
    optimizer: keras.optimizers.Optimizer
    optimizer_shards: Sequence[tuple[keras.Variable, Bounds, FlatRange | None]]
    skipped_steps: tf.Variable
    metrics: Sequence[keras.metrics.Metric]
    guard: StepGuard | None = None

    def tensors(self) -> list[ShardedTensor]:
        """Return all tensors of the state.

        Raises:
            ValueError: If two variables have the same name.
        """
        names = variable_names(self.network)
        tensors = network_tensors(self.network, names)
        for name, index, variable in optimizer_states(self.optimizer, len(self.optimizer_shards)):
            if index is None:
                tensors.append(_replicated(f"{OPTIMIZER}{name}", variable))
                continue
            weight, bounds, flat_range = self.optimizer_shards[index]
            name = f"{OPTIMIZER}{name}/{names[id(weight)]}"
            start, stop = flat_range or (0, num_elements(bounds))
            if math.prod(variable.shape) == stop - start:
                shape = true_shape(weight)
                tensors.append(
                    ShardedTensor.from_variable(name, shape, variable, bounds, flat_range)
                )
            else:
                # The state is not elementwise, for example Adafactor's sums over rows.
                tensors.append(_replicated(name, variable))
        tensors.append(_replicated(f"{OPTIMIZER}skipped_steps", self.skipped_steps))
        _check_names(tensors, self.network)
        return tensors + self.metric_tensors() + self.guard_tensors()

    def metric_tensors(self) -> list[ShardedTensor]:
        """Return the tensors of the metrics' sums since the epoch began."""
        variables = [variable for metric in self.metrics for variable in metric.variables]
        return [
            _replicated(f"{METRICS}{i}/{variable.name}", variable)
            for i, variable in enumerate(variables)
        ]

    def guard_tensors(self) -> list[ShardedTensor]:
        """Return the tensors of the guard, which a checkpoint may lack."""
        variables = {} if self.guard is None else self.guard.variables
        return [_replicated(f"{GUARD}{name}", variable) for name, variable in variables.items()]


def network_tensors(
    network: keras.Model, names: Mapping[int, str] | None = None
) -> list[ShardedTensor]:
    """Return the tensors of a built network.

    Args:
        network: The `keras.Model`.
        names: Result of `variable_names(network)`. Computed by default.
    """
    names = variable_names(network) if names is None else names
    return [
        tensor
        for variable in network.variables
        for tensor in get_sharded_tensors(NETWORK + names[id(variable)], variable)
    ]


def _replicated(name, variable):
    shape = tuple(variable.shape)
    return ShardedTensor.from_variable(name, shape, variable, full_bounds(shape))


def _check_names(tensors, network):
    variables = {}
    shapes = {}
    for tensor in tensors:
        if not tensor.is_saved:
            continue
        is_unique = all(
            variables.setdefault((tensor.name, shard.bounds), tensor.variable) is tensor.variable
            for shard in tensor.shards
        )
        if not is_unique or shapes.setdefault(tensor.name, tensor.shape) != tensor.shape:
            raise ValueError(
                f"Two variables of {network.name} have the name {tensor.name}, which must be "
                "unique in a checkpoint. Rename one of their layers."
            )


# Differences between the tensors of all ranks and a file.


Shape = tuple[int, ...]


def find_differences(
    tensors: Sequence[ShardedTensor], in_file: Mapping[str, Shape]
) -> tuple[list[str], list[str], dict[str, tuple[Shape, Shape]]]:
    """Compare the names and shapes of all ranks' tensors with a file. All ranks must call it.

    Args:
        tensors: This rank's tensors.
        in_file: Dict that maps the names of the file's tensors to their shapes.

    Returns:
        A `(missing, unexpected, other_shapes)` tuple: sorted names that only the ranks have, sorted
        names that only the file has, and a dict of names with different shapes, which maps to the
        ranks' shape and the file's shape.
    """
    local_shapes = {tensor.name: list(tensor.shape) for tensor in tensors}
    shapes = {}
    for rank_shapes in all_gather_json(local_shapes, "checkpoint/names"):
        shapes.update({name: tuple(shape) for name, shape in rank_shapes.items()})
    other_shapes = {
        name: (shape, in_file[name])
        for name, shape in shapes.items()
        if in_file.get(name, shape) != shape
    }
    missing = sorted(shapes.keys() - in_file.keys())
    unexpected = sorted(in_file.keys() - shapes.keys())
    return missing, unexpected, other_shapes


_MAX_LISTED = 10


def describe_differences(
    missing: Sequence[str],
    unexpected: Sequence[str],
    other_shapes: Mapping[str, tuple[Shape, Shape]],
) -> str:
    """Return the result of `find_differences` as text, or `""` if nothing differs."""
    shapes = [
        f"{name} {shape}, in the file {file_shape}"
        for name, (shape, file_shape) in sorted(other_shapes.items())
    ]
    kinds = {"it lacks": missing, "it also has": unexpected, "shapes differ": shapes}
    return "; ".join(
        f"{kind} {len(names)}: {_list_names(names)}" for kind, names in kinds.items() if names
    )


def _list_names(names):
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
