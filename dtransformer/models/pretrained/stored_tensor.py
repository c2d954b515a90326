"""Correspondence of a published tensor and weights of ours: pure functions of arrays."""

import dataclasses
import math

import numpy as np


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
