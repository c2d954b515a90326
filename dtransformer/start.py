"""Keras and TensorFlow, started quietly: imported first by whatever needs them."""

import os

from dtransformer.garbage import garbage_waits
from dtransformer.quiet import quiet_start

# TensorFlow's wheel has no machine code for newer GPUs: the driver compiles kernels, some for
# minutes, and keeps them in a cache whose size is too small for all by default.
os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(4 << 30))

with quiet_start(), garbage_waits():
    import keras  # noqa: F401
    import tensorflow

    tensorflow.config.list_physical_devices()
