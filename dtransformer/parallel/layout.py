"""Logical names of dimensions: what weights and activations are declared with.

A weight says `axes=("embed", "mlp")`, an activation is pinned with
`constrain(x, ("batch", "length", "mlp"))`. A table maps each logical name to the
mesh axis that cuts it. Where there is no mesh both are no-ops, and a layer is an
ordinary Keras layer.
"""

# Logical name of a dimension -> what it counts.
LOGICAL_AXES = {
    "batch": "sentences",
    "length": "positions of the sequence a layer's output has",
    "memory_length": "positions of the sequence that is attended to",
    "embed": "hidden features",
    "heads": "attention heads",
    "head_dim": "features of one head",
    "mlp": "features inside the feed-forward layer",
    "vocab": "entries of the vocabulary",
    "position": "entries of a table of positions",
    "norm": "features that a normalization scales",
}


def check_axes(axes, rank, what):
    """Check logical names against a number of dimensions.

    Args:
        axes: a tuple with a name of `LOGICAL_AXES`, or None for a dimension that
            is never cut, for every dimension.
        rank: the number of dimensions.
        what: what is described, for the error.

    Raises:
        ValueError: a name is unknown, or there is not one for every dimension.
    """
    if len(axes) != rank:
        raise ValueError(f"{what} has {rank} dimensions, but its logical axes are {axes}")
    for axis in axes:
        if axis is not None and axis not in LOGICAL_AXES:
            raise ValueError(
                f"{what} has the logical axis {axis!r}; known are {', '.join(LOGICAL_AXES)}"
            )


def constrain(x, axes):
    """Pin a tensor's layout to what the rules give its logical axes.

    Args:
        x: a tensor.
        axes: a tuple with the logical name, or None, of every dimension.

    Returns:
        The same values, laid out as the rules say; `x` itself where there is no
        mesh.
    """
    check_axes(axes, len(x.shape), "an activation")
    return x
