"""Names of a network's variables that do not change from process to process.

They are the variables' paths without the network's own name. Keras numbers the layers that
were given no name through the whole process: the second network of a notebook has a `dense_1`
where the first had a `dense`. Those are counted anew here, in the layer that they are in.
"""

import collections
import re

from keras.src.utils.naming import to_snake_case

_SEEDS = "seed_generator"  # of Keras' own layers, which are outside of them


def names_of(network):
    """Return a dict of the ids of a built network's variables and their names."""
    counts, own_names = collections.Counter(), {network.name: ""}
    for layer in network._flatten_layers(include_self=False):
        if layer.path is not None and layer.path not in own_names:
            outer, _, name = layer.path.rpartition("/")
            base = to_snake_case(type(layer).__name__)
            own_names[layer.path] = _counted(base, name, outer, counts)
    names = {}
    for variable in network.variables:
        first, _, _ = variable.path.partition("/")
        if first not in own_names:
            own_names[first] = _counted(_SEEDS, first, "", counts)
        names[id(variable)] = _name(variable.path, own_names)
    return names


def _counted(base, name, outer, counts):
    """Return a name; another number where Keras has made it up of `base` and one."""
    if not re.fullmatch(rf"{base}(_\d+)?", name):
        return name
    counts[outer, base] += 1
    number = counts[outer, base] - 1
    return f"{base}_{number}" if number else base


def _name(path, own_names):
    """Return a path with the names of the layers along it replaced; the network has none."""
    parts, along = [], ""
    for part in path.split("/"):
        along = f"{along}/{part}" if along else part
        parts.append(own_names.get(along, part))
    return "/".join(part for part in parts if part)
