"""Which collectives a compiled function really sends, with their bytes.

On the mesh they are read from the functions that DTensor has lowered for the devices,
after all of its passes; over Horovod from the operations of the traced graph.
"""

import collections
import dataclasses
import math
import re

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from dtransformer.parallel import layout
from dtransformer.parallel.tables import columns

# TensorFlow's and Horovod's operations -> what they do.
_OPERATIONS = {
    "CollectiveReduceV2": "all-reduce",
    "CollectiveReduceScatterV2": "reduce-scatter",
    "CollectiveGatherV2": "all-gather",
    "CollectiveAllToAllV2": "all-to-all",
    "CollectiveAllToAllV3": "all-to-all",
    "CollectiveReduceV3": "all-reduce",
    "HorovodAllreduce": "all-reduce",
    "HorovodGroupedAllreduce": "all-reduce",
    "HorovodAllgather": "all-gather",
    "HorovodGroupedAllgather": "all-gather",
    "HorovodReducescatter": "reduce-scatter",
    "HorovodGroupedReducescatter": "reduce-scatter",
    "HorovodAlltoall": "all-to-all",
    "HorovodBroadcast": "broadcast",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Args:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "broadcast";
            or "message", of one pipeline stage to another.
        sent_as: the kind that it is carried out as: on CPUs DTensor's own all-gather is an
            all-reduce of a padded buffer.
        shape: shape of the result on a device; None for a dimension that is not known
            before it runs.
        dtype: name of its type.
        over: the mesh axis, "horovod", or "stages".
        group_size: number of devices, or ranks, that take part.
        layer: path of the layer; the name of the operation elsewhere.
        backward: whether it belongs to a gradient.
    """

    kind: str
    sent_as: str
    shape: tuple
    dtype: str
    over: str
    group_size: int
    layer: str
    backward: bool

    @property
    def elements(self):
        """The number of entries of the result; 0 where it is not known."""
        return 0 if None in self.shape else math.prod(self.shape)

    @property
    def entries_sent(self):
        """The number of entries that each device sends, by a ring's algorithm."""
        if self.kind == "message":
            return self.elements
        times = {"all-reduce": 2, "reduce-scatter": self.group_size}.get(self.sent_as, 1)
        return self.elements * times * (self.group_size - 1) / self.group_size

    @property
    def bytes_sent(self):
        """The bytes that each device sends, by a ring's algorithm."""
        return round(self.entries_sent * tf.as_dtype(self.dtype).size)


_seen = set()


def new_functions():
    """Return the names of TensorFlow's functions that came since the last call."""
    names = set(context.context().list_function_names())
    new = sorted(names - _seen)
    _seen.clear()
    _seen.update(names)
    return new


def mesh_collectives(function_names):
    """Return the `Collective`s of functions that DTensor has lowered.

    Args:
        function_names: names of functions of TensorFlow's context.
    """
    found = []
    for name in function_names:
        try:
            nodes = {n.name: n for n in context.context().get_function_def(name).node_def}
        except (tf.errors.NotFoundError, ValueError):  # gone in the meantime
            continue
        for node in nodes.values():
            if node.op in _OPERATIONS and not node.op.startswith("Horovod"):
                found.append(_of_node(node, nodes))
    return found


def _of_node(node, nodes):
    shape = node.attr["_output_shapes"].list.shape[0]
    size, key = (_constant(node.input[position], nodes) for position in (1, 2))
    backward = node.name.startswith((layout.GRADIENT_SCOPE, "gradient_tape/"))
    name = node.name.removeprefix(layout.GRADIENT_SCOPE).removeprefix("gradient_tape/")
    sent_as = _OPERATIONS[node.op]
    return Collective(
        kind="all-gather" if "DTensorAllGather" in node.name else sent_as,
        sent_as=sent_as,
        shape=tuple(dim.size for dim in shape.dim),
        dtype=tf.as_dtype(node.attr["T"].type).name,
        over=_axis_of(key, size),
        group_size=int(size),
        layer=name,
        backward=backward,
    )


def _constant(name, nodes):
    """Return the constant that a node's input is taken from, through slices and reshapes."""
    node = nodes.get(name.split(":")[0])
    while node is not None and node.op in ("Reshape", "Slice", "Squeeze", "Identity", "Cast"):
        node = nodes.get(node.input[0].split(":")[0])
    return tf.make_ndarray(node.attr["value"].tensor) if node is not None else np.array(0)


def _axis_of(keys, size):
    """Return the mesh axis along which devices share a group's key."""
    mesh = layout.get_mesh()
    keys = np.asarray(keys).reshape(-1)
    if keys.size == mesh.size:
        grid = keys.reshape(mesh.shape())
        along = [
            name
            for axis, name in enumerate(mesh.dim_names)
            if (grid == np.take(grid, [0], axis=axis)).all()
        ]
        if along:
            return "·".join(along)
    return "·".join(name for name in mesh.dim_names if mesh.dim_size(name) == size) or "mesh"


def horovod_collectives(graph, group_size):
    """Return the `Collective`s over Horovod of a traced graph.

    Args:
        graph: a `tf.Graph`.
        group_size: number of ranks of the data group.
    """
    found = []
    for operation in _operations(graph):
        if operation.type in _OPERATIONS and operation.type.startswith("Horovod"):
            for output in operation.outputs:
                shape = output.shape.as_list() if output.shape.rank is not None else [None]
                found.append(
                    Collective(
                        kind=_OPERATIONS[operation.type],
                        sent_as=_OPERATIONS[operation.type],
                        shape=tuple(shape),
                        dtype=output.dtype.name,
                        over="horovod",
                        group_size=group_size,
                        layer=operation.name,
                        backward=False,
                    )
                )
    return found


def _operations(graph):
    """Yield the operations of a graph and of the functions that it calls, each call's once."""
    for operation in graph.get_operations():
        yield operation
        for attribute in operation.node_def.attr.values():
            if attribute.HasField("func"):
                function = graph._get_function(attribute.func.name)
                if function is not None and getattr(function, "graph", None) is not None:
                    yield from _operations(function.graph)


@dataclasses.dataclass(frozen=True)
class CommunicationReport:
    """What a device sends in one step. Its `str` is a table.

    Args:
        collectives: tuple of `Collective`s.
        formula: dict of layer path -> elements of the all-reduces, forward and backward,
            that the theory has for it; of a reduce-scatter and an all-gather together
            under sequence parallelism.
    """

    collectives: tuple
    formula: dict = dataclasses.field(default_factory=dict)

    def of_layer(self, path):
        """Return the collectives of the layer at `path` and of those inside of it."""
        return [c for c in self.collectives if f"/{path}/" in f"/{c.layer}/"]

    @property
    def bytes_sent(self):
        """The bytes that each device sends."""
        return sum(c.bytes_sent for c in self.collectives)

    def totals(self):
        """Return, for every kind of layer, the number of collectives and the bytes sent."""
        totals = {}
        for collective in self.collectives:
            kind = layer_kind(collective.layer)
            number, sent = totals.get(kind, (0, 0))
            totals[kind] = number + 1, sent + collective.bytes_sent
        return totals

    def __str__(self):
        header = ("layer", "pass", "kind", "shape", "type", "over", "ranks", "times", "bytes sent")
        times = collections.Counter(self.collectives)
        lines = [header]
        for c, number in times.items():
            shape = "×".join("?" if size is None else str(size) for size in c.shape) or "scalar"
            direction = "update" if c.over == "horovod" else "backward" if c.backward else "forward"
            sent = f"{number * c.bytes_sent:,}" if None not in c.shape else "?"
            kind = c.kind if c.kind == c.sent_as else f"{c.kind} (as {c.sent_as})"
            lines.append(
                (c.layer, direction, kind, shape, c.dtype, c.over, c.group_size, number, sent)
            )
        lines = columns(lines)
        lines += ["", "By kind of layer:"]
        totals = [("layers", "collectives", "bytes sent")]
        totals += [(kind, n, f"{sent:,}") for kind, (n, sent) in sorted(self.totals().items())]
        lines += columns([*totals, ("all", len(self.collectives), f"{self.bytes_sent:,}")])
        if self.formula:
            lines += ["", "Blocks, entries summed over the model axis, by the theory:"]
            blocks = [("block", "theory", "sent")]
            blocks += [
                (path, f"{entries:,}", f"{self.summed_entries(path):,}")
                for path, entries in self.formula.items()
            ]
            lines += columns(blocks)
        return "\n".join(lines)

    def summed_entries(self, path):
        """Return the entries that all-reduces of a layer sum, or equal in volume, on the mesh.

        Two all-to-alls, of a reduce-scatter and of an all-gather, send what one
        all-reduce does. The shape of an all-to-all is that of all its slices.
        """
        entries = 0
        for c in self.of_layer(path):
            if c.over == "model":
                entries += c.elements if c.kind == "all-reduce" else c.elements / 2
        return round(entries)


def layer_kind(path):
    """Return a layer's path without the numbers of blocks, to sum over equal layers.

    Example:

    >>> layer_kind("encoder/block_3/attention")
    'encoder/block/attention'
    """
    return "/".join(re.sub(r"_\d+$", "", part) for part in path.split("/"))
