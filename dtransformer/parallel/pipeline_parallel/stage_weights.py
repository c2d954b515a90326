"""Weights of layers distributed over stages: building, sharing, saving and loading."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.objects import broadcast_arrays
from dtransformer.parallel.pipeline_parallel.dataflow import Dataflow
from dtransformer.parallel.pipeline_parallel.stage_assignment import (
    get_stages,
    is_elsewhere,
    is_here,
    placed_layers,
    shared_layers,
)
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import get_local_shards


def built_on_its_stage(build: Callable) -> Callable:
    """Return a layer's method, such as `build`, that adds weights only on the layer's stage.

    Other stages keep the shapes of these weights.
    """

    @functools.wraps(build)
    def build_here(layer, *args, **kwargs):
        if not is_elsewhere(layer) and not left_weights(layer):
            build(layer, *args, **kwargs)
        else:
            with keras.StatelessScope(initialize_variables=False):
                build(layer, *args, **kwargs)
            leave_to_others(layer)

    return build_here


def leave_other_stages(network: keras.Model) -> None:
    """Keep only the shapes of weights that only other stages store.

    A layer inside of two placed layers is kept if one of them is on this stage.
    """
    layers = placed_layers(network)
    local = [inner for layer in layers if is_here(layer) for inner in _compat.flat_layers(layer)]
    for layer in layers:
        if is_elsewhere(layer):
            leave_to_others(layer, skipped=local)


def leave_to_others(layer: keras.layers.Layer, skipped: Sequence[keras.layers.Layer] = ()) -> None:
    """Keep only the shapes of a layer's weights, because another stage stores them.

    Args:
        layer: The layer.
        skipped: Sequence of inner layers that keep their weights. Defaults to `()`.
    """
    skipped_ids = {id(inner) for inner in skipped}
    for inner in _compat.flat_layers(layer):
        if id(inner) in skipped_ids:
            continue
        local = _compat.direct_variables(inner)
        object.__setattr__(inner, "left_variables", [*left_weights(inner), *local])
        for variable in local:
            _compat.drop_value(inner, variable, functools.partial(_absent_value, variable.path))
        # Loading skips these layers.
        object.__setattr__(inner, "load_own_variables", lambda store: None)
        object.__setattr__(inner, "save_own_variables", functools.partial(_refuse_to_save, inner))


def left_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return the weights of a layer, without inner layers, that only other stages store."""
    return getattr(layer, "left_variables", [])


def get_direct_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return a layer's weights without inner layers. Weights of other stages only have a shape."""
    return left_weights(layer) or _compat.direct_variables(layer)


def forget_weight(layer: keras.layers.Layer, variable: keras.Variable) -> None:
    """Remove a weight from a layer, on the layer's stage and on others."""
    left = left_weights(layer)
    left[:] = [weight for weight in left if weight is not variable]
    _compat.forget_weight(layer, variable)


def _build_copy(layer):
    """Build a layer with weights after `leave_to_others` removed them."""
    for inner in _compat.flat_layers(layer):
        for name in ("left_variables", "load_own_variables", "save_own_variables"):
            vars(inner).pop(name, None)
    _compat.unlock_layer(layer)
    layer.build((None, None))


def _refuse_to_save(layer, store):
    raise RuntimeError(
        f"Another stage of the pipeline has the weights of {layer.path}. Save the trainer on all "
        "ranks, whose file contains the weights of every stage."
    )


def _absent_value(path, shape, dtype=None):
    """Return zeros in symbolic scopes, because another stage has the weight's value.

    Raises:
        RuntimeError: If the value is read.
    """
    if not _compat.in_symbolic_scope():
        raise RuntimeError(
            f"Another stage of the pipeline has the weight {path}, which can only be read in a call "
            "of its layer."
        )
    return tf.zeros(shape, dtype)


def share_weights(network: keras.Model, inputs) -> Dataflow | None:
    """Find the weights that stages share, and build the copies of this rank.

    Args:
        network: Built `keras.Model`.
        inputs: Nested tensors or specs of static shapes for a batch.

    Returns:
        The `Dataflow` of the batch, or `None` if there is a single model chunk.

    Raises:
        ValueError: If `Dataflow.from_network` raises one.
    """
    if job.placement().num_chunks == 1:
        return None
    dataflow = Dataflow.from_network(network, inputs, job.placement())
    mark_copies(network, dataflow)
    build_copies(network)
    return dataflow


def mark_copies(network: keras.Model, dataflow: Dataflow) -> None:
    """Set the attribute `copied_to` of a network's placed layers."""
    for layer in placed_layers(network):
        layer.copy_chunks = dataflow.get_copy_chunks(layer)


def build_copies(network: keras.Model) -> None:
    """Build this rank's copies of layers that were built on another stage only."""
    for _, layer in shared_layers(network):
        if is_here(layer) and not layer.weights:
            _build_copy(layer)


