"""Keras and TensorFlow, started quietly: imported first by whatever needs them."""

import gc

from dtransformer.nvidia_driver import keep_compiled_kernels
from dtransformer.quiet import quiet_start

keep_compiled_kernels()

# Millions of objects are made that stay: to search them for garbage takes a fifth of the time.
_searched = gc.isenabled()
gc.disable()
try:
    with quiet_start():
        import keras  # noqa: F401
        import tensorflow

        tensorflow.config.list_physical_devices()
finally:
    if _searched:
        gc.enable()
