"""Horovod's operations on this rank's GPU: each kernel that it launches, and NCCL of one rank."""

import numpy as np


def operations(**_):
    """Yield whether Horovod's operations give on a GPU what they have to."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    if not hvd.nccl_built():
        yield {"left_out": "this Horovod was built without NCCL"}
        return
    hvd.init()
    for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8", "int8"):
        wrong = []
        for length in (1, 7, 1000, 100003):
            x = tf.cast(tf.range(length) % 10, dtype)
            scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, name=f"{dtype}{length}")
            grouped = hvd.grouped_allreduce(
                [x, x + x], op=hvd.Sum, prescale_factor=2.0, name=f"g{dtype}{length}"
            )
            gathered = hvd.allgather(x, name=f"a{dtype}{length}")
            for found, factor in ((scaled, 2), (grouped[0], 2), (grouped[1], 4), (gathered, 1)):
                expected = np.float64(x) * factor * (1 if found is gathered else hvd.size())
                if not np.array_equal(np.float64(found)[:length], expected):
                    wrong.append(length)
        yield {"type": dtype, "device": scaled.device[-6:], "wrong": wrong}

    @tf.function
    def loop(a, b):
        for _ in tf.range(50):
            a = hvd.allreduce(a @ b, op=hvd.Sum, name="loop") / hvd.size()
        return a

    one = tf.eye(64)
    yield {"in_a_loop": bool(np.allclose(loop(one, one), one))}
