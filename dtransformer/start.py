"""Import Keras and TensorFlow quietly. Import this module before any of them."""

import gc

from dtransformer.nvidia_driver import keep_compiled_kernels
from dtransformer.quiet import quiet_start

keep_compiled_kernels()

# The imports create millions of permanent objects. Garbage collection would take a fifth of the
# time.
_collects_garbage = gc.isenabled()
gc.disable()
try:
    with quiet_start():
        import keras  # noqa: F401
        import tensorflow

        tensorflow.config.list_physical_devices()
finally:
    if _collects_garbage:
        gc.enable()
