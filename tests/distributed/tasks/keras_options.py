"""Data and options of Keras that plain models train with, on one process and on several."""

import math
import pathlib

import keras
import numpy as np

from dtransformer.layers import TransformerEncoder
from dtransformer.parallel.runtime import job
from dtransformer.trainers import ModelCheckpoint, Trainer
from dtransformer.trainers.checkpoint.folders import step_folder
from dtransformer.trainers.row_sharding import RowSharding
from tests.distributed.tasks.keras_fit import CLASS, CLASSES, NO_DROPOUT, VALUE, WIDTH, X

X, CLASS, VALUE = X[:16], CLASS[:16, 0], VALUE[:16, 0, 0]
ROW_WEIGHTS = (np.arange(16) % 3 / 2).astype("float32")
CLASS_WEIGHTS = {0: 0.5, 1: 1.0, 2: 2.0, 3: 0.0}


class Batches(keras.utils.PyDataset):
    """Two batches, with weights of their rows."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return X[rows], CLASS[rows], ROW_WEIGHTS[rows]


def generated():
    for index in range(2):
        yield Batches()[index]


class Smallest(keras.metrics.Metric):
    """The smallest output so far."""

    state_reduction = "min"

    def __init__(self, name="smallest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "ones", name="value")

    def update_state(self, labels, outputs, sample_weight=None):
        self.value.assign(keras.ops.minimum(self.value, keras.ops.min(outputs)))

    def result(self):
        return keras.ops.copy(self.value)  # as of now: validation goes on with the state


def classifier(**of_a_layer):
    """A model of Keras' layers and ours, which is cloned once; layouts shard its weights."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH, 3))
    x = TransformerEncoder(2, 16, 2, 32, **NO_DROPOUT)(keras.layers.Dense(16)(inputs))
    x = keras.layers.Dense(32, "tanh", **of_a_layer)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return Trainer(clone) if job.size() > 1 or job.mesh() is not None else clone


def compiled(optimizer, **of_a_layer):
    model = classifier(**of_a_layer)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer, classes, metrics=["accuracy", Smallest()], weighted_metrics=["accuracy"]
    )
    return model


def outputs_of(model):
    return np.asarray(model.predict(X, batch_size=8, verbose=0))


def data():
    """A `PyDataset`, generators and arrays, with weights of rows and of classes."""
    outputs = {}
    for name, options in {
        "dataset": {"x": Batches(), "validation_data": Batches()},
        "generator": {"x": generated(), "validation_data": generated(), "validation_steps": 2},
        "classes": {"x": X, "y": CLASS, "class_weight": CLASS_WEIGHTS, "batch_size": 8},
    }.items():
        keras.backend.clear_session()
        model = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
        history = model.fit(**options, verbose=0, shuffle=False).history
        outputs[f"outputs/{name}"] = outputs_of(model)
        names = [name for name in history if "loss" in name or "acc" in name or "small" in name]
        names = sorted({*names} - {"step_loss"})
        outputs[f"outputs/{name}/logs"] = np.array([history[name] for name in names])
        if job.data_shard()[1] > 1:
            own = np.asarray(RowSharding(True).local_rows([X])[0])
            share = np.asarray(model.predict(own, batch_size=4, verbose=0, shard=False))
            np.testing.assert_allclose(
                share, RowSharding(True).local_rows([outputs[f"outputs/{name}"]])[0], atol=1e-6
            )
    return {"history": {}, "evaluation": {}, **outputs}


def trained(optimizer, x=X, callbacks=(), **of_a_layer):
    """Train three epochs; return their number, and the outputs."""
    keras.backend.clear_session()
    model = compiled(optimizer, **of_a_layer)
    fitted = model.fit(
        x, CLASS, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks)
    )
    outputs = {"outputs/epochs": np.array(len(fitted.epoch))}
    return {"history": {}, "evaluation": {}, **outputs, "outputs/0": outputs_of(model)}


def averaging():
    return keras.optimizers.Adam(
        0.05, epsilon=1e-3, global_clipnorm=0.5, use_ema=True, ema_momentum=0.5
    )


class OfAverages(keras.callbacks.Callback):
    """Keeps the outputs of averages after the first epoch, which goes on with the weights."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            return
        if isinstance(self.model, Trainer):
            with self.model.averaged_weights():
                self.outputs = outputs_of(self.model)
            return
        variables, before = self.model.trainable_variables, self.model.get_weights()
        for variable, own in zip(variables, self.model.optimizer._model_variables_moving_average):
            variable.assign(own)
        self.outputs = outputs_of(self.model)
        self.model.set_weights(before)


def averages(folder, layout):
    """Weights that are averaged, looked at, saved and resumed, and set to the average at the end."""
    look, place = OfAverages(), pathlib.Path(folder) / f"averages-{layout.name}"
    is_alone = job.size() == 1 and job.mesh() is None
    saving = [] if is_alone else [ModelCheckpoint(place, keep=None)]
    result = trained(averaging(), callbacks=[look, *saving])
    result |= {"outputs/averages": look.outputs, "outputs/resumed": result["outputs/0"]}
    if not is_alone:
        resumed = compiled(averaging())
        resumed.fit(
            *(X, CLASS),
            batch_size=8,
            epochs=3,
            verbose=0,
            shuffle=False,
            resume=place / step_folder(4),
        )
        result["outputs/resumed"] = outputs_of(resumed)
    return result


def constraint():
    """A weight that is projected after each step."""
    adam = keras.optimizers.Adam(0.05, epsilon=1e-3, clipvalue=0.01)
    return trained(adam, kernel_constraint=keras.constraints.MaxNorm(0.5))


def a_loss_that_is_nan():
    """A run that ends at its second batch, of which one rank's rows are nan."""
    x = np.where(np.arange(16)[:, None, None] == 15, np.float32(math.nan), X)
    result = trained(keras.optimizers.SGD(0.1), x, [keras.callbacks.TerminateOnNaN()])
    del result["outputs/0"]
    return result


TASKS = {task.__name__: task for task in (data, averages, constraint, a_loss_that_is_nan)}
