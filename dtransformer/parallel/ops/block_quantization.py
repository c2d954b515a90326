"""Formats of quantized kernels: NF4 with 4 bits per element, and int8.

Elements are divided into blocks of 64. An element is stored as a code, the index of its fraction of
the block's absolute maximum. The maxima are also quantized, to 8 bits in groups of at most 256
(double quantization): each group has an offset, the mean of its maxima, and a scale.

Blocks run along the side of a kernel, inputs or outputs, that is never sharded. A group contains up
to 64 consecutive blocks of up to 4 consecutive features of the other side. Every shard of a kernel
therefore has the codes and scales of the full kernel, and results do not depend on the layout. Each
of several stacked kernels, such as the kernels of experts, is quantized alone.

Reference:
    - [Dettmers et al., 2023, QLoRA, §3 and appendix E](https://arxiv.org/abs/2305.14314)
"""

import dataclasses
import math

import numpy as np
import tensorflow as tf

from dtransformer.parallel.ops.custom_gradient import depend_on

# Quantiles of the normal distribution, scaled to [-1, 1]. 0 is exact.
NF4_VALUES = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
_INT8_VALUES = np.arange(-127, 129, dtype=np.float32) / 127
_BYTES = np.arange(256)
# Kind -> tables from a byte to the values of its elements. A byte of NF4 has two: the lower half
# belongs to the first half of a block.
_TABLES = {
    "nf4": (NF4_VALUES[_BYTES & 15], NF4_VALUES[_BYTES >> 4]),
    "int8": (_INT8_VALUES,),
}
KINDS = tuple(_TABLES)
BLOCK_SIZE = 64
_MAX_GROUP_BLOCKS = 64
_MAX_GROUP_FEATURES = 4
_ZERO_CODE = 127
_UNSHARDED_AXES = (None, "embed")


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Layout of a quantized kernel, or of a rectangle of it.

    Args:
        kind: One of `KINDS`.
        shape: Shape of the kernel, `[*stack, *inputs, *outputs]`.
        start, stop: Integers. Range of the dimensions that blocks run along.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def from_kernel(
        cls,
        kind: str,
        shape: tuple[int, ...],
        num_inputs: int,
        axes: tuple,
        path: str,
        num_stacked: int = 0,
    ) -> "BlockLayout":
        """Return the layout of a kernel. It depends only on the shape and the logical axes.

        Args:
            kind, shape: See the class.
            num_inputs: Integer. Number of input dimensions.
            axes: Tuple with the logical axis of each dimension, or `None`.
            path: Path of the kernel, for the message.
            num_stacked: Integer. Number of dimensions before the inputs. Defaults to `0`.

        Raises:
            ValueError: If blocks do not divide the kernel.
        """
        middle = num_stacked + num_inputs
        along_inputs = all(axis in _UNSHARDED_AXES for axis in axes[num_stacked:middle])
        sides = (num_stacked, middle) if along_inputs else (middle, len(shape))
        layout = cls(kind, tuple(shape), *sides)
        block_features = math.prod(shape[slice(*sides)])
        if block_features % BLOCK_SIZE:
            side = "inputs" if along_inputs else "outputs"
            raise ValueError(
                f"{path} has {block_features} {side}, but {kind} needs a multiple of {BLOCK_SIZE}. "
                "Exclude the kernel from the quantized ones, or change its size."
            )
        return layout

    @property
    def num_blocks(self) -> int:
        """Number of blocks of each feature of the other side."""
        return math.prod(self.shape[self.start : self.stop]) // BLOCK_SIZE

    @property
    def group_blocks(self) -> int:
        """Number of blocks of a feature of the other side in a group."""
        sizes = range(min(self.num_blocks, _MAX_GROUP_BLOCKS), 0, -1)
        return next(size for size in sizes if self.num_blocks % size == 0)

    @property
    def group_features(self) -> int:
        """Number of features of the other side in a group."""
        return math.gcd(self._last(self.shape), _MAX_GROUP_FEATURES)

    @property
    def num_before(self) -> int:
        """Number of dimensions before the dimensions of blocks, if the last one has groups."""
        return self.start + (self.stop == len(self.shape))

    @property
    def part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored tensors: `"codes"`, `"absmax"`, `"scale"` and `"offset"`."""
        feature_groups = self._last(self.shape) // self.group_features
        num_groups = self.num_blocks // self.group_blocks
        groups = feature_groups, self.group_features
        scale = self._join(self.shape, (num_groups, 1), (feature_groups, 1))
        return {
            "codes": self.join_blocks(self.num_blocks, BLOCK_SIZE // len(_TABLES[self.kind])),
            "absmax": self._join(self.shape, (num_groups, self.group_blocks), groups),
            "scale": scale,
            "offset": scale,
        }

    def part_axes(self, axes: tuple) -> dict[str, tuple]:
        """Return the logical axes of the stored tensors.

        Args:
            axes: Tuple with the logical axis of each dimension of the kernel, or `None`.
        """
        last = self._last(axes)
        groups = self._join(axes, (None, None), (last, None))
        codes = self._join(axes, (None, None), (last,))
        return {"codes": codes, "absmax": groups, "scale": groups, "offset": groups}

    def rectangle(self, name: str, bounds: tuple) -> tuple[tuple, tuple]:
        """Return the part of the kernel that determines a rectangle of a stored tensor.

        Args:
            name: Key of `part_shapes`.
            bounds: Tuple of `(start, stop)` for each dimension of the stored tensor.

        Returns:
            A tuple of the kernel's bounds, and of the slices of the rectangle in the stored tensor
            of this part of the kernel.
        """
        first_after = (self.start if name == "codes" else self.num_before) + 2
        last_after = first_after + len(self.shape) - self.stop
        dimensions = [*range(self.start), *range(first_after, last_after)]
        others = [bounds[dimension] for dimension in dimensions]
        if name != "codes":
            others[-1] = tuple(end * self.group_features for end in others[-1])
        full = [(0, size) for size in self.shape[self.start : self.stop]]
        kernel_bounds = (*others[: self.start], *full, *others[self.start :])
        slices = [
            slice(None) if dimension in dimensions else slice(*ends)
            for dimension, ends in enumerate(bounds)
        ]
        return kernel_bounds, tuple(slices)

    def with_shape(self, shape: tuple[int, ...]) -> "BlockLayout":
        """Return the layout of a rectangle of the kernel."""
        return dataclasses.replace(self, shape=tuple(shape))

    def join_blocks(self, *block: int) -> tuple[int, ...]:
        """Return the kernel's shape with block dimensions instead of the dimensions of blocks."""
        return self._join(self.shape, block, (self._last(self.shape),))

    def _last(self, values):
        """Return the value of the last dimension of the other side."""
        return values[-1] if self.stop < len(self.shape) else values[self.start - 1]

    def _join(self, values, blocks, last):
        """Replace the values of the dimensions of blocks, and of the last other dimension."""
        if self.stop < len(self.shape):
            return (*values[: self.start], *blocks, *values[self.stop : -1], *last)
        return (*values[: self.start - 1], *last, *blocks)