@contextlib.contextmanager
def full_network(network: keras.Model) -> Iterator[None]:
    """Context manager that lets rank 0 save the layers of all stages with Keras.

    All ranks must enter it. Rank 0 receives the weights of other stages layer by layer.
    """
    with contextlib.ExitStack() as stack:
        for layer in placed_layers(network) if job.stage()[1] > 1 else []:
            owner = get_stages(layer, job.placement())[0]
            if not owner:
                continue  # Rank 0 stores the first stage's weights.
            for inner in _compat.flat_layers(layer):
                save = functools.partial(_copy_into, _broadcast_saved(inner, owner))
                if job.is_chief():
                    stack.enter_context(_compat.patched(inner, save_own_variables=save))
        yield


def all_weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """Return a layer's weights in Keras' order. Weights of other stages only have a shape."""
    weights = [*get_direct_weights(layer)]
    for inner in _compat.flat_layers(layer, include_self=False, recursive=False):
        weights += all_weights(inner)
    return list({id(weight): weight for weight in weights}.values())


def count_params(network: keras.Model) -> int:
    """Return the number of elements of the weights of all stages."""
    return sum(math.prod(weight.shape) for weight in all_weights(network))


def get_weights(network: keras.Model) -> list[np.ndarray]:
    """Return the values of all stages' weights in Keras' order; all ranks must call.

    Raises:
        RuntimeError: If a layer has a different number of weights on its stage and on this one.
    """
    values = {}
    group = job.pipeline_group()
    for layer in placed_layers(network):
        owner = get_stages(layer, job.placement())[0]
        weights = all_weights(layer)
        local = {}
        if job.stage()[0] == owner:
            local = {str(i): np.asarray(weight.numpy()) for i, weight in enumerate(weights)}
        sent = broadcast_arrays(local, group.ranks[owner], group, f"weights_{layer.path}")
        if len(sent) != len(weights):
            raise RuntimeError(
                f"{layer.path} has {len(sent)} weights on its stage of the pipeline, but "
                f"{len(weights)} on this one. Add and remove weights on all ranks."
            )
        values |= {id(weight): sent[str(i)] for i, weight in enumerate(weights)}
    weights = all_weights(network)
    return [values[id(w)] if id(w) in values else np.asarray(w.numpy()) for w in weights]


def set_weights(network: keras.Model, values: Sequence[np.ndarray]) -> None:
    """Set the weights of this stage to their values in the list of all stages' weights.

    Args:
        network: A `keras.Model`.
        values: List of arrays, as `get_weights` returns it.

    Raises:
        ValueError: If the number of arrays or one of their shapes is different.
    """
    weights = all_weights(network)
    local_ids = {id(weight) for weight in network.weights}
    if [tuple(weight.shape) for weight in weights] != list(map(np.shape, values)):
        raise ValueError(
            f"`set_weights` received {len(values)} arrays for the {len(weights)} weights on all "
            f"stages of {network.name}, or arrays of other shapes. Pass the list from `get_weights`."
        )
    for weight, value in zip(weights, values):
        if id(weight) in local_ids:
            weight.assign(value)


def _broadcast_saved(layer, owner):
    """Return the values that a stage's layer would save, on every stage."""
    values = {}
    group = job.pipeline_group()
    if job.stage()[0] == owner:
        layer.save_own_variables(values)  # Keras layers store variables.
        values = {name: keras.ops.convert_to_numpy(value) for name, value in values.items()}
    return broadcast_arrays(values, group.ranks[owner], group, f"saved_{layer.path}")


def _copy_into(values, store):
    for name, value in values.items():
        store[name] = value


def _broadcast_values(layer, root, group):
    """Copy the values of a layer from its stage to the other stages that store them.

    The random values of a layer of another library may differ between ranks.
    """
    for variable in layer.variables:
        for i, shard in enumerate(get_local_shards([variable])):
            name = f"copied_value_{variable.path}_{i}"
            shard.assign(transport.broadcast(shard.value, root, group, name))


# Gradients of weights on several stages are summed.


class SharedGradients:
    """Weights that this rank's stage shares with other stages.

    Every rank of the job must create one at the same time.

    Args:
        network: `keras.Model` whose shared weights are built.
    """

    def __init__(self, network):
        indices = {id(w): i for i, w in enumerate(network.trainable_variables)}
        pipelines = dict.fromkeys(job.topology().pipeline_group(r) for r in range(job.size()))
        self._shared = []  # Tuples of the index and path of a weight, and its group.
        self.summed = []  # Tuples of path, group size, shape and dtype of the sums of a step.
        for stages, layer in shared_layers(network):
            for ranks in pipelines:
                group = job.agreed_group(sorted(ranks[stage] for stage in stages))
                if group.index is not None:
                    weights = [w for w in layer.variables if id(w) in indices]
                    self._shared += [(indices[id(w)], w.path, group) for w in weights]
                    _broadcast_values(layer, group.ranks.index(ranks[stages[0]]), group)

    def add_up(self, gradients: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Sum the gradients of shared weights over the stages and return all gradients.

        Args:
            gradients: List with the gradient shards of each trained weight, a list of tensors.
        """
        gradients = list(gradients)
        if not self.summed:
            for i, path, group in self._shared:
                for shard in gradients[i]:
                    self.summed.append((path, group.size, tuple(shard.shape), shard.dtype.name))
        for i, path, group in self._shared:
            gradients[i] = [
                transport.all_reduce(shard, "Sum", group, f"copies_{path}_{n}")
                for n, shard in enumerate(gradients[i])
            ]
        return gradients
