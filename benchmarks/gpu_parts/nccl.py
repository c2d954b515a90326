"""Check Horovod's operations on the GPU inside `tf.function`. Eager calls use the CPU."""

import numpy as np


def operations(**_):
    """Yield the device of Horovod's operations and the lengths with wrong results, by dtype."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    if not hvd.nccl_built():
        yield {"left_out": "this Horovod was built without NCCL"}
        return
    hvd.init()
    device = "/GPU:0" if tf.config.list_physical_devices("GPU") else "/CPU:0"
    for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8", "int8"):
        if device == "/CPU:0" and dtype in ("uint8", "int8"):  # Gloo cannot sum 8-bit integers.
            continue
        wrong, device_name = [], ""
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
            results = compute(x)
            device_name, size = results[0].device[-6:], hvd.size()
            for y, factor in zip(results, (size, size, 2 * size, 1, 1)):
                if not np.array_equal(np.float64(y), np.float64(x) * factor):
                    wrong.append(length)
        yield {"type": dtype, "device": device_name, "wrong": wrong}

    @tf.function
    def loop(a, b):
        for _ in tf.range(50):
            a = hvd.allreduce(a @ b, op=hvd.Sum, name="loop") / hvd.size()
        return a

    identity = tf.eye(64)
    yield {"in_a_loop": bool(np.allclose(loop(identity, identity), identity))}