def quantize(layout: BlockLayout, kernel: np.ndarray) -> dict[str, np.ndarray]:
    """Return the stored arrays of a kernel; see `BlockLayout.part_shapes`.

    Args:
        layout: `BlockLayout` of the kernel.
        kernel: Float array of shape `layout.shape`.
    """
    shapes = layout.part_shapes
    blocks = np.float32(kernel).reshape(layout.join_blocks(layout.num_blocks, BLOCK_SIZE))
    axis = layout.start + 1
    absmax = np.abs(blocks).max(axis, keepdims=True)
    fractions = blocks / np.where(absmax > 0, absmax, 1)
    if layout.kind == "nf4":
        indices = np.zeros(fractions.shape, np.uint8)
        for middle in (NF4_VALUES[1:] + NF4_VALUES[:-1]) / 2:  # Faster than a binary search.
            indices += fractions > middle
        low, high = np.split(indices, 2, axis)
        codes = low | high << 4
    else:
        codes = np.uint8(np.rint(fractions * _ZERO_CODE) + _ZERO_CODE)
    groups = absmax.reshape(shapes["absmax"])
    features_axis = -1 if layout.num_before == layout.start else layout.start
    group_axes = layout.num_before + 1, features_axis
    # Float64 makes the mean independent of the order of summation.
    offset = np.float32(groups.mean(group_axes, dtype="float64", keepdims=True))
    scale = np.abs(groups - offset).max(group_axes, keepdims=True) / np.float32(_ZERO_CODE)
    rounded = np.rint((groups - offset) / np.where(scale > 0, scale, 1))
    arrays = {
        "codes": codes,
        "absmax": np.uint8(rounded + _ZERO_CODE),
        "scale": scale,
        "offset": offset,
    }
    return {name: array.reshape(shapes[name]) for name, array in arrays.items()}


def dequantize(
    layout: BlockLayout,
    parts: dict[str, tf.Tensor],
    dtype: str = "float32",
    after: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the kernel of stored tensors.

    Args:
        layout: `BlockLayout` of the kernel.
        parts: Dict of tensors; see `BlockLayout.part_shapes`.
        dtype: Type of the result. The values are computed in float32. Defaults to `"float32"`.
        after: Float tensor that must be computed first, so that compilers do not reuse an earlier
            result. Defaults to `None`.
    """
    scale = parts["scale"]
    tables = [tf.constant(table) for table in _TABLES[layout.kind]]
    if after is not None:
        scale = depend_on(scale, after)
        tables = [depend_on(table, after) for table in tables]
    indices = tf.cast(parts["codes"], "int32")
    fractions = [tf.gather(table, indices) for table in tables]
    fractions = tf.concat(fractions, layout.start + 1)
    absmax = (tf.cast(parts["absmax"], "float32") - _ZERO_CODE) * scale + parts["offset"]
    absmax = tf.reshape(absmax, layout.join_blocks(layout.num_blocks, 1))
    return tf.cast(tf.reshape(fractions * absmax, layout.shape), dtype)
