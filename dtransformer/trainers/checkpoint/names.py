"""Names of a network's variables that do not change from process to process.

They are the variables' paths without the network's own name. Keras numbers the layers that were
given no name across the process: the second network of a notebook has a `dense_1` where the first
had a `dense`. Here they are numbered anew, within the layer that they belong to.
"""

import collections
import re

import keras

from dtransformer import _compat

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
