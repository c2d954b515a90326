"""Program of one device of a mesh, as DTensor lowers it for the forward and backward pass."""

import threading
import time

import keras
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

import dtransformer
from dtransformer import _compat
from dtransformer.layers import CrossEntropyLoss
from dtransformer.trainers import Trainer

_ALL_REDUCE = "CollectiveReduceV2"


def start_mesh(model_parallel, recompute):
    """Start a mesh of logical CPUs. Call this before the network is built."""
    config = dtransformer.TransformerOpParallelConfig(
        data_parallel=1, model_parallel=model_parallel, recompute=recompute
    )
    dtransformer.init(config, local_devices=model_parallel)


def lower(network, inputs, labels):
    """Return the serialized `FunctionDef` of a device's forward and backward pass.

    DTensor lowers the step when it is called, and then executes it. CPUs cannot execute calls of
    cuDNN and may crash, so the step runs in a thread, and the caller must end the process.

    Args:
        network: A network, built on the mesh.
        inputs: Int array [b, s] of ids, or a dict of arrays.
        labels: Int array [b, s].
    """
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(1e-3), CrossEntropyLoss(), jit_compile=False)
    existing = set(_compat.function_names())
    step = threading.Thread(target=trainer.train_on_batch, args=(inputs, labels), daemon=True)
    step.start()
    while True:
        is_alive = step.is_alive()
        new_names = [name for name in _compat.function_names() if name not in existing]
        for definition in map(_compat.function_def, new_names):
            if definition is not None and _is_lowered(definition):
                return definition.SerializeToString()
        if not is_alive:
            raise ValueError("DTensor has lowered no function that calls cuDNN.")
        existing.update(new_names)
        time.sleep(0.01)


def compile_lowered(serialized):
    """Return the serialized XLA module of a `FunctionDef` from `lower`, without its collectives."""
    definition = function_pb2.FunctionDef.FromString(serialized)
    return _compile(function_def_to_graph(definition))


def _is_lowered(definition):
    operations = {node.op for node in definition.node_def}
    return {_ALL_REDUCE, "XlaCallModule"} <= operations


def _compile(graph):
    """Return the serialized XLA module of a graph. Barriers replace its all-reduces."""
    definition = tf.compat.v1.GraphDef()
    inputs = {x.op.name for x in graph.inputs}
    for node in graph.as_graph_def().node:
        if node.name not in inputs:
            definition.node.append(_with_barrier(node) if node.op == _ALL_REDUCE else node)
    names = [x.name for x in graph.inputs]
    outputs = [x.name for x in graph.outputs]

    def program(*inputs):
        device_index = tf.zeros([], "int32")  # The first argument of a lowered function.
        values = dict(zip(names, [device_index, *inputs]))
        return tf.graph_util.import_graph_def(definition, values, outputs, name="")

    specs = [tf.TensorSpec(x.shape, x.dtype) for x in graph.inputs[1:]]
    program = tf.function(program, jit_compile=True, autograph=False)
    return program.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")


def _with_barrier(all_reduce):
    """Return a barrier instead of an all-reduce, so that XLA does not fuse across it."""
    barrier = tf.compat.v1.NodeDef(name=all_reduce.name, op="XlaOptimizationBarrier")
    barrier.input.append(all_reduce.input[0])
    barrier.attr["T"].list.type.append(all_reduce.attr["T"].type)
    return barrier
