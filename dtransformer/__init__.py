"""dtransformer: Keras Transformers for training on many devices.

Modules that need TensorFlow are imported on first access. So `dtransformer.planner` and
`dtransformer.parallel.config.config`, which do not need it, start immediately.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING

from dtransformer import onednn
from dtransformer.quiet import quiet_tensorflow, refuse_backend
from dtransformer.registration import register_with_keras
from dtransformer.version import __version__

# Keras reads KERAS_BACKEND when it is imported. This library needs TensorFlow.
if os.environ.setdefault("KERAS_BACKEND", "tensorflow") != "tensorflow":
    refuse_backend(os.environ["KERAS_BACKEND"])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
onednn.turn_on()
quiet_tensorflow()

_keras = sys.modules.get("keras")
if hasattr(_keras, "backend") and _keras.backend.backend() != "tensorflow":
    refuse_backend(_keras.backend.backend())
register_with_keras()

if TYPE_CHECKING:
    from dtransformer.parallel.config.config import (
        EmbeddingOpParallelConfig,
        MoEConfig,
        MoEParallelConfig,
        OpParallelConfig,
        TransformerOpParallelConfig,
        TransformerRecomputeConfig,
        get_parallel_config,
        parallel_config,
        set_parallel_config,
    )
    from dtransformer.parallel.initialize import init, shutdown
    from dtransformer.parallel.keras_layers.recompute import recompute
    from dtransformer.parallel.runtime.job import (
        compiles_shapes,
        data_shard,
        is_chief,
        local_rank,
        rank,
        row_multiple,
        set_seed,
        size,
    )
    from dtransformer.trainers import Trainer

__all__ = [
    "EmbeddingOpParallelConfig",
    "MoEConfig",
    "MoEParallelConfig",
    "OpParallelConfig",
    "Trainer",
    "TransformerOpParallelConfig",
    "TransformerRecomputeConfig",
    "__version__",
    "compiles_shapes",
    "data_shard",
    "get_parallel_config",
    "init",
    "is_chief",
    "local_rank",
    "parallel_config",
    "rank",
    "recompute",
    "row_multiple",
    "set_parallel_config",
    "set_seed",
    "shutdown",
    "size",
]

# Modules that define the public names, in search order.
_MODULES = (
    "parallel.config.config",
    "parallel.runtime.job",
    "parallel.initialize",
    "parallel.keras_layers.recompute",
    "trainers",
)
_SUBPACKAGES = ("cli", "datasets", "inputs", "layers", "models", "parallel", "planner", "reports")


def __getattr__(name):
    """Import a public name or a subpackage on first access."""
    if name in (*_SUBPACKAGES, "trainers"):
        return importlib.import_module(f"dtransformer.{name}")
    if name in __all__:
        for home in _MODULES:
            if home != _MODULES[0]:
                importlib.import_module("dtransformer.start")
            module = importlib.import_module(f"dtransformer.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'dtransformer' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__, *_SUBPACKAGES})
