"""Agreement between ranks on what callbacks change: the learning rate, weights and `stop_training`."""

import os
import pathlib
import re
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.initial_broadcast import shared_shards
from dtransformer.parallel.runtime import job, stopping
from dtransformer.trainers.checkpoint.callback import ModelCheckpoint

_TOLERANCE = 1e-4
"""Relative difference of weight norms above which ranks differ. Rounding stays far below it."""

_LAYER_SUFFIX = r"_\d+(?=/|$)"
_FIX = (
    "Give every rank the same callbacks, and set learning rates, weights and `trainable` "
    "identically on all ranks."
)


class RankAgreement:
    """Checks and agreements between the ranks while `fit` runs.

    Nothing is sent within an epoch, unless a rank stops.

    Args:
        model: The trainer.
    """

    def __init__(self, model):
        self._model = model
        self._has_asked = False
        can_stop = job.size() > 1 and stopping.can_stop()
        self._gates = job.current().gates.new_purpose() if can_stop else None

    def should_stop(self):
        """Return whether all ranks stop after the current batch.

        If one rank sets `stop_training` while another is already in the next batch, both stop
        after that batch.
        """
        if self._gates is None:
            return self._model.stop_training
        if self._model.stop_training and not self._has_asked:
            self._has_asked = True
            stopping.stop_here(self._gates)
        if stopping.passes_gate(self._gates):
            return False
        self._model.stop_training = True
        return True

    def end_epoch(self):
        """Adopt rank 0's learning rate, and stop on all ranks if one has set `stop_training`."""
        agree_to_stop(self._model)
        if job.size() == 1:
            return
        rates = all_gather_json(float(self._model.optimizer.learning_rate), "learning_rates")
        rank = _first_difference(rates)
        if rank is None:
            return
        _warn(
            f"Learning rates differ: rank {rank} has {rates[rank]:.6g}, rank 0 has {rates[0]:.6g}. "
            f"All ranks continue with rank 0's value. {_FIX}"
        )
        if _rate_kind(self._model.optimizer) == "constant":
            self._model.optimizer.learning_rate = rates[0]

    def check_training(self, when):
        """Compare the learning rates, and a checksum of the weights that several ranks have.

        Args:
            when: When the ranks are compared, for the error.

        Raises:
            ValueError: If two ranks differ. All ranks raise it.
        """
        if job.size() == 1:
            return
        rate = float(self._model.optimizer.learning_rate)
        gathered = all_gather_json([rate, _checksums(self._model.network)], "checksums")
        rates, checksums = zip(*gathered)
        rank = _first_difference(rates)
        if rank is not None:
            raise ValueError(
                f"Learning rates differ {when}: rank {rank} has {rates[rank]:.6g}, rank 0 has "
                f"{rates[0]:.6g}. {_FIX} Then resume from a checkpoint."
            )
        for rank, other_rank, norms in _differing_checksums(checksums):
            raise ValueError(
                f"Weights differ {when}: their norm is {norms[0]:.6g} on rank {rank} and "
                f"{norms[1]:.6g} on rank {other_rank}. A callback has set weights or a learning rate "
                f"on one rank, or a layer sets a state from its local rows. {_FIX} Then resume "
                "from a checkpoint."
            )


class StopTogether(keras.callbacks.Callback):
    """Stops all ranks after an epoch if one rank has set `stop_training`.

    It precedes callbacks that save, because all ranks must know which epoch is the last one.
    """

    def on_epoch_end(self, epoch, logs=None):
        agree_to_stop(self.model)


def agree_to_stop(model):
    """Set `stop_training` on all ranks if it is set on one; all ranks call."""
    if job.size() == 1:
        return
    stops = all_gather_json(bool(model.stop_training), "stop_training")
    if any(stops) and not all(stops):
        _warn(
            f"`stop_training` is set on rank {stops.index(True)} but not on rank "
            f"{stops.index(False)}. All ranks stop. {_FIX}"
        )
    model.stop_training = any(stops)


