"""Changes by the host: what callbacks set on one rank alone, such as a learning rate or weights.

Ranks compare what they have when an epoch begins and ends, and when training ends; nothing is sent
in between. What was set in between is rank 0's from then on; ranks that have trained apart are an
error.
"""

import os
import pathlib
import re
import warnings

import keras
import numpy as np
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.initial_broadcast import initial_broadcast, shared_shards
from dtransformer.parallel.runtime import job, stopping
from dtransformer.parallel.weights.sharded_variable import ShardedVariable
from dtransformer.trainers.checkpoint.callback import ModelCheckpoint

_TOLERANCE = 1e-4  # of a norm: what ranks round differently is far less
_RATE, _KIND, _WEIGHTS, _SET, _TRAINED, _STOP = "rate", "kind", "weights", "set", "trained", "stop"
_VARIABLE = "a variable"
_NUMBER = r"_\d+(?=/|$)"
_MEND = (
    "give every rank the same callbacks, and set learning rates, weights and `trainable` on all "
    "ranks alike"
)


def with_host_changes(callbacks: list) -> list:
    """Return a `fit`'s callbacks with those that keep ranks alike.

    Ranks agree on `stop_training` before a checkpoint is saved, which all of them have to do, and
    once more when all callbacks have been called. Each has a folder of its own for TensorBoard.
    """
    if job.size() == 1:
        return callbacks
    own = f"rank_{job.rank()}"
    for one in callbacks:
        is_tensorboard = isinstance(one, keras.callbacks.TensorBoard)
        if is_tensorboard and not job.is_chief() and pathlib.Path(one.log_dir).name != own:
            one.log_dir = os.path.join(one.log_dir, own)
    saving = [isinstance(one, ModelCheckpoint) for one in callbacks]
    first = saving.index(True) if any(saving) else len(callbacks)
    agree = [AgreedStop()] * any(saving)
    return [Drift(), *callbacks[:first], *agree, *callbacks[first:], HostChanges()]


class Drift(keras.callbacks.Callback):
    """Before an epoch's other callbacks, sees that ranks have trained alike.

    Raises:
        ValueError: they have other rates or weights, on every rank.
    """

    def on_epoch_end(self, epoch, logs=None):
        for field, ranks, values in differences(_rate_and_weights(self.model)):
            raise ValueError(
                f"after epoch {epoch + 1} {_say(field, ranks, values)}: they have trained apart, or "
                f"a layer sets a state from its own rows; {_MEND}, and go on from a checkpoint"
            )


class AgreedStop(keras.callbacks.Callback):
    """Lets all ranks stop after an epoch where one does."""

    def on_epoch_end(self, epoch, logs=None):
        for found in differences({_STOP: str(bool(self.model.stop_training))}):
            _tell(*found)
            self.model.stop_training = True


class HostChanges(AgreedStop):
    """After other callbacks, lets all ranks have what rank 0 has, and stop where one does.

    Raises:
        ValueError: ranks train other weights, or some have set weights of which each has shards;
            on every rank.
    """

    def on_train_begin(self, logs=None):
        self._gates = job.current().gates.new_purpose() if stopping.can_stop() else None
        self._stops = self._all_stop = False

    def on_epoch_begin(self, epoch, logs=None):
        self._compare()

    def on_train_batch_end(self, batch, logs=None):
        self._pass_gate()

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self._all_stop = self.model.stop_training

    def on_train_end(self, logs=None):
        self._compare()

    def _pass_gate(self):
        """Stop where any rank does: at this batch, or at the next where another is there already."""
        if self._gates is None:
            return
        if self.model.stop_training and not (self._stops or self._all_stop):
            self._stops = True
            stopping.stop_here(self._gates)
        self._all_stop = self.model.stop_training = not stopping.passes_gate(self._gates)

    def _compare(self):
        own = {**_rate_and_weights(self.model), **_trained(self.model), **_set(self.model)}
        found = differences({**own, _STOP: str(self._stops)})
        for field, ranks, values in found:
            is_fixed = field == _RATE and own[_KIND] != _VARIABLE
            if is_fixed or field.startswith((_KIND, _TRAINED, _SET)):
                raise ValueError(f"{_say(field, ranks, values)}: {_MEND}")
            _tell(field, ranks, values)
        fields = {field.partition(" ")[0]: values for field, _, values in found}
        if _RATE in fields:
            self.model.optimizer.learning_rate = fields[_RATE][0][0]
        if _WEIGHTS in fields:
            initial_broadcast(self.model.network.variables, [])


