"""The tensors of a folder of published weights, by the paths of our weights, and how these differ."""

import dataclasses
import math
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.inputs.conversion import convert
from dtransformer.models.base import TokenModel
from dtransformer.models.pretrained.families import Family
from dtransformer.models.pretrained.families.task_heads import tensors_of
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

    Raises:
        InputError: tensors lack, are too many or of other shapes; lists them.
    """

    def __init__(self, content: PretrainedFolder, family: Family, network: TokenModel):
        self._content = content
        names = {family.own_name(name): name for name in content.shapes}
        tensors = tensors_of(content.config["model_type"], network)
        unused = names.keys() - {tensor.name for tensor in tensors}
        unused -= set(filter(family.is_spare, unused))
        unused -= _left_out(unused, family.left_out(network.arguments), content.path)
        message = [f"it lacks {x.name}" for x in tensors if x.name not in names]
        message += [f"it also has {name}" for name in sorted(unused)]
        held = {weight for tensor in tensors for weight in tensor.weights}
        self._shapes = network.weight_shapes()
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

    def read(self, path: str, bounds: Bounds, dtype: str) -> np.ndarray:
        """Return a rectangle of a weight.

        Args:
            path: its path, with the network's name.
            bounds: (start, stop) in each dimension; what is beyond the stored tensor is 0.
            dtype: name of the type.

        Raises:
            InputError: it has values that are not finite.
        """
        path = path.partition("/")[2]
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


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, which holds one of our weights, or several side by side.

    Args:
        name: its name in the file.
        weights: tuple of the paths of our weights, without the network's name, in the order in
            which they follow each other along the tensor's last dimension, once it is transposed.
        is_transposed: whether outputs come before inputs in it, as PyTorch's `Linear` has them.
        num_inputs: number of dimensions of our weights that are inputs.
        is_row: whether it has a first dimension of 1, which our weights have not.
        expert: number of the expert of which it holds the weights: ours have those of all, along
            their first dimension. None where they are of no experts.
        order: of the last dimension of our weights: number i of ours is number `order[i]` there.
            None for the same order.
        groups: number of parts of the weights' outputs: the first part of each weight comes before
            the second ones. 1 for each weight as a whole.
        is_stacked: whether it has the weights' inputs as dimensions of their own, of which the first
            is that of experts.
    """

    name: str
    weights: tuple[str, ...]
    is_transposed: bool = False
    num_inputs: int = 1
    is_row: bool = False
    expert: int | None = None
    order: tuple[int, ...] | None = None
    groups: int = 1
    is_stacked: bool = False

    def shape(self, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the tensor's shape, from those of our weights.

        Example:

        >>> q = StoredTensor("q_proj.weight", ("query_kernel",), is_transposed=True)
        >>> q.shape([(16, 2, 4)])
        (8, 16)
        """
        shapes = self._own(shapes)
        columns = sum(math.prod(shape[self._inputs(shape) :]) for shape in shapes)
        rows = math.prod(shapes[0][: self._inputs(shapes[0])])
        if self.is_stacked:
            return (*shapes[0][: self._inputs(shapes[0])], columns)
        if self._inputs(shapes[0]) == 0:
            return (1, columns) if self.is_row else (columns,)
        return (columns, rows) if self.is_transposed else (rows, columns)

    def of(self, stored: np.ndarray, number: int, shapes: list[tuple[int, ...]]) -> np.ndarray:
        """Return one of our weights, or an expert's, as a view of the tensor: nothing is read.

        Where the order is another one, or there are groups, it is a copy.
        """
        shapes = self._own(shapes)
        sizes = [math.prod(shape[self._inputs(shape) :]) // self.groups for shape in shapes]
        ends = np.cumsum([0, *sizes])
        columns = stored.T if self.is_transposed else stored
        if self.groups > 1:
            columns = columns.reshape([*columns.shape[:-1], self.groups, -1])
        own = columns[..., ends[number] : ends[number + 1]].reshape(shapes[number])
        return own if self.order is None else own[..., list(self.order)]

    def join(self, values: list[np.ndarray]) -> np.ndarray:
        """Return the tensor of our weights: the opposite of `of`."""
        flat = []
        for value in values if self.expert is None else [value[self.expert] for value in values]:
            if self.order is not None:
                value = value[..., np.argsort(self.order)]
            rows = value.shape[: self._inputs(value.shape)]
            flat.append(value.reshape([*([math.prod(rows)] if rows else []), self.groups, -1]))
        joint = np.concatenate(flat, axis=-1)
        joint = joint.reshape([*(rows if self.is_stacked else joint.shape[:-2]), -1])
        joint = joint[None] if self.is_row else joint
        return np.ascontiguousarray(joint.T if self.is_transposed else joint)

    def _own(self, shapes):
        """Return the shapes of what it holds of our weights."""
        return shapes if self.expert is None else [shape[1:] for shape in shapes]

    def _inputs(self, shape):
        """Return how many dimensions are inputs: none of a bias, whatever its heads are."""
        is_bias = self.num_inputs == 0
        return 0 if is_bias else min(self.num_inputs, len(shape) - 1)
