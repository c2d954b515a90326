"""The tensors of a folder of published weights, by the paths of our weights."""

import functools
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.inputs.conversion import convert
from dtransformer.models.base import TokenModel
from dtransformer.models.pretrained.families import Family
from dtransformer.models.pretrained.families.task_heads import HEADS, tensors_of, without_head
from dtransformer.models.pretrained.folder import PretrainedFolder
from dtransformer.parallel.weights.sharded_variable import Bounds

_MAX_TOLD = 5


def own_path(variable: keras.Variable) -> str:
    """Return a variable's path without the network's name."""
    return variable.path.partition("/")[2]


class StoredWeights:
    """What a folder holds of a network's weights.

    Args:
        content: the folder.
        family: the `Family` that it is of.
        network: a network of that family; it need not be built.

    Attributes:
        lacks_head: Whether the folder is of a class without the head, such as `BertModel`.

    Raises:
        InputError: If tensors lack, are too many or of other shapes. The message lists them.
    """

    def __init__(self, content: PretrainedFolder, family: Family, network: TokenModel):
        self._content = content
        names = family.stored_names(content.shapes)
        tensors = tensors_of(content.config["model_type"], network)
        self._shapes = network.weight_shapes()
        kind = (content.config.get("architectures") or [""])[0]
        is_base = kind.endswith("Model") and kind != family.architecture
        self.lacks_head = is_base and any(x.name not in names for x in tensors)
        if self.lacks_head:
            tensors = without_head(tensors)
            self._shapes = {x: s for x, s in self._shapes.items() if not x.startswith(HEADS)}
            warnings.warn(
                f"{content.path}: {kind} has no head. The head of {family.architecture} starts with "
                "random values.",
                stacklevel=4,
            )
        unused = names.keys() - {tensor.name for tensor in tensors}
        unused -= set(filter(family.is_spare, unused))
        unused -= _left_out(unused, family.left_out(network.arguments), content.path)
        message = [f"it lacks {x.name}" for x in tensors if x.name not in names]
        message += [f"it also has {name}" for name in sorted(unused)]
        held = {weight for tensor in tensors for weight in tensor.weights}
        others = self._shapes.keys() - held
        message += [f"the network also has {weight}" for weight in sorted(others)]
        if message:
            raise InputError(_message(content.path, message))
        self._places = {  # and the expert, or None
            (weight, tensor.expert): (tensor, number, names[tensor.name])
            for tensor in tensors
            for number, weight in enumerate(tensor.weights)
        }
        self._check_shapes(tensors, names)

    def _check_shapes(self, tensors, names):
        message = []
        for tensor in tensors:
            expected = tensor.shape([self._shapes[weight] for weight in tensor.weights])
            found = self._content.shapes[names[tensor.name]]
            if found != expected:
                message.append(f"{tensor.name} is {list(found)}, not {list(expected)}")
        if message:
            raise InputError(_message(self._content.path, message))

    def reader(self, path: str) -> Callable[[Bounds, str], np.ndarray] | None:
        """Return the function that reads a weight, or `None` if it is of the lacking head.

        Args:
            path: The weight's path, with the network's name.
        """
        path = path.partition("/")[2]
        return functools.partial(self._read, path) if path in self._shapes else None

    def dtypes(self) -> dict[str, str]:
        """Return the types of the stored tensors by our weights' paths."""
        places = self._places.items()
        return {path: str(self._content[name].dtype) for (path, _), (*_, name) in places}

    def _read(self, path, bounds, dtype):
        """Return a rectangle of a weight. Elements beyond the stored tensor are 0.

        Raises:
            InputError: If it has values that are not finite.
        """
        if (path, None) in self._places:
            return self._rectangle(path, None, bounds, dtype)
        experts, of_each = range(*bounds[0]), bounds[1:]
        return np.stack([self._rectangle(path, expert, of_each, dtype) for expert in experts])

    def _rectangle(self, path, expert, bounds, dtype):
        """Return a rectangle of a weight, or of an expert's."""
        stored, number, name = self._places[path, expert]
        shapes, part = [self._shapes[weight] for weight in stored.weights], slice(None)
        if stored.is_stacked:  # no other experts are read
            part, bounds = slice(*bounds[0]), [(0, bounds[0][1] - bounds[0][0]), *bounds[1:]]
            shapes = [(bounds[0][1], *shape[1:]) for shape in shapes]
        weight = stored.of(self._content[name][part], number, shapes)
        kind = tf.as_dtype(dtype).as_numpy_dtype
        value = convert(
            weight[tuple(slice(*ends) for ends in bounds)], kind, f"{self._content.path}: {name}"
        )
        padding = [(0, stop - start - n) for (start, stop), n in zip(bounds, value.shape)]
        return np.pad(value, padding) if np.any(padding) else value


def _left_out(unused, beginnings, path):
    """Return which names of tensors are of no part of the network, and say so."""
    found = {name for name in unused if beginnings and name.startswith(beginnings)}
    if found:
        told = ", ".join(sorted(beginnings))
        warnings.warn(f"{path}: {len(found)} tensors of {told} are left out", stacklevel=4)
    return found


def _message(path, message):
    more = len(message) - _MAX_TOLD
    ending = f" and {more} more" if more > 0 else ""
    return f"{path} does not fit its config: {'; '.join(message[:_MAX_TOLD])}{ending}"
