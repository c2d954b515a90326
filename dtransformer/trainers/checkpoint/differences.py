"""What of the state of all ranks a file has, and what not."""

from dtransformer.parallel.object_collectives import all_gather_json


def differences(held, there):
    """Compare names and shapes of what all ranks hold with those of a file.

    Args:
        held: list of `state.Held`, this rank's.
        there: dict of names and shapes.

    Returns:
        Sorted lists of the names that the file lacks, and that it has besides; and a dict of
        names, and our shape and the file's, where these differ.
    """
    ours = {}
    for names in all_gather_json({one.name: list(one.shape) for one in held}, "checkpoint/names"):
        ours.update({name: tuple(shape) for name, shape in names.items()})
    other_shapes = {
        name: (shape, there[name])
        for name, shape in ours.items()
        if there.get(name, shape) != shape
    }
    return sorted(ours.keys() - there.keys()), sorted(there.keys() - ours.keys()), other_shapes