def check_trained_alike(trainer) -> None:
    """Check that the ranks train the same weights, before they send any.

    Raises:
        ValueError: they do not; on every rank.
    """
    for found in differences(_trained(trainer)) if job.size() > 1 else ():
        raise ValueError(f"{_say(*found)}: {_MEND}")


def differences(own: dict) -> list[tuple[str, list[int], list]]:
    """Return what ranks have that differs: the field, two ranks, and their values.

    Args:
        own: for each field a text; or numbers, of which the last one is the scale of differences.
            Ranks that have the same field are to have the same.
    """
    first, found = {}, {}
    for rank, theirs in enumerate(all_gather_json(own, "host_changes")):
        for field, value in theirs.items():
            other, expected = first.setdefault(field, (rank, value))
            if field not in found and not _same(value, expected):
                found[field] = [other, rank], [expected, value]
    return [(field, *both) for field, both in found.items()]


def _same(value, expected):
    if isinstance(value, str):
        return value == expected
    tolerance = _TOLERANCE * abs(expected[-1])
    return bool(np.isclose(value, expected, rtol=0, atol=tolerance, equal_nan=True).all())


def _rate_and_weights(trainer):
    """Return the learning rate, and for each group of ranks the sum and the norm of what it shares."""
    rate = float(trainer.optimizer.learning_rate)
    sums = {}
    for group, shards in shared_shards(trainer.network.weights).items():
        values = [shard.value for shard in shards if shard.value.dtype.is_floating]
        values = [tf.cast(x, "float32") for x in values]  # where they are: two numbers leave
        of_each = [(tf.reduce_sum(x), 2 * tf.nn.l2_loss(x)) for x in values]
        with tf.device("CPU:0"):
            of_each = tf.reshape(of_each, [-1, 2]).numpy()
        total, square = of_each.astype("float64").sum(0)
        sums[f"{_WEIGHTS} of {group.ranks}"] = [total, square**0.5]
    return {_RATE: [rate, rate], **sums}


def _trained(trainer):
    """Return what is trained, by the pipeline's stage, and of which kind the rate is.

    Keras numbers names by how many layers a process has made, which need not be as many.
    """
    weights = enumerate(trainer.network.weights)
    trained = [f"{re.sub(_NUMBER, '', w.path)} (#{i})" for i, w in weights if w.trainable]
    optimizer = getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)
    rate = _compat.learning_rate_of(optimizer)
    kind = _VARIABLE if isinstance(rate, keras.Variable) else type(rate).__name__
    return {f"{_TRAINED} by stage {job.stage()[0]}": ", ".join(trained), _KIND: kind}


def _set(trainer):
    """Return how often sharded weights were set since this was asked last."""
    weights = [v for v in trainer.network.weights if isinstance(v, ShardedVariable)]
    count = sum(v.num_assigned for v in weights)
    before, trainer.num_weights_set = trainer.num_weights_set, count
    return {f"{_SET} by stage {job.stage()[0]}": str(count - before)}


def _say(field, ranks, values):
    """Return in which way two ranks differ, as a clause."""
    (first, rank), (expected, value) = ranks, values
    kind = field.partition(" ")[0]
    if kind == _STOP:
        return f"stop_training is set on rank {rank if value == str(True) else first} alone"
    if kind == _TRAINED:
        expected, value = _only(expected, value), _only(value, expected)
    elif kind in (_RATE, _WEIGHTS):
        expected, value = (f"{numbers[0]:.6g}" for numbers in (expected, value))
    whose, has = {
        _RATE: ("the learning rate of", "is"),
        _KIND: ("the learning rate of", "is"),
        _WEIGHTS: ("the sum over the weights of", "is"),
        _SET: ("the number of sharded weights that were set on", "is"),
        _TRAINED: ("of the weights that not all train,", "trains"),
    }[kind]
    return f"{whose} rank {rank} {has} {value}, and {whose} rank {first} {has} {expected}"


def _only(paths, others):
    """Return what is in one listing alone, in short."""
    own = [path for path in paths.split(", ") if path not in others.split(", ")]
    return ", ".join(own[:2]) + ", …" * (len(own) > 2) or "none of them"


def _tell(field, ranks, values):
    if not job.is_chief():
        return
    all_have = "all ranks stop" if field == _STOP else "all ranks have rank 0's now"
    warnings.warn(f"{_say(field, ranks, values)}: {all_have}; {_MEND}", stacklevel=2)
