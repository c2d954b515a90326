"""Describe the GPU and measure the peak speed of products and of memory."""

import ctypes
import subprocess
import time

import numpy as np
import tensorflow as tf

from benchmarks.gpu_parts import alone

_QUERIED = "name,driver_version,memory.total,clocks.max.sm,power.limit"
_LIBRARIES = {  # Library -> function that returns its version.
    "libcudart.so.12": "cudaRuntimeGetVersion",
    "libcuda.so.1": "cuDriverGetVersion",
    "libnccl.so.2": "ncclGetVersion",
}


def describe(**_):
    """Yield the GPU, versions, and the seconds of the first call of some operations."""
    try:
        command = ["nvidia-smi", f"--query-gpu={_QUERIED}", "--format=csv,noheader"]
        card = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        card = None
    gpus = tf.config.list_physical_devices("GPU")
    built = tf.sysconfig.get_build_info()
    yield {
        "card": card,
        "gpus": [tf.config.experimental.get_device_details(gpu) for gpu in gpus],
        "tensorflow": tf.version.VERSION,
        "built_for": {k: v for k, v in built.items() if k.endswith("_version")},
        "found": {name: _version(name, function) for name, function in _LIBRARIES.items()},
        "horovod": _horovod(),
    }
    x = tf.random.normal([256, 256])
    for name, operation in {
        "matmul": lambda: tf.matmul(x, x),
        "matmul_bf16": lambda: tf.matmul(tf.cast(x, "bfloat16"), tf.cast(x, "bfloat16")),
        "softmax": lambda: tf.nn.softmax(x),
        "reduce_sum": lambda: tf.reduce_sum(x, 0),
        "gelu": lambda: tf.nn.gelu(x),
        "gather": lambda: tf.gather(x, [1, 2, 3]),
        "xla": tf.function(lambda: tf.nn.softmax(x * 2), jit_compile=True, autograph=False),
    }.items():
        start_time = time.perf_counter()
        operation().numpy()
        yield {"first": name, "seconds": time.perf_counter() - start_time}


def _version(library, function):
    try:
        version = ctypes.c_int()
        getattr(ctypes.CDLL(library), function)(ctypes.byref(version))
        return version.value
    except (OSError, AttributeError) as error:
        return str(error)


def _horovod():
    try:
        import horovod.tensorflow as hvd

        return {"nccl": hvd.nccl_built(), "gloo": hvd.gloo_built()}
    except ImportError as error:
        return str(error)


def peaks(smoke, **_):
    """Yield operations per second of large products and bytes per second of copies."""
    size, times = (256, 2) if smoke else (8192, 20)
    for name, dtype, has_tf32 in (
        ("bfloat16", "bfloat16", True),
        ("float16", "float16", True),
        ("tf32", "float32", True),
        ("float32", "float32", False),
    ):
        tf.config.experimental.enable_tensor_float_32_execution(has_tf32)
        x, y = (_random([size, size], dtype) / size**0.5 for _ in range(2))
        yield {
            "product": f"{size}^3",
            "type": name,
            "tflops": [2e-12 * size**3 / s for s in _seconds(lambda z: tf.matmul(z, y), x, times)],
        }
    x = _random([1 << (16 if smoke else 28)], "float32")
    moved = 2e-9 * x.shape[0] * 4
    yield {"copy": "1 GB", "GB_per_s": [moved / s for s in _seconds(lambda z: z + 1.0, x, times)]}
    host = np.ones(x.shape[0] // 4, "float32")
    start_time = time.perf_counter()
    device = tf.identity(tf.constant(host))
    float(device[0])
    copied_to_device = time.perf_counter()
    device.numpy()
    copied_to_host = time.perf_counter()
    gigabytes = host.nbytes * 1e-9
    yield {
        "to_device_GB_per_s": gigabytes / (copied_to_device - start_time),
        "to_host": gigabytes / (copied_to_host - copied_to_device),
    }


def _random(shape, dtype):
    return tf.cast(tf.random.normal(shape), dtype)


def _seconds(operation, x, times):
    """Apply an operation repeatedly to its result, and return the seconds per call in three rounds."""
    rounds = []
    with alone():
        for _ in range(4):  # The first round loads kernels.
            y = x
            float(tf.reshape(y, [-1])[0])
            start_time = time.perf_counter()
            for _ in range(times):
                y = operation(y)
            float(tf.cast(tf.reshape(y, [-1])[0], "float32"))
            rounds.append((time.perf_counter() - start_time) / times)
    return rounds[1:]
