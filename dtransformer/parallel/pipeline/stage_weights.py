"""Saving and loading the weights of a network whose layers are spread over stages."""

import contextlib

from dtransformer.parallel import job
from dtransformer.parallel.object_collectives import broadcast_arrays
from dtransformer.parallel.pipeline import placement


@contextlib.contextmanager
def whole_network(network):
    """Inside the `with` block rank 0 can save the layers of all stages, as Keras does.

    All ranks have to come here. What other stages have comes to rank 0's memory, one layer
    after the other.
    """
    lent = []
    own, num_stages = job.stage()
    try:
        for layer in placement.placed_layers(network) if num_stages > 1 else []:
            owner = placement.stages_of(layer)[0]
            if owner:  # rank 0 has the first stage's
                for inner in layer._flatten_layers():
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
    name = f"saved_{layer.path}"
    return broadcast_arrays(values, group.ranks[owner], group, name)


def _lend(layer, values):
    def save(store):
        for name, value in values.items():
            store[name] = value

    object.__setattr__(layer, "save_own_variables", save)


def ignore_weights(layer):
    """Let the layers inside of one that another stage has pass by what files hold of them."""
    for inner in layer._flatten_layers(include_self=False):
        object.__setattr__(inner, "load_own_variables", lambda store: None)
