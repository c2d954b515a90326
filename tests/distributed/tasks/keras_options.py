"""Train plain Keras models with Keras' kinds of data and options, in one process and on ranks."""

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
    """Two batches with sample weights."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(8 * index, 8 * index + 8)
        return X[rows], CLASS[rows], ROW_WEIGHTS[rows]


def generated():
    for index in range(2):
        yield Batches()[index]


class Smallest(keras.metrics.Metric):
    """Metric of the smallest output."""

    state_reduction = "min"

    def __init__(self, name="smallest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "ones", name="value")

    def update_state(self, labels, outputs, sample_weight=None):
        self.value.assign(keras.ops.minimum(self.value, keras.ops.min(outputs)))

    def result(self):
        return keras.ops.copy(self.value)  # Validation changes the state later.


def classifier(**layer_options):
    """Return a clone of a model with Keras layers and ours, whose weights layouts shard."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((WIDTH, 3))
    x = TransformerEncoder(2, 16, 2, 32, **NO_DROPOUT)(keras.layers.Dense(16)(inputs))
    x = keras.layers.Dense(32, "tanh", **layer_options)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return Trainer(clone) if job.size() > 1 or job.mesh() is not None else clone


def compiled(optimizer, **layer_options):
    model = classifier(**layer_options)
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer, classes, metrics=["accuracy", Smallest()], weighted_metrics=["accuracy"]
    )
    return model


def predict_outputs(model):
    return np.asarray(model.predict(X, batch_size=8, verbose=0))


def data():
    """Train on a `PyDataset`, generators and arrays, with sample weights and class weights."""
    outputs = {}
    for name, options in {
        "dataset": {"x": Batches(), "validation_data": Batches()},
        "generator": {"x": generated(), "validation_data": generated(), "validation_steps": 2},
        "classes": {"x": X, "y": CLASS, "class_weight": CLASS_WEIGHTS, "batch_size": 8},
    }.items():
        keras.backend.clear_session()
        model = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
        history = model.fit(**options, verbose=0, shuffle=False).history
        outputs[f"outputs/{name}"] = predict_outputs(model)
        names = [name for name in history if "loss" in name or "acc" in name or "small" in name]
        names = sorted({*names} - {"step_loss"})
        outputs[f"outputs/{name}/logs"] = np.array([history[name] for name in names])
        if job.data_shard()[1] > 1:
            local_x = np.asarray(RowSharding(True).local_rows([X])[0])
            local_outputs = np.asarray(model.predict(local_x, batch_size=4, verbose=0, shard=False))
            np.testing.assert_allclose(
                local_outputs,
                RowSharding(True).local_rows([outputs[f"outputs/{name}"]])[0],
                atol=1e-6,
            )
    return {"history": {}, "evaluation": {}, **outputs}


def trained(optimizer, x=X, callbacks=(), **layer_options):
    """Train three epochs and return the number of epochs and the outputs."""
    keras.backend.clear_session()
    model = compiled(optimizer, **layer_options)
    fitted = model.fit(
        x, CLASS, batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=list(callbacks)
    )
    outputs = {"outputs/epochs": np.array(len(fitted.epoch))}
    return {"history": {}, "evaluation": {}, **outputs, "outputs/0": predict_outputs(model)}


def averaging():
    return keras.optimizers.Adam(
        0.05, epsilon=1e-3, global_clipnorm=0.5, use_ema=True, ema_momentum=0.5
    )


class AveragesCallback(keras.callbacks.Callback):
    """Callback that stores the outputs of averaged weights after the first epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch:
            return
        if isinstance(self.model, Trainer):
            with self.model.averaged_weights():
                self.outputs = predict_outputs(self.model)
            return
        variables, before = self.model.trainable_variables, self.model.get_weights()
        for variable, average in zip(
            variables, self.model.optimizer._model_variables_moving_average
        ):
            variable.assign(average)
        self.outputs = predict_outputs(self.model)
        self.model.set_weights(before)


def averages(folder, layout):
    """Train with averaged weights: predict with them, save and resume, and set them at the end."""
    averages_callback, folder_path = (
        AveragesCallback(),
        pathlib.Path(folder) / f"averages-{layout.name}",
    )
    is_alone = job.size() == 1 and job.mesh() is None
    saving = [] if is_alone else [ModelCheckpoint(folder_path, keep=None)]
    result = trained(averaging(), callbacks=[averages_callback, *saving])
    result |= {
        "outputs/averages": averages_callback.outputs,
        "outputs/resumed": result["outputs/0"],
    }
    if not is_alone:
        resumed = compiled(averaging())
        resumed.fit(
            *(X, CLASS),
            batch_size=8,
            epochs=3,
            verbose=0,
            shuffle=False,
            resume=folder_path / step_folder(4),
        )
        result["outputs/resumed"] = predict_outputs(resumed)
    return result


def constraint():
    """Train with a weight constraint, which projects the weight after each step."""
    adam = keras.optimizers.Adam(0.05, epsilon=1e-3, clipvalue=0.01)
    return trained(adam, kernel_constraint=keras.constraints.MaxNorm(0.5))


def a_loss_that_is_nan():
    """Stop at the second batch, where one rank has NaN rows."""
    x = np.where(np.arange(16)[:, None, None] == 15, np.float32(math.nan), X)
    result = trained(keras.optimizers.SGD(0.1), x, [keras.callbacks.TerminateOnNaN()])
    del result["outputs/0"]
    return result


TASKS = {task.__name__: task for task in (data, averages, constraint, a_loss_that_is_nan)}
