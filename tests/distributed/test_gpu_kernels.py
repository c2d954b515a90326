"""Every operation of a training step has a GPU kernel, on every kind of layout.

TensorFlow's wheel also registers its GPU kernels on machines without a GPU.
"""

import collections
import functools

import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import kernels, op_def_registry

from dtransformer import _compat
from dtransformer.trainers import Trainer
from harness.layouts import parse_layout
from harness.networks import make, make_loss
from harness.training import _data
from tests.shared_runs import parametrize_runs

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
# These operations run in TensorFlow's executor, its graph passes or on the host.
NO_KERNELS = {
    *("Placeholder", "_Arg", "_Retval", "Const", "NoOp", "SymbolicGradient"),
    *("PartitionedCall", "StatefulPartitionedCall", "IfV2", "If", "StatelessIf"),
    *("While", "StatelessWhile", "Case", "StatelessCase", "RemoteCall"),
    *("Relayout", "RelayoutLike"),  # They occur in functions that DTensor has not lowered yet.
}
# Operation -> reason why it may run on the host.
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


# Transfer of a result from a GPU to the host -> reason why it is allowed.
WAITED_FOR = {
    "Cumsum -> SplitV": "token counts of the experts, if they have no capacity limit",
}


def audit(layout):
    """Train a step, and count operations without a GPU kernel and host waits for GPU results."""
    network = "moe" if layout.experts > 1 else "long_causal" if layout.context > 1 else "causal"
    model, optimizer = make(f"deep_{network}" if layout.stages > 1 else network)
    model.build()
    trainer = Trainer(model)
    trainer.compile(optimizer, make_loss(network), jit_compile=False)
    earlier_functions = set(_compat.function_names())  # Earlier runs have left these functions.
    trainer.fit(_data(network, 1, model, seed=0), verbose=0, shard=False)
    missing, waits, num_nodes = collections.Counter(), collections.Counter(), 0
    for name in set(_compat.function_names()) - earlier_functions:
        name = name.decode() if isinstance(name, bytes) else name
        if "Dataset" in name or name.startswith(
            "__wrapped"
        ):  # Functions of the input pipeline, and eager ones.
            continue
        definition = _compat.function_def(name)
        if definition is None:  # TensorFlow has deleted the function in the meantime.
            continue
        waits += host_waits(definition.node_def)
        for node in definition.node_def:
            num_nodes += 1
            if node.op not in NO_KERNELS and not has_gpu_kernel(node):
                types = [types_pb2.DataType.Name(a.type) for a in node.attr.values() if a.type]
                missing[f"{node.op}({', '.join(sorted(types))})"] += 1
    return {"missing": dict(missing), "waits": dict(waits), "nodes": num_nodes}


def has_gpu_kernel(node):
    """Return whether TensorFlow has a GPU kernel for the types of a node."""
    return host_arguments(node) is not None


def host_waits(nodes):
    """Count the places where the host waits for the result of a GPU operation.

    Args:
        nodes: List of nodes of a function.

    Returns:
        A Counter of strings "PRODUCER -> CONSUMER".
    """
    on_device = {}  # "node:result" -> name of the operation that computes it
    for node in nodes:
        is_on_device = node.op not in NO_KERNELS and "CPU" not in node.device
        if is_on_device and (host_memory := host_arguments(node)) is not None:
            for result in definition(node.op).output_arg:
                if result.name not in host_memory:
                    on_device[f"{node.name}:{result.name}"] = node.op
    waits = collections.Counter()
    for node in nodes:
        host_memory = None if node.op in NO_KERNELS else host_arguments(node)
        if host_memory and "CPU" not in node.device:
            inputs = [name for name in node.input if not name.startswith("^")]
            for name, argument in zip(inputs, input_arguments(node)):
                producer = on_device.get(name.rpartition(":")[0])
                if argument in host_memory and producer:
                    waits[f"{producer} -> {node.op}"] += 1
    return waits


definition = functools.cache(op_def_registry.get)


def input_arguments(node):
    """Yield the argument name of each input of a node, in order."""
    for argument in definition(node.op).input_arg:
        types = node.attr[argument.type_list_attr].list.type if argument.type_list_attr else [0]
        count = node.attr[argument.number_attr].i if argument.number_attr else len(types)
        yield from [argument.name] * count


def host_arguments(node):
    """Return the names of a node's arguments and results in host memory, or `None` without a kernel."""
    for types, host_memory in gpu_kernels(node.op):
        if all(set(attribute_types(node, name)) <= allowed for name, allowed in types):
            return host_memory
    return None


@functools.cache
def gpu_kernels(op):
    """List the GPU kernels of an operation.

    Each entry has the allowed types by attribute, and the names of arguments in host memory.
    """
    return [
        (
            [(c.name, set(c.allowed_values.list.type)) for c in kernel.constraint],
            set(kernel.host_memory_arg),
        )
        for kernel in kernels.get_registered_kernels_for_op(op).kernel
        if kernel.device_type in ("GPU", "DEFAULT")
    ]


def attribute_types(node, name):
    attribute = node.attr.get(name) if name in node.attr else None
    if attribute is None:
        return ()
    return [attribute.type] if attribute.type else list(attribute.list.type)


TASKS = {"audit": audit}


QUICK, LONG = ([f"{TASK}/{parse_layout(name).name}" for name in names] for names in (QUICK, LONG))


@parametrize_runs([*QUICK, *LONG], long=LONG)
def test_every_operation_of_a_training_step_has_a_gpu_kernel(run, rank_results):
    for rank in rank_results(run):
        assert rank["nodes"] > 100
        missing = {op: n for op, n in rank["missing"].items() if op not in ON_HOST}
        assert not missing


@parametrize_runs([*QUICK, *LONG], long=LONG)
def test_host_never_waits_for_gpu_results(run, rank_results):
    for rank in rank_results(run):
        assert not set(rank["waits"]) - set(WAITED_FOR)


def test_host_waits_are_detected():
    @tf.function
    def function(x):
        return tf.reshape(tf.cast(x, "int32"), [-1])

    nodes = function.get_concrete_function(tf.TensorSpec([2, 2])).function_def.node_def
    assert host_waits(nodes) == {"Cast -> Reshape": 1}


def test_operation_without_a_gpu_kernel_is_detected():
    graph = tf.Graph()
    with graph.as_default():
        text = tf.strings.join(["a", tf.strings.as_string(tf.constant(1))])
    (node,) = [node for node in graph.as_graph_def().node if node.name == text.op.name]
    assert not has_gpu_kernel(node)
    with pytest.raises(AttributeError):
        has_gpu_kernel(None)
