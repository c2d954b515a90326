"""All private names of TensorFlow and Keras that the package uses.

Each docstring states the reason and the change in TensorFlow or Keras that would make the name
unnecessary. tests/test_compat.py fails if a new version removes or changes a name, or if other
folders use a private name. It also lists the private methods that subclasses override. No private
name of Horovod is used.
"""

from dtransformer._compat.dtensor_operations import *
from dtransformer._compat.keras_data import *
from dtransformer._compat.keras_internals import *
from dtransformer._compat.keras_step import *
from dtransformer._compat.optimizer_internals import *
from dtransformer._compat.tensorflow_internals import *
