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
_WITHOUT_KERNEL = ("AssignVariableOp", "ReadVariableOp", "Unpack", "XlaMerge", XLA_PROGRAM)
_PROGRAM_EVENT = "CpuExecutable::ExecuteAsyncOnStream"
_OPERATION = re.compile(r"([\w./]+):_?(?:Mkl)?(\w+)")


def count_operations(run: Callable, scope: str = "") -> collections.Counter:
    """Return the executed operations while `run()` runs, a Counter of operation types.

    Operations inside of called functions count in every call. A program that XLA compiled counts
    once, as `XLA_PROGRAM`, and the operations in it do not count. TensorFlow does not record
    operations that only return metadata, constants or arguments, such as `Const` and `Reshape`.

    Args:
        run: Function without arguments.
        scope: Beginning of the names of counted operations. Defaults to all names.
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
                if match and match[1].startswith(scope):
                    counts[match[2]] += 1
                elif name == _PROGRAM_EVENT:
                    counts[XLA_PROGRAM] += 1
    return counts


def counts_by_block(count: Callable, sizes: tuple[int, int]) -> tuple[dict, dict]:
    """Return the counts of a block and the counts of everything else.

    Args:
        count: Function of the number of blocks that returns a Counter.
        sizes: Two numbers of blocks to compare.
    """
    small, large = map(count, sizes)
    per_block = {op: (large[op] - small[op]) / (sizes[1] - sizes[0]) for op in large}
    return per_block, {op: small[op] - sizes[0] * per_block[op] for op in large}


def sums(counts: dict) -> dict:
    """Return the number of executed operations, of XLA's programs and of kernels outside of them."""
    executed = sum(counts.values())
    kernels = executed - sum(counts.get(op, 0) for op in _WITHOUT_KERNEL)
    return {"executed": executed, "programs": counts.get(XLA_PROGRAM, 0), "kernels": kernels}
