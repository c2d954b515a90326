"""Count the operations that TensorFlow executes, from a profile of the host."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

XLA_PROGRAM = "XLA program"
# Operations that only pass buffers on, so that a GPU launches nothing for them.
WITHOUT_KERNEL = frozenset(("AssignVariableOp", "ReadVariableOp", "Unpack", "XlaMerge"))
_PROGRAM_EVENT = "CpuExecutable::ExecuteAsyncOnStream"
_OPERATION = re.compile(r"[\w./]+:_?(?:Mkl)?(\w+)")


def count_operations(run: Callable) -> collections.Counter:
    """Return the executed operations while `run()` runs, a Counter of operation types.

    Operations inside of called functions count in every call. A program that XLA compiled counts
    once, as `XLA_PROGRAM`, and the operations in it do not count. TensorFlow does not record operations that only return metadata, constants or
    arguments, such as `Const` and `Reshape`.

    Args:
        run: Function without arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            run()
        (file,) = pathlib.Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    counts = collections.Counter()
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                match = _OPERATION.fullmatch(name)
                if match:
                    counts[match[1]] += 1
                elif name == _PROGRAM_EVENT:
                    counts[XLA_PROGRAM] += 1
    return counts
