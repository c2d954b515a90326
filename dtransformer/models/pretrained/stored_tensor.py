"""Mapping between a published tensor and the weights of a network, as pure functions of arrays."""

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file that stores one weight, or several weights side by side.

    Args:
        name: String. Name of the tensor in the file.
        weights: Tuple of the weights' paths, without the network's name, in the order of
            their columns in the (transposed) tensor.
        is_transposed: Boolean. Whether the tensor is [outputs, inputs], like PyTorch's
            `Linear`.
        num_inputs: Integer. Number of input dimensions of the weights.
        is_row: Boolean. Whether the tensor has an additional first dimension of 1.
        expert: Integer. Index of the expert whose weights the tensor stores. The network's
            weights have all experts in their first dimension. `None` without experts.
        order: Permutation of the weights' last dimension: element i of a weight is element
            `order[i]` of the tensor. `None` for the same order.
        groups: Integer. Number of groups that the outputs are divided into. The tensor
            stores the first group of all weights, then the second group, and so on.
        is_stacked: Boolean. Whether the tensor keeps the weights' input dimensions. The
            first one is the expert.
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
        """Return the tensor's shape.

        Args:
            shapes: List of the weights' shapes.

        Example:

        >>> q = StoredTensor("q_proj.weight", ("query_kernel",), is_transposed=True)
        >>> q.shape([(16, 2, 4)])
        (8, 16)
        """
        shapes = self._part_shapes(shapes)
        columns = sum(math.prod(shape[self._num_input_dims(shape) :]) for shape in shapes)
        rows = math.prod(shapes[0][: self._num_input_dims(shapes[0])])
        if self.is_stacked:
            return (*shapes[0][: self._num_input_dims(shapes[0])], columns)
        if self._num_input_dims(shapes[0]) == 0:
            return (1, columns) if self.is_row else (columns,)
        return (columns, rows) if self.is_transposed else (rows, columns)

    def extract(self, stored: np.ndarray, index: int, shapes: list[tuple[int, ...]]) -> np.ndarray:
        """Return a weight, or an expert's part of it, from the tensor.

        The result is a view, which reads nothing from disk, unless `order` or `groups` require a
        copy.

        Args:
            stored: Array of the tensor.
            index: Integer. Index of the weight in `weights`.
            shapes: List of the weights' shapes.
        """
        shapes = self._part_shapes(shapes)
        sizes = [math.prod(shape[self._num_input_dims(shape) :]) // self.groups for shape in shapes]
        ends = np.cumsum([0, *sizes])
        columns = stored.T if self.is_transposed else stored
        if self.groups > 1:
            columns = columns.reshape([*columns.shape[:-1], self.groups, -1])
        weight = columns[..., ends[index] : ends[index + 1]].reshape(shapes[index])
        return weight if self.order is None else weight[..., list(self.order)]

    def join(self, values: list[np.ndarray]) -> np.ndarray:
        """Return the tensor of the given weights. The inverse of `extract`."""
        flat = []
        for value in values if self.expert is None else [value[self.expert] for value in values]:
            if self.order is not None:
                value = value[..., np.argsort(self.order)]
            rows = value.shape[: self._num_input_dims(value.shape)]
            flat.append(value.reshape([*([math.prod(rows)] if rows else []), self.groups, -1]))
        joint = np.concatenate(flat, axis=-1)
        joint = joint.reshape([*(rows if self.is_stacked else joint.shape[:-2]), -1])
        joint = joint[None] if self.is_row else joint
        return np.ascontiguousarray(joint.T if self.is_transposed else joint)

    def _part_shapes(self, shapes):
        """Return the shapes of the weights, or of a single expert's part of them."""
        return shapes if self.expert is None else [shape[1:] for shape in shapes]

    def _num_input_dims(self, shape):
        """Return the number of input dimensions of a weight. A bias has none."""
        is_bias = self.num_inputs == 0
        return 0 if is_bias else min(self.num_inputs, len(shape) - 1)
