"""Audit of the collectives that a compiled function really sends, with their bytes.

On the mesh they are read from the functions that DTensor has lowered for the devices,
after all of its passes; between data-parallel ranks from the operations of the traced graph.
"""

import collections
import dataclasses
import math
import re

import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.ops.custom_gradient import GRADIENT_SCOPE
from dtransformer.parallel.runtime import job
from dtransformer.planner.formulas import ring_elements

# TensorFlow's and Horovod's operations -> what they do.
_OPERATIONS = {
    "CollectiveReduceV2": "all-reduce",
    "CollectiveReduceScatterV2": "reduce-scatter",
    "CollectiveGatherV2": "all-gather",
    "CollectiveAllToAllV2": "all-to-all",
    "HorovodAllreduce": "all-reduce",
    "HorovodGroupedAllreduce": "all-reduce",
    "HorovodAllgather": "all-gather",
    "HorovodGroupedAllgather": "all-gather",
    "HorovodReducescatter": "reduce-scatter",
    "HorovodGroupedReducescatter": "reduce-scatter",
    "HorovodAlltoall": "all-to-all",
    "HorovodBroadcast": "broadcast",
}

# What the names of gradients begin with, and the rest of a name.
_IN_GRADIENT = re.compile(rf"((?:{GRADIENT_SCOPE}|gradients/|gradient_tape/)*)(.*)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step.

    Args:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "broadcast";
            or "send/recv", of one pipeline stage to another.
        sent_as: the kind that it is carried out as: on CPUs DTensor's own all-gather is an
            all-reduce of a padded buffer.
        shape: shape of the result on a device, or of what it sends in an uneven all-to-all;
            None for a dimension that is not known before it runs.
        dtype: name of its type.
        over: the mesh axis, "stages", or "ranks" for what Horovod carries.
        group_size: number of devices, or ranks, that take part.
        layer: path of the layer; the name of the operation elsewhere.
        backward: whether it belongs to a gradient.
        sends: number of elements that this rank sends, where it sends each rank another number;
            None where all ranks send as many.
    """

    kind: str
    sent_as: str
    shape: tuple
    dtype: str
    over: str
    group_size: int
    layer: str
    backward: bool
    sends: int | None = None

    @property
    def elements(self):
        """The number of elements of the result; 0 where it is not known."""
        return 0 if None in self.shape else math.prod(self.shape)

    @property
    def elements_sent(self):
        """The number of elements that each device sends, by a ring's algorithm."""
        if self.sends is not None:
            return self.sends
        if self.kind == "send/recv":
            return self.elements
        whole = self.elements * (self.group_size if self.sent_as == "reduce-scatter" else 1)
        return ring_elements(self.sent_as, whole, self.group_size)

    @property
    def bytes_sent(self):
        """The bytes that each device sends, by a ring's algorithm."""
        return round(self.elements_sent * tf.as_dtype(self.dtype).size)


def mesh_collectives(function_names, calls):
    """Return the `Collective`s of functions that DTensor has lowered.

    Args:
        function_names: names of functions of TensorFlow's context.
        calls: of functions that were copied into them, see `recording_block_calls`.
    """
    found = []
    for name in function_names:
        try:
            nodes = {n.name: n for n in _compat.function_def(name).node_def}
        except (tf.errors.NotFoundError, ValueError):  # gone in the meantime
            continue
        own = [
            node
            for node in nodes.values()
            if node.op in _OPERATIONS
            and not node.op.startswith("Horovod")
            and not node.attr["T"].placeholder  # TensorFlow's function of an operation run eagerly
        ]
        names = _told_apart([node.name for node in own], calls)
        found += [_of_node(node, nodes, name) for node, name in zip(own, names)]
    return found


def _told_apart(names, calls):
    """Return names of a function's collectives, with the callers of what was copied into it.

    A collective is there as often as its block is called, in this order; in gradients from the last
    block to the first. Only a number at the end of its name, which TensorFlow gives, differs.
    """
    copies = collections.defaultdict(list)
    for place, name in enumerate(names):
        copies[re.sub(r"(_\d+)*$", "", name)].append(place)
    result = list(names)
    for name, places in copies.items():
        gradient, name = _IN_GRADIENT.match(name).groups()
        scope, _, rest = name.partition("/")
        callers = calls.get(scope, [])[:: -1 if gradient else 1]
        for number, place in enumerate(places) if callers else ():
            caller = callers[number * len(callers) // len(places)]
            result[place] = f"{gradient}{caller}/{rest}"
    return result


def _of_node(node, nodes, name):
    shape = node.attr["_output_shapes"].list.shape[0]
    size, key = (_constant(node.input[position], nodes) for position in (1, 2))
    gradient, name = _IN_GRADIENT.match(name).groups()
    sent_as = _OPERATIONS[node.op]
    return Collective(
        kind="all-gather" if "DTensorAllGather" in node.name else sent_as,
        sent_as=sent_as,
        shape=tuple(dim.size for dim in shape.dim),
        dtype=tf.as_dtype(node.attr["T"].type).name,
        over=_axis_of(key, size),
        group_size=int(size),
        layer=name,
        backward=bool(gradient),
    )


def _constant(name, nodes):
    """Return the constant that a node's input is taken from, through slices and reshapes."""
    node = nodes.get(name.split(":")[0])
    while node is not None and node.op in ("Reshape", "Slice", "Squeeze", "Identity", "Cast"):
        node = nodes.get(node.input[0].split(":")[0])
    return tf.make_ndarray(node.attr["value"].tensor) if node is not None else np.array(0)


def _axis_of(keys, size):
    """Return the mesh axis along which devices share a group's key."""
    mesh = job.mesh()
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


def rank_collectives(graph):
    """Return the `Collective`s of ranks, outside of meshes, of a traced graph, a `tf.Graph`."""
    found = []
    for operation in _operations(graph):
        if operation.type in _OPERATIONS:
            sizes, group = _sizes_sent(operation), _group_of(operation)
            outputs = operation.outputs if sizes is None else operation.outputs[:1]
            for output in outputs:
                shape = output.shape.as_list() if output.shape.rank is not None else [None]
                shape, sends = (shape, None) if sizes is None else ([sum(sizes)], sum(sizes))
                if sends is not None:  # what is this rank's stays
                    sends -= sizes[sorted(group.ranks).index(job.rank())]
                kind, where = _OPERATIONS[operation.type], ("ranks", group.size, operation.name)
                found.append(
                    Collective(kind, kind, tuple(shape), output.dtype.name, *where, False, sends)
                )
    return found


def _sizes_sent(operation):
    """Return the numbers of elements of an uneven all-to-all, by rank; None of other operations."""
    if operation.type != "HorovodAlltoall":
        return None
    splits = tf.get_static_value(operation.inputs[1])
    return None if splits is None or not len(splits) else [int(size) for size in splits]


def _group_of(operation):
    """Return the `Group` of this rank that an operation is over; by default the data-parallel one."""
    if not operation.type.startswith("Horovod"):
        return job.data_parallel_group()
    number = operation.get_attr("process_set_id")
    groups = job.data_parallel_group(), job.model_parallel_group(), job.pipeline_group()
    for group in groups:
        if group.process_set is not None and group.process_set.process_set_id == number:
            return group
    return groups[0]


def _operations(graph):
    """Yield the operations of a graph and of the functions that it calls, each call's once."""
    for operation in graph.get_operations():
        yield operation
        for attribute in operation.node_def.attr.values():
            if attribute.HasField("func"):
                inner = _compat.graph_of_function(graph, attribute.func.name)
                if inner is not None:
                    yield from _operations(inner)
