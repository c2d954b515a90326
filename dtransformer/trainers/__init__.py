"""How a step is run: the trainer, its engines, schedules and callbacks."""

from dtransformer.trainers.checkpoint.callback import ModelCheckpoint
from dtransformer.trainers.trainer import Trainer

__all__ = ["ModelCheckpoint", "Trainer"]