def prepare_callbacks(callbacks: list) -> list:
    """Return the callbacks of a `fit` on several ranks.

    `StopTogether` is inserted before the first `ModelCheckpoint`. TensorBoard callbacks of ranks
    other than 0 write to a subfolder `rank_N`.
    """
    if job.size() == 1:
        return callbacks
    folder = f"rank_{job.rank()}"
    for callback in callbacks:
        is_tensorboard = isinstance(callback, keras.callbacks.TensorBoard)
        if is_tensorboard and not job.is_chief() and pathlib.Path(callback.log_dir).name != folder:
            callback.log_dir = os.path.join(callback.log_dir, folder)
    for i, callback in enumerate(callbacks):
        if isinstance(callback, ModelCheckpoint):
            return [*callbacks[:i], StopTogether(), *callbacks[i:]]
    return callbacks


def check_same_training(network: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Check that all ranks train the same weights with the same kind of learning rate.

    Weights are compared within each pipeline stage.

    Raises:
        ValueError: If two ranks differ. All ranks raise it.
    """
    if job.size() == 1:
        return
    # Keras numbers layer names per process, so their suffixes may differ between ranks.
    trained = [
        f"{re.sub(_LAYER_SUFFIX, '', weight.path)} (weight {i})"
        for i, weight in enumerate(network.weights)
        if weight.trainable
    ]
    first_ranks = {}
    everything = all_gather_json([job.stage()[0], trained, _rate_kind(optimizer)], "trained")
    for rank, (stage, paths, rate_kind) in enumerate(everything):
        other_rank = first_ranks.setdefault(stage, rank)
        _, other_paths, other_kind = everything[other_rank]
        if rate_kind != other_kind:
            raise ValueError(
                f"Learning rates have different types: {rate_kind} on rank {rank}, {other_kind} on rank "
                f"{other_rank}. {_FIX}"
            )
        if paths != other_paths:
            raise ValueError(
                f"Rank {rank} trains {_only(paths, other_paths)} in addition to the weights of rank "
                f"{other_rank}, which trains {_only(other_paths, paths)} in addition. {_FIX}"
            )


def _only(paths, other_paths):
    """Return at most two of the paths that are missing in another list, as a phrase."""
    extra = [path for path in paths if path not in other_paths]
    if not extra:
        return "nothing"
    return ", ".join(extra[:2]) + (", …" if len(extra) > 2 else "")


def _checksums(network):
    """Return the sum and the norm of the weights that each group of ranks shares."""
    checksums = {}
    for group, shards in shared_shards(network.weights).items():
        values = [shard.value for shard in shards if shard.value.dtype.is_floating]
        # Reduce on the device, so that only two numbers per weight are copied.
        values = [tf.cast(x, "float32") for x in values]
        sums = [(tf.reduce_sum(x), 2 * tf.nn.l2_loss(x)) for x in values]
        with tf.device("CPU:0"):
            sums = tf.reshape(sums, [-1, 2]).numpy()
        total, square = sums.astype("float64").sum(0)
        checksums[str(group.ranks)] = [total, square**0.5]
    return checksums


def _differing_checksums(checksums):
    """Yield `(rank, other_rank, norms)` for each rank that differs from the first of its group."""
    first = {}
    for rank, checksums_of_rank in enumerate(checksums):
        for group, (total, norm) in checksums_of_rank.items():
            other_rank, other_total, other_norm = first.setdefault(group, (rank, total, norm))
            tolerance = _TOLERANCE * abs(other_norm)
            received = (total, norm)
            expected = (other_total, other_norm)
            if not np.allclose(received, expected, rtol=0, atol=tolerance, equal_nan=True):
                yield rank, other_rank, (norm, other_norm)


def _first_difference(values):
    """Return the first rank whose value differs from rank 0's, or `None`."""
    for rank, value in enumerate(values):
        if not np.isclose(value, values[0], rtol=_TOLERANCE, atol=0, equal_nan=True):
            return rank
    return None


def _rate_kind(optimizer):
    rate = _compat.get_learning_rate(getattr(optimizer, "inner_optimizer", optimizer))
    return "constant" if isinstance(rate, keras.Variable) else type(rate).__name__


def _warn(message):
    if job.is_chief():
        warnings.warn(message, stacklevel=3)
