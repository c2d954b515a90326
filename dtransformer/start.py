"""Keras and TensorFlow, started quietly: imported first by whatever needs them."""

from dtransformer.garbage import garbage_waits
from dtransformer.nvidia_driver import keep_compiled_kernels
from dtransformer.quiet import quiet_start

keep_compiled_kernels()

with quiet_start(), garbage_waits():
    import keras  # noqa: F401
    import tensorflow

    tensorflow.config.list_physical_devices()
