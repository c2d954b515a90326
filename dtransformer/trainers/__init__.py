"""Trainer, its engines, schedules and callbacks."""

import dtransformer.start  # noqa: F401 (first: it keeps notes off the terminal)
from dtransformer.trainers.checkpoint.callback import ModelCheckpoint
from dtransformer.trainers.optimizer.guard import SpikeGuard
from dtransformer.trainers.trainer import Trainer

__all__ = ["ModelCheckpoint", "SpikeGuard", "Trainer"]
