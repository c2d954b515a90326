"""Differences between the state of all ranks and what a file holds."""

from collections.abc import Mapping, Sequence

from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor

Shape = tuple[int, ...]


def differences(
    tensors: Sequence[ShardedTensor], in_file: Mapping[str, Shape]
) -> tuple[list[str], list[str], dict[str, tuple[Shape, Shape]]]:
    """Compare the names and shapes of all ranks' tensors with those of a file.

    All ranks have to call.

    Args:
        tensors: this rank's.
        in_file: the names of the file's tensors, and their shapes.

    Returns:
        The sorted names that the file lacks; the sorted names that only the file has; and the names
        whose shapes differ, with our shape and the file's.
    """
    own = {tensor.name: list(tensor.shape) for tensor in tensors}
    ours = {}
    for shapes in all_gather_json(own, "checkpoint/names"):
        ours.update({name: tuple(shape) for name, shape in shapes.items()})
    other_shapes = {
        name: (shape, in_file[name])
        for name, shape in ours.items()
        if in_file.get(name, shape) != shape
    }
    return sorted(ours.keys() - in_file.keys()), sorted(in_file.keys() - ours.keys()), other_shapes
