"""Promise: what a training step computes has kernels for GPUs, on every kind of layout.

TensorFlow's wheel registers its GPU kernels on machines without one, too.
"""

import collections
import functools

import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import kernels, op_def_registry

from dtransformer import _compat
from dtransformer.trainers import Trainer
from harness.layouts import layout_of
from harness.networks import loss_of, make
from harness.training import _data
from tests.shared_runs import each

TASK = "tests.distributed.test_gpu_kernels:audit"
QUICK = "cp2@1x2+ring pp2m4-1f1b@2x1+bf16".split()
LONG = (
    "dp2ep2@2x1 alone@1x1+bf16 dp2@2x1+shard3 mp2@1x2+rows+sp "
    "alone@1x1 pp2m4-1f1b@2x1 alone@1x1+fp16 dp2@2x1 dp2@2x1+bf16 dp2@2x1+fp16 "
    "dp2@2x1+shard3+bf16 dp2@2x1+shard3+fp16 "
    "mp2@1x2 mp2@1x2+bf16 mp2@1x2+fp16 mp2@1x2+sp+bf16 cp2@1x2+ring+bf16 cp2@1x2+ulysses "
    "mp2@1x2+sp+fp16 cp2@1x2+ring+fp16 dp2ep2@2x1+bf16 dp2ep2@2x1+fp16 "
    "pp2m4-zb_h1@2x1 pp2m4-1f1b@2x1+fp16"
).split()
# What TensorFlow's executor, its graph passes or the host do by themselves.
NO_KERNELS = {
    *("Placeholder", "_Arg", "_Retval", "Const", "NoOp", "SymbolicGradient"),
    *("PartitionedCall", "StatefulPartitionedCall", "IfV2", "If", "StatelessIf"),
    *("While", "StatelessWhile", "Case", "StatelessCase", "RemoteCall"),
    *("Relayout", "RelayoutLike"),  # of functions that DTensor has not lowered yet
}
# Operation -> why it may be the host's.
ON_HOST = {
    "MatMul(DT_INT32)": "a device's place on the mesh, by DTensor; a card has run it",
    "Relu(DT_INT32)": "the same",
    "Timestamp()": "a clock, for the throughput",
    "PyFuncStateless()": "the same",
    "PyFunc()": "few numbers that CPU ranks send over sockets",
    **{
        f"Fingerprint({dtype})": "a hash of the batch, computed on the host, where the batch is"
        for dtype in ("DT_FLOAT", "DT_INT32", "DT_INT64", "DT_UINT8")
    },
}


# What the host takes of a GPU's results -> why it may.
WAITED_FOR = {
    "Cumsum -> SplitV": "how many tokens each expert takes, where their number has no bound",
}


def audit(layout):
    """Train a step; return which operations have no GPU kernel, and for which ones the host waits."""
    network = "moe" if layout.experts > 1 else "long_causal" if layout.context > 1 else "causal"
    model, optimizer = make(f"deep_{network}" if layout.stages > 1 else network)
    model.build()
    trainer = Trainer(model)
    trainer.compile(optimizer, loss_of(network), jit_compile=False)
    of_others = set(_compat.function_names())  # which runs before this one have left
    trainer.fit(_data(network, 1, model, seed=0), verbose=0, shard=False)
    missing, waits, number = collections.Counter(), collections.Counter(), 0
    for name in set(_compat.function_names()) - of_others:
        name = name.decode() if isinstance(name, bytes) else name
        if "Dataset" in name or name.startswith("__wrapped"):  # the input pipeline's; eager ones
            continue
        try:
            nodes = _compat.function_def(name).node_def
        except (tf.errors.NotFoundError, ValueError):  # gone in the meantime
            continue
        waits += host_waits(nodes)
        for node in nodes:
            number += 1
            if node.op not in NO_KERNELS and not has_gpu_kernel(node):
                types = [types_pb2.DataType.Name(a.type) for a in node.attr.values() if a.type]
                missing[f"{node.op}({', '.join(sorted(types))})"] += 1
    return {"missing": dict(missing), "waits": dict(waits), "nodes": number}


