"""Checkpoints: the complete state of a run, which every layout can load.

- `training_state`: the tensors of a run, and this rank's shards of them.
- `writer`: plans which rank writes which shards, and writes them.
- `reader`: restores a checkpoint.
- `folders`, `manifest` and `saved_checkpoint`: files and folders of a checkpoint.
- `export`: weights in Keras' and safetensors files.
"""

from dtransformer.trainers.checkpoint.export import export
from dtransformer.trainers.checkpoint.saved_checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.training_state import TrainingState

__all__ = ["Checkpoint", "TrainingState", "export"]
