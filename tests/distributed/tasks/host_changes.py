"""What callbacks of one rank alone change, done by Keras where there is one process."""

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
    """Calls a function of the model at a moment of epochs, on one rank alone.

    Args:
        moment: name of a callback's method.
        change: a function of the model.
        rank: on which rank; alone, every process is rank 0.
        number: of the epoch or batch; None for all.
    """

    def __init__(self, moment, change, rank=0, number=None):
        super().__init__()
        self.is_own, self.number, self.change = job.rank() == rank, number, change
        setattr(self, moment, self._act)

    def _act(self, number=None, logs=None):
        if self.is_own and self.number in (None, number):
            self.change(self.model)


def fit(*callbacks, epochs=3, before=lambda network: None, rate=0.1):
    """Return losses, the weights' norms, what is warned of and what is refused."""
    first = FeedForward(WIDTH, 2 * WIDTH, dropout_rate=0.0)
    network = keras.Sequential([keras.Input((WIDTH,)), first, keras.layers.Dense(WIDTH)])
    begin = np.random.default_rng(1)
    network.set_weights([0.3 * begin.standard_normal(w.shape) for w in network.weights])
    before(network)
    model = network if job.size() == 1 else Trainer(network)
    model.compile(keras.optimizers.SGD(rate), "mse")
    result = {"error": "", "losses": []}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            history = model.fit(
                X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
            )
        except ValueError as error:
            result["error"] = str(error)
        else:
            result["losses"] = list(map(float, history.history["loss"]))
    result["told"] = [str(one.message) for one in told if "rank" in str(one.message)]
    result["steps"] = int(model.optimizer.iterations)
    result["weights"] = [float(np.abs(weight).sum()) for weight in network.get_weights()]
    return result


def rate_to(value):
    def change(model):
        model.optimizer.learning_rate = value

    return change


def halve(model):
    """Set weights that every rank has in full, but on a mesh."""
    layer = getattr(model, "network", model).layers[-1]
    layer.set_weights([0.5 * weight for weight in layer.get_weights()])


def clear(model):
    """Set weights of which each rank may have a shard, without reading them."""
    for weight in model.network.weights:
        weight.assign(np.zeros(weight.shape, "float32"))


def stop(model):
    model.stop_training = True


def freeze_on_rank_1(network):
    network.layers[-1].trainable = job.rank() != 1


def kept(folder, layout):
    """Let rank 0 change what all then have, and rank 1 what it then loses; the last rank stops."""
    last = job.size() - 1
    apart = fit(
        On("on_epoch_end", rate_to(0.05), number=0),
        On("on_epoch_begin", rate_to(0.2), number=1),
        On("on_epoch_end", rate_to(0.9), rank=1, number=1),
        On("on_epoch_end", halve, number=2),
        On("on_train_batch_end", StopIn(3, 1), rank=last),
        On("on_train_end", halve),
        epochs=5,
    )
    found = {"apart": apart}
    found["all stop"] = fit(On("on_epoch_end", stop, rank=job.rank(), number=0))
    if job.size() > 1:  # the last epoch's checkpoint, whoever knows that it is the last
        stops = lambda: On("on_epoch_end", stop, rank=last, number=0)
        folder = pathlib.Path(folder) / layout.name
        saves = lambda name: ModelCheckpoint(folder / name, every_epochs=None)
        found["stop and save"] = fit(stops(), saves("after"))
        found["save and stop"] = fit(saves("before"), stops())
    return found


class StopIn:
    """Stops after a batch within an epoch, of four batches each."""

    def __init__(self, epoch, batch):
        self.calls_left = 4 * epoch + batch

    def __call__(self, model):
        self.calls_left -= 1
        if self.calls_left < 0:
            stop(model)


def refused():
    """Let ranks train apart."""
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5 if job.rank() == 1 else 0.9)
    found = {
        "rate within an epoch": fit(On("on_train_batch_begin", rate_to(0.02), rank=1, number=2)),
        "schedules": fit(rate=decay),
        "trained": fit(before=freeze_on_rank_1),
    }
    if dtransformer.get_parallel_config().optimizer_shard == 3:
        found["weights"] = fit(On("on_epoch_end", clear, rank=1, number=0))
    return found


TASKS = {task.__name__: task for task in (kept, refused)}