def has_gpu_kernel(node):
    """Return whether TensorFlow has a kernel of a node's types for GPUs."""
    return host_arguments(node) is not None


def host_waits(nodes):
    """Return how often the host takes what a GPU computes, "PRODUCER -> CONSUMER": it waits for it.

    Args:
        nodes: the nodes of a function.
    """
    on_device = {}  # "node:result" -> what computes it
    for node in nodes:
        of_device = node.op not in NO_KERNELS and "CPU" not in node.device
        if of_device and (host := host_arguments(node)) is not None:
            for result in definition(node.op).output_arg:
                if result.name not in host:
                    on_device[f"{node.name}:{result.name}"] = node.op
    found = collections.Counter()
    for node in nodes:
        host = None if node.op in NO_KERNELS else host_arguments(node)
        if host and "CPU" not in node.device:
            inputs = [name for name in node.input if not name.startswith("^")]
            for name, argument in zip(inputs, input_arguments(node)):
                producer = on_device.get(name.rpartition(":")[0])
                if argument in host and producer:
                    found[f"{producer} -> {node.op}"] += 1
    return found


definition = functools.cache(op_def_registry.get)


def input_arguments(node):
    """Return the names of the arguments that a node's inputs are of, in their order."""
    for argument in definition(node.op).input_arg:
        types = node.attr[argument.type_list_attr].list.type if argument.type_list_attr else [0]
        number = node.attr[argument.number_attr].i if argument.number_attr else len(types)
        yield from [argument.name] * number


def host_arguments(node):
    """Return which arguments and results of a node are in the host's memory; None without a kernel."""
    for types, host in gpu_kernels(node.op):
        if all(set(types_of(node, name)) <= allowed for name, allowed in types):
            return host
    return None


@functools.cache
def gpu_kernels(op):
    """Return of each kernel for GPUs the types it takes, by attribute, and what the host has of it."""
    return [
        (
            [(c.name, set(c.allowed_values.list.type)) for c in kernel.constraint],
            set(kernel.host_memory_arg),
        )
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
        if kernel.device_type in ("GPU", "DEFAULT")
    ]


def types_of(node, name):
    attribute = node.attr.get(name) if name in node.attr else None
    if attribute is None:
        return ()
    return [attribute.type] if attribute.type else list(attribute.list.type)


TASKS = {"audit": audit}


QUICK, LONG = ([f"{TASK}/{layout_of(name).name}" for name in names] for names in (QUICK, LONG))


@each([*QUICK, *LONG], long=LONG)
def test_every_operation_of_a_step_has_a_gpu_kernel(run, ranks_of):
    for rank in ranks_of(run):
        assert rank["nodes"] > 100
        missing = {op: n for op, n in rank["missing"].items() if op not in ON_HOST}
        assert not missing


@each([*QUICK, *LONG], long=LONG)
def test_the_host_waits_for_no_result_of_a_gpu(run, ranks_of):
    for rank in ranks_of(run):
        assert not set(rank["waits"]) - set(WAITED_FOR)


def test_a_wait_of_the_host_is_found():
    @tf.function
    def function(x):
        return tf.reshape(tf.cast(x, "int32"), [-1])

    nodes = function.get_concrete_function(tf.TensorSpec([2, 2])).function_def.node_def
    assert host_waits(nodes) == {"Cast -> Reshape": 1}


def test_an_operation_without_one_is_found():
    graph = tf.Graph()
    with graph.as_default():
        text = tf.strings.join(["a", tf.strings.as_string(tf.constant(1))])
    (node,) = [node for node in graph.as_graph_def().node if node.name == text.op.name]
    assert not has_gpu_kernel(node)
    with pytest.raises(AttributeError):
        has_gpu_kernel(None)
