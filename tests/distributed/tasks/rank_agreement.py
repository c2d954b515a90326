"""Callbacks that change something on one rank only."""

import pathlib
import warnings

import keras
import numpy as np

import dtransformer
from dtransformer.layers import FeedForward
from dtransformer.parallel.runtime import job
from dtransformer.trainers import ModelCheckpoint, Trainer

WIDTH = 16
rng = np.random.default_rng(0)
X = rng.standard_normal((16, WIDTH)).astype("float32")
Y = rng.standard_normal((16, WIDTH)).astype("float32")


class On(keras.callbacks.Callback):
    """Calls a function of the model on one rank.

    Args:
        event: Name of a callback method.
        change: Function of the model.
        rank: Rank that calls it. A single process is rank 0.
        index: Index of the epoch or batch, or `None` for all.
    """

    def __init__(self, event, change, rank=0, index=None):
        super().__init__()
        self._is_active = job.rank() == rank
        self._index = index
        self._change = change
        setattr(self, event, self._act)

    def _act(self, index=None, logs=None):
        if self._is_active and self._index in (None, index):
            self._change(self.model)


def fit(*callbacks, epochs=3, before=lambda network: None, rate=0.1):
    """Return losses, steps, norms of the weights, warnings and the error of a training."""
    hidden = FeedForward(WIDTH, 2 * WIDTH, dropout_rate=0.0)
    network = keras.Sequential([keras.Input((WIDTH,)), hidden, keras.layers.Dense(WIDTH)])
    initial = np.random.default_rng(1)
    network.set_weights([0.3 * initial.standard_normal(w.shape) for w in network.weights])
    before(network)
    model = network if job.size() == 1 else Trainer(network)
    model.compile(keras.optimizers.SGD(rate), "mse")
    result = {"error": "", "losses": []}
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        try:
            history = model.fit(
                X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
            )
        except ValueError as error:
            result["error"] = str(error)
        else:
            result["losses"] = list(map(float, history.history["loss"]))
    messages = [str(record.message) for record in records]
    result["warnings"] = [message for message in messages if "rank" in message]
    result["steps"] = int(model.optimizer.iterations)
    result["weights"] = [float(np.abs(weight).sum()) for weight in network.get_weights()]
    return result


def set_rate(value):
    def change(model):
        model.optimizer.learning_rate = value

    return change


def halve_weights(model):
    for weight in model.network.weights:
        weight.assign(0.5 * weight)


def stop(model):
    model.stop_training = True


def freeze_on_rank_1(network):
    network.layers[-1].trainable = job.rank() != 1


def agreed(folder, layout):
    """Change learning rates on rank 0, and stop on the last rank."""
    last = job.size() - 1
    results = {
        "rates": fit(
            On("on_epoch_end", set_rate(0.05), index=0),
            On("on_epoch_end", set_rate(0.02), index=1),
            On("on_train_batch_end", StopIn(3, 1), rank=last),
            epochs=5,
        ),
        "all stop": fit(On("on_epoch_end", stop, rank=job.rank(), index=0)),
    }
    if job.size() > 1:
        folder = pathlib.Path(folder) / f"agreement-{layout.name}"

        def stops():
            return On("on_epoch_end", stop, rank=last, index=0)

        def saves(name):
            return ModelCheckpoint(folder / name, every_epochs=None)

        results["stop and save"] = fit(stops(), saves("after"))
        results["save and stop"] = fit(saves("before"), stops())
    return results


class StopIn:
    """Stops after a batch of an epoch with four batches."""

    def __init__(self, epoch, batch):
        self._calls_left = 4 * epoch + batch

    def __call__(self, model):
        self._calls_left -= 1
        if self._calls_left < 0:
            stop(model)


def refused():
    """Let the ranks' weights or trainings differ."""
    is_rank_1 = job.rank() == 1
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5 if is_rank_1 else 0.9)
    results = {
        "trained": fit(before=freeze_on_rank_1),
        "kinds": fit(rate=decay if is_rank_1 else 0.1),
        "schedules": fit(rate=decay),
        "rate within an epoch": fit(On("on_train_batch_begin", set_rate(0.02), rank=1, index=2)),
    }
    # Without a common copy of the weights, ranks cannot be compared. A mesh of two ranks computes
    # new values together, so a single rank waits until the watchdog ends the job.
    config = dtransformer.get_parallel_config()
    if config.optimizer_shard < 3 and config.model_parallel == 1:
        results["set weights"] = fit(On("on_epoch_end", halve_weights, rank=1, index=0))
    return results


TASKS = {task.__name__: task for task in (agreed, refused)}
