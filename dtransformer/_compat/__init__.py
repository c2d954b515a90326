"""Every private name of TensorFlow, Keras and Horovod that the package uses: none elsewhere.

Each has its reason, and what would make it unnecessary. tests/test_compat.py fails for each
one that a new version has taken away or changed, and for each one that is used past this folder.
Of Horovod none is used. What subclasses of Keras' classes override of these is listed there, too.
"""

from dtransformer._compat.of_keras import *
from dtransformer._compat.of_optimizers import *
from dtransformer._compat.of_tensorflow import *
