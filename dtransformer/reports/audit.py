"""Audit of the collectives that a compiled function runs, with their bytes.

Collectives on the mesh are read from the functions that DTensor lowered for the devices, after all
of its passes. Collectives between data-parallel ranks are read from the traced graph.
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

# Collectives of TensorFlow's and Horovod's operations.
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

# Splits the name of an operation into the prefix of gradients and the rest.
_IN_GRADIENT = re.compile(rf"((?:{GRADIENT_SCOPE}|gradients/|gradient_tape/)*)(.*)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a training step.

    Args:
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "broadcast", or
            "send/recv" between pipeline stages.
        sent_as: Kind of the collective that implements it. For example, on CPUs DTensor
            implements an all-gather as an all-reduce of a padded buffer.
        shape: Shape of the result on a device. For an uneven all-to-all, the shape of the sent
            tensor. Unknown dimensions are `None`.
        dtype: Name of the dtype.
        over: Mesh axis, "stages", or "ranks" for Horovod.
        group_size: Number of participating devices or ranks.
        layer: Path of the layer, or the operation's name outside layers.
        backward: Boolean, whether it belongs to the backward pass.
        sends: Number of elements that this rank sends in an uneven all-to-all, otherwise `None`.
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
        """Number of elements of the result, 0 if it is unknown."""
        return 0 if None in self.shape else math.prod(self.shape)

    @property
    def elements_sent(self):
        """Number of elements that each device sends in a ring."""
        if self.sends is not None:
            return self.sends
        if self.kind == "send/recv":
            return self.elements
        elements = self.elements * (self.group_size if self.sent_as == "reduce-scatter" else 1)
        return ring_elements(self.sent_as, elements, self.group_size)

    @property
    def bytes_sent(self):
        """Number of bytes that each device sends in a ring."""
        return round(self.elements_sent * tf.as_dtype(self.dtype).size)


def mesh_collectives(function_names, calls):
    """Return the collectives of functions that DTensor has lowered.

    Args:
        function_names: Names of functions in TensorFlow's context. Deleted ones are skipped.
        calls: Dict from scopes to the callers of shared functions, see `recording_block_calls`.

    Returns:
        A list of `Collective`s.
    """
    collectives = []
    for name in function_names:
        definition = _compat.function_def(name)
        if definition is None:
            continue
        nodes_by_name = {node.name: node for node in definition.node_def}
        collective_nodes = [
            node
            for node in nodes_by_name.values()
            if node.op in _OPERATIONS
            and not node.op.startswith("Horovod")
            and not node.attr["T"].placeholder  # Eager operations have generic functions.
        ]
        names = _add_caller_paths([node.name for node in collective_nodes], calls)
        collectives += [
            _mesh_collective(node, nodes_by_name, name)
            for node, name in zip(collective_nodes, names)
        ]
    return collectives


def _add_caller_paths(names, calls):
    """Return the names of collectives, with the caller's path if their block is shared.

    A shared block's collective appears once per call, in the order of the calls, or in reverse
    order for gradients. The copies differ only in the numeric suffix that TensorFlow appends.
    """
    copies = collections.defaultdict(list)
    for place, name in enumerate(names):
        copies[re.sub(r"(_\d+)*$", "", name)].append(place)
    result = list(names)
    for name, places in copies.items():
        gradient, name = _IN_GRADIENT.match(name).groups()
        scope, _, rest = name.partition("/")
        callers = calls.get(scope, [])[:: -1 if gradient else 1]
        for index, place in enumerate(places) if callers else ():
            caller = callers[index * len(callers) // len(places)]
            result[place] = f"{gradient}{caller}/{rest}"
    return result


def _mesh_collective(node, nodes, name):
    shape = node.attr["_output_shapes"].list.shape[0]
    size, key = (_constant(node.input[position], nodes) for position in (1, 2))
    gradient, name = _IN_GRADIENT.match(name).groups()
    sent_as = _OPERATIONS[node.op]
    return Collective(
        kind="all-gather" if "DTensorAllGather" in node.name else sent_as,
        sent_as=sent_as,
        shape=tuple(dim.size for dim in shape.dim),
        dtype=tf.as_dtype(node.attr["T"].type).name,
        over=_shared_axis(key, size),
        group_size=int(size),
        layer=name,
        backward=bool(gradient),
    )


def _constant(name, nodes):
    """Return the constant that a node's input is computed from by slicing, reshaping or casting."""
    node = nodes.get(name.split(":")[0])
    while node is not None and node.op in ("Reshape", "Slice", "Squeeze", "Identity", "Cast"):
        node = nodes.get(node.input[0].split(":")[0])
    return tf.make_ndarray(node.attr["value"].tensor) if node is not None else np.array(0)


def _shared_axis(keys, size):
    """Return the mesh axis along which all devices have the same group key.

    If no axis matches, return the axes of the given size, joined by "·", or "mesh".
    """
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
    """Return the collectives between ranks in a traced `tf.Graph`, outside meshes."""
    collectives = []
    for operation in _iterate_operations(graph):
        if operation.type in _OPERATIONS:
            sizes = _split_sizes(operation)
            group = _process_group(operation)
            outputs = operation.outputs if sizes is None else operation.outputs[:1]
            for output in outputs:
                shape = output.shape.as_list() if output.shape.rank is not None else [None]
                shape, sends = (shape, None) if sizes is None else ([sum(sizes)], sum(sizes))
                if sends is not None:  # The local part of an all-to-all is not sent.
                    sends -= sizes[sorted(group.ranks).index(job.rank())]
                kind = _OPERATIONS[operation.type]
                where = ("ranks", group.size, operation.name)
                collectives.append(
                    Collective(kind, kind, tuple(shape), output.dtype.name, *where, False, sends)
                )
    return collectives


def _split_sizes(operation):
    """Return the number of elements sent to each rank by an all-to-all, or `None` if unknown."""
    if operation.type != "HorovodAlltoall":
        return None
    splits = tf.get_static_value(operation.inputs[1])
    return None if splits is None or not len(splits) else [int(size) for size in splits]


def _process_group(operation):
    """Return the process group of an operation. Defaults to the data-parallel group."""
    if not operation.type.startswith("Horovod"):
        return job.data_parallel_group()
    process_set_id = operation.get_attr("process_set_id")
    groups = job.data_parallel_group(), job.model_parallel_group(), job.pipeline_group()
    for group in groups:
        if group.process_set is not None and group.process_set.process_set_id == process_set_id:
            return group
    return groups[0]


def needed_operations(graph):
    """Return the set of operations that a function's results need. TensorFlow skips the others."""
    pending = [x.op for x in graph.outputs] + list(graph.control_outputs)
    needed = set()
    while pending:
        operation = pending.pop()
        if operation not in needed:
            needed.add(operation)
            pending += [x.op for x in operation.inputs] + list(operation.control_inputs)
    return needed


def _iterate_operations(graph):
    """Yield the operations that run in a graph, and in called functions once per call."""
    runs = needed_operations(graph)
    for operation in graph.get_operations():
        if operation not in runs:
            continue
        yield operation
        for attribute in operation.node_def.attr.values():
            if attribute.HasField("func"):
                inner = _compat.get_function_graph(graph, attribute.func.name)
                if inner is not None:
                    yield from _iterate_operations(inner)
