"""Checkpoints: the full state of a run, saved on one layout and restored on any other.

`training_state` says which tensors a run consists of, and what a rank holds of each; `writer` plans
which rank writes what, and writes it; `reader` restores; `folders`, `manifest` and
`saved_checkpoint` know how it lies on the disk.
"""

from dtransformer.trainers.checkpoint.export import export
from dtransformer.trainers.checkpoint.saved_checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.training_state import TrainingState

__all__ = ["Checkpoint", "TrainingState", "export"]
