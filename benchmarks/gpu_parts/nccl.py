"""Horovod's operations on this rank's GPU, inside of functions: eagerly it takes the CPU."""

import numpy as np


def operations(**_):
    """Yield whether Horovod's operations give on a GPU what they have to, and where they ran."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    if not hvd.nccl_built():
        yield {"left_out": "this Horovod was built without NCCL"}
        return
    hvd.init()
    device = "/GPU:0" if tf.config.list_physical_devices("GPU") else "/CPU:0"
    for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8", "int8"):
        if device == "/CPU:0" and dtype in ("uint8", "int8"):  # Gloo adds no bytes
            continue
        wrong, where = [], ""
        for length in (1, 7, 1000, 100003):

            @tf.function
            def compute(x, name=f"{dtype}{length}"):
                with tf.device(device):
                    return (
                        hvd.allreduce(x, op=hvd.Sum, name=f"r{name}"),
                        *hvd.grouped_allreduce([x, x + x], op=hvd.Sum, name=f"g{name}"),
                        hvd.allgather(x, name=f"a{name}")[: tf.size(x)],
                        hvd.broadcast(x, 0, name=f"b{name}"),
                    )

            x = tf.cast(tf.range(length) % 10, dtype)
            found = compute(x)
            where, size = found[0].device[-6:], hvd.size()
            for y, factor in zip(found, (size, size, 2 * size, 1, 1)):
                if not np.array_equal(np.float64(y), np.float64(x) * factor):
                    wrong.append(length)
        yield {"type": dtype, "device": where, "wrong": wrong}

    @tf.function
    def loop(a, b):
        for _ in tf.range(50):
            a = hvd.allreduce(a @ b, op=hvd.Sum, name="loop") / hvd.size()
        return a

    one = tf.eye(64)
    yield {"in_a_loop": bool(np.allclose(loop(one, one), one))}
