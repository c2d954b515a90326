"""Checkpoints of a training run: weights, optimizer states, position in the data."""

import math
from collections.abc import Callable, Mapping

from dtransformer.parallel.runtime import job
from dtransformer.trainers.checkpoint.reader import restore
from dtransformer.trainers.checkpoint.writer import CheckpointWriter


class Checkpoints:
    """Saves and restores the full state of a run, on any layout.

    Args:
        program: The trainer's `Program`.
    """

    def __init__(self, program):
        self._program = program
        self._writer = CheckpointWriter()
        self._get_position = _unknown_position
        self._get_callback_states = dict

    def track(self, get_position: Callable | None, get_callback_states: Callable = dict):
        """Save this position and these states of callbacks with the next checkpoints.

        Args:
            get_position: Function that returns the position in the data as a dict. `None` if the
                position is unknown.
            get_callback_states: Function that returns more `assets`, see `Trainer.save`.
        """
        self._get_position = get_position or _unknown_position
        self._get_callback_states = get_callback_states

    def save(
        self,
        path,
        overwrite: bool,
        wait: bool,
        replicas: bool,
        assets: Mapping | None,
        metrics: Mapping | None,
    ) -> None:
        """Save a checkpoint; see `Trainer.save`."""
        finite_metrics = {
            name: float(value) if math.isfinite(value) else None
            for name, value in (metrics or {}).items()
        }
        info = {"position": self._get_position(), "metrics": finite_metrics}
        with job.record_activity("saving"):
            self._writer.start(
                path,
                self._program.training_state(),
                info,
                overwrite=overwrite,
                replicas=replicas,
                assets={**(assets or {}), **self._get_callback_states()},
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            InputError: If it could not be written.
        """
        with job.record_activity("saving"):
            self._writer.finish()

    def restore(self, path, strict: bool, weights_only: bool, check: Callable | None):
        """Restore a checkpoint; see `Trainer.restore`."""
        self.wait()
        seed = job.seed()
        with job.record_activity("saving"):
            state = self._program.training_state()
            restored = restore(state, path, strict, weights_only, check)
        if job.seed() != seed:
            self._program.recompile()  # Steps were traced with the previous seed.
        self.track(None if weights_only else lambda: restored.position)
        return restored


def _unknown_position():
    return None
