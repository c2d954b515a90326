"""Which rectangular boxes of a whole tensor a rank's part of it consists of: pure functions.

A box is a tuple of (start, stop), one a dimension. TensorFlow's checkpoints store boxes, and
read any box of a tensor, whatever boxes it was written in. A sharded optimizer's part is a
range of the flattened tensor instead: a few boxes that follow each other.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Piece:
    """A box of a whole tensor, and where a rank has it.

    Args:
        box: where it lies in the whole, without padding.
        start: where it begins in the rank's flattened part.
        shape: its shape there, padding included.
    """

    box: tuple
    start: int
    shape: tuple

    @property
    def stop(self):
        """Where it ends in the rank's flattened part."""
        return self.start + math.prod(self.shape)

    @property
    def entries(self):
        """The number of entries, without padding."""
        return size_of(self.box)

    @property
    def inside_slices(self):
        """What `shape` is indexed with for the entries that are no padding."""
        return tuple(slice(size) for size in shape_of(self.box))


def split(piece, most):
    """Return pieces of at most so many entries that a piece consists of; single rows may be more.

    Example:

    >>> [piece.box for piece in split(*pieces_of((3, 4), ((0, 3), (0, 4))), 8)]
    [((0, 2), (0, 4)), ((2, 3), (0, 4))]
    """
    if not piece.shape or piece.entries <= most:
        return [piece]
    row = math.prod(piece.shape[1:])
    step, (first, last) = max(most // row, 1), piece.box[0]
    return [
        Piece(
            ((begin, end), *piece.box[1:]),
            piece.start + (begin - first) * row,
            (end - begin, *piece.shape[1:]),
        )
        for begin in range(first, last, step)
        for end in [min(begin + step, last)]
    ]


def pieces_of(shape, box, whole_range=None):
    """Return the `Piece`s of a rank's part of a tensor, in their order.

    Args:
        shape: the tensor's shape without padding; entries beyond it are left out.
        box: the box of the padded tensor that the rank has.
        whole_range: (start, stop) of the flattened box, where the rank has no more of it;
            what goes beyond the box is left out.

    Example:

    >>> [piece.box for piece in pieces_of((4, 3), ((0, 4), (0, 3)), (2, 7))]
    [((0, 1), (2, 3)), ((1, 2), (0, 3)), ((2, 3), (0, 1))]
    """
    first, last = whole_range or (0, size_of(box))
    pieces, position = [], 0
    for part in boxes_of_range(shape_of(box), first, min(last, size_of(box))):
        kept = tuple(
            (offset + start, min(offset + stop, end))
            for (offset, _), (start, stop), end in zip(box, part, shape)
        )
        if all(start < stop for start, stop in kept):
            pieces.append(Piece(kept, position, shape_of(part)))
        position += size_of(part)
    return pieces


def boxes_of_range(shape, start, stop):
    """Return the boxes that follow each other in a range of a flattened tensor.

    At most two a dimension: the rest of a row, whole rows, the beginning of a row.

    Args:
        shape: shape of the tensor.
        start, stop: range of entries.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, first_rest = divmod(start, row)
    last, last_rest = divmod(stop, row)
    if first == last:  # within one row
        return _in_row(shape, first, first_rest, last_rest)
    boxes = _in_row(shape, first, first_rest, row) if first_rest else []
    first += bool(first_rest)
    if first < last:
        boxes.append(((first, last), *((0, size) for size in shape[1:])))
    return boxes + (_in_row(shape, last, 0, last_rest) if last_rest else [])


def _in_row(shape, row, start, stop):
    return [((row, row + 1), *box) for box in boxes_of_range(shape[1:], start, stop)]


def shape_of(box):
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def size_of(box):
    """Return the number of entries of a box."""
    return math.prod(shape_of(box))


def spec_of(shape, box):
    """Return how TensorFlow writes a box of a tensor down, such as "8 6 2,2:0,6".

    "" stands for the whole.
    """
    if all((start, stop) == (0, size) for size, (start, stop) in zip(shape, box)):
        return ""
    sizes = " ".join(map(str, shape))
    return f"{sizes} " + ":".join(f"{start},{stop - start}" for start, stop in box)
