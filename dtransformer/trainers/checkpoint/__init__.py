"""Checkpoints: the whole state of a run, saved on one layout and restored on any other."""

from dtransformer.trainers.checkpoint.export import export
from dtransformer.trainers.checkpoint.files import Checkpoint

__all__ = ["Checkpoint", "export"]
