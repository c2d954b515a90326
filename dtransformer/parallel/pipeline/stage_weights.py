"""The weights of layers that are spread over stages: built, shared, saved and loaded."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import keras

from dtransformer import _compat
from dtransformer.parallel import job
from dtransformer.parallel.object_collectives import broadcast_arrays
from dtransformer.parallel.pipeline.dataflow import Dataflow
from dtransformer.parallel.pipeline.own_stage import is_elsewhere, is_here, shared_layers
from dtransformer.parallel.pipeline.placed_layers import placed_layers, stages_of


def built_at_its_place(build: Callable) -> Callable:
    """Return a layer's method `build`, which makes no weights where other stages have them."""

    @functools.wraps(build)
    def build_here(layer, *args, **kwargs):
        if is_elsewhere(layer):
            _ignore_files(layer)
        else:
            build(layer, *args, **kwargs)

    return build_here


def share_weights(network: keras.Model, inputs) -> Dataflow | None:
    """Find out which stages share weights, and build the copies that this rank has.

    Args:
        network: a `keras.Model`, built.
        inputs: nested tensors, or specs of known shapes: a batch.

    Returns:
        The `Dataflow` of the batch; None where there is no pipeline.

    Raises:
        ValueError: see `Dataflow.of_network`.
    """
    if job.stage()[1] == 1:
        return None
    dataflow = Dataflow.of_network(network, inputs, job.placement())
    for layer in placed_layers(network):
        layer.copied_to = dataflow.copies_of(layer)
    for _, layer in shared_layers(network):
        if is_here(layer) and not layer.weights:
            _read_files(layer)
            _compat.take_weights(layer)
            layer.build((None, None))
    return dataflow


def _ignore_files(layer):
    """Let a layer of another stage, and those inside, pass by what files hold of them."""
    for inner in _compat.flat_layers(layer):
        object.__setattr__(inner, "load_own_variables", lambda store: None)


def _read_files(layer):
    """Undo `_ignore_files`."""
    for inner in _compat.flat_layers(layer):
        vars(inner).pop("load_own_variables", None)


@contextlib.contextmanager
def full_network(network: keras.Model) -> Iterator[None]:
    """Inside the `with` block rank 0 can save the layers of all stages, as Keras does.

    All ranks have to come here. What other stages have comes to rank 0's memory, one layer
    after the other.
    """
    lent = []
    try:
        for layer in placed_layers(network) if job.stage()[1] > 1 else []:
            owner = stages_of(layer, job.placement())[0]
            if owner:  # rank 0 has the first stage's
                for inner in _compat.flat_layers(layer):
                    values = _from_stage(inner, owner)
                    if job.is_chief() and values:
                        _lend(inner, values)
                        lent.append(inner)
        yield
    finally:
        for layer in lent:
            object.__delattr__(layer, "save_own_variables")


def _from_stage(layer, owner):
    """Return what a stage's layer would save, on every stage."""
    values, group = {}, job.pipeline_group()
    if job.stage()[0] == owner:
        layer.save_own_variables(values)
    return broadcast_arrays(values, group.ranks[owner], group, f"saved_{layer.path}")


def _lend(layer, values):
    def save(store):
        for name, value in values.items():
            store[name] = value

    object.__setattr__(layer, "save_own_variables", save)
