"""dtransformer: Keras models of Transformers, trained on many devices."""

import os

from dtransformer.quiet import quiet_start, refuse_backend

# Keras reads its backend when it is first imported; this library needs TensorFlow's.
if os.environ.setdefault("KERAS_BACKEND", "tensorflow") != "tensorflow":
    refuse_backend(os.environ["KERAS_BACKEND"])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

with quiet_start():
    import keras
    import tensorflow

    tensorflow.config.list_physical_devices()

if keras.backend.backend() != "tensorflow":  # it was imported before
    refuse_backend(keras.backend.backend())

from dtransformer.parallel.config import (
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
from dtransformer.parallel.job import (
    compiles_shapes,
    data_shard,
    init,
    is_chief,
    local_rank,
    rank,
    rows_multiple_of,
    set_seed,
    shutdown,
    size,
)
from dtransformer.trainers import Trainer
from dtransformer.version import __version__

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
    "rows_multiple_of",
    "set_parallel_config",
    "set_seed",
    "shutdown",
    "size",
]
