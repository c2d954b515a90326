"""Rectangular shards that form a rank's local tensor, without side effects.

The bounds of a shard are a tuple of `(start, stop)` for each dimension. TensorFlow's checkpoints
store rectangular shards and can read any rectangle of a tensor, independent of the stored shards. A
device of a mesh has one rectangle. A rank of a sharded optimizer has a range of a flattened
rectangle instead, which consists of a few consecutive rectangles.
"""

import dataclasses
import math
from collections.abc import Sequence

Bounds = tuple[tuple[int, int], ...]
FlatRange = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class CheckpointShard:
    """Rectangle of a tensor and its position in a rank's local tensor.

    Args:
        bounds: Bounds in the full tensor, without padding.
        local_offset: Index of the first element in the flattened local tensor.
        local_shape: Shape in the local tensor, with padding.
    """

    bounds: Bounds
    local_offset: int
    local_shape: tuple[int, ...]

    @property
    def local_range(self) -> slice:
        """Slice of the flattened local tensor, with padding."""
        return slice(self.local_offset, self.local_offset + math.prod(self.local_shape))

    @property
    def num_elements(self) -> int:
        """Number of elements, without padding."""
        return num_elements(self.bounds)

    @property
    def without_padding(self) -> tuple[slice, ...]:
        """Index that removes the padding from an array of shape `local_shape`."""
        return tuple(slice(size) for size in get_shape(self.bounds))


def split_shard(shard: CheckpointShard, max_elements: int) -> list[CheckpointShard]:
    """Divide a shard along its first dimension into shards of at most `max_elements`.

    Rows are not divided, so a single row may have more.

    Example:

    >>> (shard,) = local_shards((3, 4), ((0, 3), (0, 4)))
    >>> [small.bounds for small in split_shard(shard, 8)]
    [((0, 2), (0, 4)), ((2, 3), (0, 4))]
    """
    if not shard.local_shape or shard.num_elements <= max_elements:
        return [shard]
    row_size = math.prod(shard.local_shape[1:])
    step = max(max_elements // row_size, 1)
    (first, last) = shard.bounds[0]
    return [
        CheckpointShard(
            ((start, stop), *shard.bounds[1:]),
            shard.local_offset + (start - first) * row_size,
            (stop - start, *shard.local_shape[1:]),
        )
        for start in range(first, last, step)
        for stop in [min(start + step, last)]
    ]


def local_shards(
    shape: Sequence[int], bounds: Bounds, flat_range: FlatRange | None = None
) -> list[CheckpointShard]:
    """Return the shards that form a rank's local tensor, in order.

    Args:
        shape: Shape of the full tensor without padding. Elements outside of it are omitted.
        bounds: Rectangle of the padded tensor that the rank has.
        flat_range: `(start, stop)` in the flattened rectangle if the rank has only this range.
            Elements past the end of the rectangle are padding and omitted. `None` means the full
            rectangle.

    Example:

    >>> [shard.bounds for shard in local_shards((4, 3), ((0, 4), (0, 3)), (2, 7))]
    [((0, 1), (2, 3)), ((1, 2), (0, 3)), ((2, 3), (0, 1))]
    """
    start, stop = flat_range or (0, num_elements(bounds))
    shards = []
    local_offset = 0
    for inner in flat_range_bounds(get_shape(bounds), start, min(stop, num_elements(bounds))):
        clipped = tuple(
            (offset + first, min(offset + last, size))
            for (offset, _), (first, last), size in zip(bounds, inner, shape)
        )
        if all(first < last for first, last in clipped):
            shards.append(CheckpointShard(clipped, local_offset, get_shape(inner)))
        local_offset += num_elements(inner)
    return shards


def flat_range_bounds(shape: Sequence[int], start: int, stop: int) -> list[Bounds]:
    """Return the bounds of the consecutive rectangles in a range of a flattened tensor.

    Each dimension adds at most two: the rest of a row, full rows, and the start of a row.

    Args:
        shape: Shape of the tensor.
        start: First element of the range in the flattened tensor.
        stop: End of the range, exclusive.

    Example:

    >>> flat_range_bounds((4, 3), 3, 8)
    [((1, 2), (0, 3)), ((2, 3), (0, 2))]
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row_size = math.prod(shape[1:])
    first, first_rest = divmod(start, row_size)
    last, last_rest = divmod(stop, row_size)
    if first == last:  # The range is within one row.
        return _bounds_in_row(shape, first, first_rest, last_rest)
    bounds = _bounds_in_row(shape, first, first_rest, row_size) if first_rest else []
    first += bool(first_rest)
    if first < last:
        bounds.append(((first, last), *((0, size) for size in shape[1:])))
    return bounds + (_bounds_in_row(shape, last, 0, last_rest) if last_rest else [])


def _bounds_in_row(shape, row, start, stop):
    return [((row, row + 1), *inner) for inner in flat_range_bounds(shape[1:], start, stop)]


def get_shape(bounds: Bounds) -> tuple[int, ...]:
    """Return the shape of a rectangle.

    Example:

    >>> get_shape(((2, 4), (0, 6)))
    (2, 6)
    """
    return tuple(stop - start for start, stop in bounds)


def num_elements(bounds: Bounds) -> int:
    """Return the number of elements of a rectangle."""
    return math.prod(get_shape(bounds))


def slice_spec(shape: Sequence[int], bounds: Bounds) -> str:
    """Return a rectangle in the format of TensorFlow's `SaveV2` and `RestoreV2`.

    The format has the shape of the full tensor, and the offset and size in each dimension. The full
    tensor is "".

    Example:

    >>> slice_spec((8, 6), ((2, 4), (0, 6)))
    '8 6 2,2:0,6'
    """
    if all((start, stop) == (0, size) for size, (start, stop) in zip(shape, bounds)):
        return ""
    sizes = " ".join(map(str, shape))
    return f"{sizes} " + ":".join(f"{start},{stop - start}" for start, stop in bounds)
