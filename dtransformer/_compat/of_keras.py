"""Private names of Keras."""

import contextlib
import functools
import itertools
import re
import traceback
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import compute_output_spec as compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.name_scope import current_path as current_path
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope
from keras.src.backend.common.variables import AutocastScope
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers import compile_utils
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    data_adapter_utils,
    py_dataset_adapter,
    tf_dataset_adapter,
)
from keras.src.utils.naming import to_snake_case as to_snake_case

from dtransformer._compat.of_optimizers import meanwhile

_BEFORE = re.compile(r"^.*Error encountered:\n\n", re.DOTALL)


# Keras: variables.


def stateless_value(variable: keras.Variable):
    """Return what a variable is in the `keras.StatelessScope` around; None without one.

    A variable that lies in shards has no tensor that Keras could replace by itself.
    Unnecessary if Keras could be asked for the current scope; it exports the class alone.
    """
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def autocast(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Return a value of a variable in the type that the layer around computes with.

    Unnecessary if the current autocast type were public.
    """
    return variable._maybe_autocast(value)


def without_autocast() -> contextlib.AbstractContextManager:
    """Inside the `with` block variables are read in the type that they are stored in.

    Recomputation reads them before the layer's own cast. Unnecessary as `autocast`.
    """
    return AutocastScope(None)


def variable_key(variable: tf.Variable) -> str:
    """Return what Keras' optimizers know a `tf.Variable` by.

    A flat shard of a weight takes the weight's place in an optimizer. Unnecessary if the
    optimizer took any object with a shape and a dtype.
    """
    return variable._unique_id


def known_as(value: tf.Tensor, name: str) -> tf.Tensor:
    """Return a variable's value, by which Keras' optimizers know the variable.

    They know the one inside of a Keras variable, and some have shards there. Unnecessary if
    `exclude_from_weight_decay` knew a Keras variable by itself.
    """
    if tf.executing_eagerly():
        value._unique_id = name
    return value


@contextlib.contextmanager
def without_values():
    """Inside the `with` block Keras variables are made that have shapes, and never values.

    Unnecessary if a layer could tell the shapes of its weights before it is built.
    """
    name = "uninitialized_variables"  # to which Keras would give values later
    before = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(name, before)


def makes_values() -> bool:
    """Return whether variables get values here, which `without_values` prevents.

    Unnecessary if a `keras.StatelessScope` could be asked for publicly.
    """
    scope = get_stateless_scope()
    return scope is None or scope.initialize_variables


# Keras: layers and models.


def flat_layers(layer: keras.layers.Layer, include_self=True, recursive=True) -> list:
    """Return a layer and all layers inside of it, the outer ones first.

    `keras.Model.layers` has the direct ones only, other layers have nothing. Unnecessary if
    layers could be walked publicly.
    """
    return layer._flatten_layers(include_self=include_self, recursive=recursive)


def own_variables(layer: keras.layers.Layer) -> list:
    """Return a layer's variables without those of layers inside. Unnecessary as `flat_layers`."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_trainable_variables(layer: keras.layers.Layer) -> list:
    """Return those of `own_variables` made to be trained, frozen or not. Unnecessary as they."""
    return list(layer._trainable_variables)


def take_weights(layer: keras.layers.Layer) -> None:
    """Let a layer that is built take weights, or be built once more, with them.

    A pipeline stage finds out after the build that it needs a copy of another stage's table;
    adapters come to kernels that are there, as with Keras' own `enable_lora`. Unnecessary if Keras
    let a built layer take weights when `built` is set to False.
    """
    layer._tracker.unlock()


def forget_weight(layer: keras.layers.Layer, variable: keras.Variable) -> None:
    """Let a layer's own variable be its weight no more. Unnecessary with an opposite of `add_weight`."""
    layer._untrack_variable(variable)


def replace_layer(owner: keras.layers.Layer, name: str, layer: keras.layers.Layer | None) -> None:
    """Put another layer, or None, in the place of one that an owner has as an attribute.

    Keras keeps layers that were replaced, and their weights. Unnecessary if setting did not.
    """
    old = getattr(owner, name)
    owner._tracker.unlock()
    if old is not None:
        owner._tracker.untrack(old)
    setattr(owner, name, layer)


def drop_value(layer: keras.layers.Layer, variable: keras.Variable, read: Callable) -> None:
    """Let one of a layer's own variables have a shape and no value, and not be its weight.

    Another pipeline stage has it. Keras itself makes such variables in a `keras.StatelessScope`,
    to be given values at the scope's end. Unnecessary if Keras had layers without values, as
    PyTorch has by its meta device.

    Args:
        layer: the layer.
        variable: one of `own_variables`.
        read: a function of (shape, dtype) that is called where its value is read.
    """
    layer._untrack_variable(variable)
    waiting = global_state.get_global_attribute("uninitialized_variables", [])
    waiting[:] = [other for other in waiting if other is not variable]
    variable._value, variable._initializer = None, read


def dropped_value(variable: keras.Variable):
    """Return what is read of a variable without a value, or None. Unnecessary as `drop_value`."""
    read = variable._initializer
    return None if read is None else read(variable._shape, variable._dtype)


def compile_options(model: keras.Model) -> dict:
    """Return the arguments of a model's last `compile`; empty if there was none.

    Unnecessary if `get_compile_config` returned the objects, not their configs.
    """
    return model._compile_config.config if model.compiled else {}


def adds_losses(layer: keras.layers.Layer) -> bool:
    """Return whether a layer has added a loss since it was traced in a `keras.StatelessScope`.

    Unnecessary if the scope said whose losses it has collected.
    """
    return bool(layer._loss_ids)


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return the mask that a Keras layer or loss has left with its result; None without one.

    Unnecessary if `keras.layers.Masking`'s protocol had a public function to read it.
    """
    return getattr(tensor, "_keras_mask", None)


def with_mask(tensor: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Return a tensor with a mask for the layer or loss that takes it. Unnecessary as `mask_of`."""
    tensor._keras_mask = mask
    return tensor


def masks_of(tensors) -> dict[int, tf.Tensor]:
    """Return the masks of nested tensors, a dict by the numbers of the tensors that have one.

    A mask is an attribute, which is lost where tensors go into a function, come out of it, or are
    sent. Unnecessary as `mask_of`.
    """
    masks = {i: mask_of(x) for i, x in enumerate(tf.nest.flatten(tensors))}
    return {i: mask for i, mask in masks.items() if mask is not None}


def with_masks(tensors, masks: dict[int, tf.Tensor]):
    """Return nested tensors with the masks that `masks_of` has found. Unnecessary as `mask_of`."""
    flat = tf.nest.flatten(tensors)
    for number, mask in masks.items():
        flat[number] = with_mask(tf.identity(flat[number]), mask)
    return tf.nest.pack_sequence_as(tensors, flat)


class CompileLoss(compile_utils.CompileLoss):
    """Keras' way from the losses given to `compile` to the losses of the outputs.

    Unnecessary if Keras said which loss is that of which output.

    Args:
        loss, loss_weights: as `keras.Model.compile` takes them.
        output_names: list of the names of the outputs, or None.
        term: a function of a loss and its name that returns what is computed instead of it.
    """

    def __init__(self, loss, loss_weights, output_names, term):
        super().__init__(loss, loss_weights, output_names=output_names)
        self._term = term

    def __setattr__(self, name, value):
        super().__setattr__(name, _OfOne() if name == "_flat_losses" and value == [] else value)

    def build(self, y_true, y_pred):
        super().build(y_true, y_pred)
        self._flat_losses = [
            one._replace(loss=self._term(one.loss, one.name)) for one in self._flat_losses
        ]

    @property
    def metrics(self):
        return [None] * len(self._flat_losses or [None])


class _OfOne(list):
    """A list that says it has one element: of more Keras would make metrics, in any graph."""

    def __len__(self):
        return 1


# `current_path` is that of the name scopes around, from which a weight's path follows before the
# weight is made. Unnecessary if Keras gave an initializer the path of its variable.

# `compute_output_spec` gives the shapes and types of what a function of `keras.KerasTensor`s returns.
# Unnecessary if Keras exported it, as it does the method of a layer.

# `in_symbolic_scope` says whether Keras asks for shapes alone; a sharded weight is then not made
# whole. Unnecessary as `stateless_value`.

# `to_snake_case` is how Keras makes a layer's name of its class, which is undone for names
# that are the same in every process. Unnecessary if Keras said which names it has made up.

# `train_validation_split` is what `fit` divides arrays with; the trainer has to know the rows that
# are trained with before Keras does. Unnecessary if Keras exported it.
train_validation_split = array_slicing.train_validation_split


def with_class_weights(dataset: tf.data.Dataset, class_weight: dict) -> tf.data.Dataset:
    """Return a dataset of (inputs, labels) with the sample weights that `fit(class_weight=...)` gives.

    Keras maps a dataset itself, which then forgets what cardinality it was told; unnecessary if it
    took that of the dataset that it is given.
    """
    weigh = tf_dataset_adapter.make_class_weight_map_fn(class_weight)
    return dataset.map(weigh, num_parallel_calls=tf.data.AUTOTUNE)


def class_weight_to_sample_weight(labels, class_weight: dict, sample_weight=None):
    """Return the sample weights that `train_on_batch(class_weight=...)` uses.

    Unnecessary if Keras exported the conversion.

    Raises:
        ValueError: If there are also sample weights.
    """
    if sample_weight is not None:
        raise ValueError(
            "Received both `class_weight` and `sample_weight`. Multiply them, and pass "
            "`sample_weight` only."
        )
    return data_adapter_utils.class_weight_to_sample_weights(labels, class_weight)


class EpochIterator(TFEpochIterator):
    """Keras' iterator over the batches of an epoch: arrays, datasets, generators and others.

    Each iteration yields `(first_step, last_step, iterator)`. Unnecessary if Keras exported its
    data adapters.

    Args:
        **options: `x`, `y`, `sample_weight`, `batch_size`, `steps_per_epoch`, `shuffle` and
            `class_weight` as in `keras.Model.fit`, and `steps_per_execution`.
    """

    def __init__(self, **options):
        super().__init__(distribute_strategy=tf.distribute.get_strategy(), **options)


class ShuffleOrder:
    """The order in which Keras draws the rows of arrays and the batches of a `PyDataset`.

    Keras uses the random numbers of the process. They differ between ranks, and with a global seed
    of TensorFlow they repeat in every epoch. Unnecessary if Keras' `fit` took a seed.

    Args:
        seed: Integer.
        epoch: Integer, the first epoch. Each epoch has another order.
    """

    def __init__(self, seed: int, epoch: int = 0):
        self._seed, self._draws = seed, itertools.count(epoch)

    def shuffle(self, items):
        """Shuffle a list or an array in place, in another order in every call; return it."""
        np.random.default_rng([self._seed, next(self._draws)]).shuffle(items)
        return items

    def for_py_datasets(self) -> contextlib.AbstractContextManager:
        """Inside the `with` block Keras shuffles the batches of a `PyDataset` in this order."""
        return meanwhile(py_dataset_adapter, random=self)

    def adapter(self, x, y, sample_weight, *options):
        """Return Keras' adapter that draws rows in this order, or `x` if the data are no arrays.

        Args:
            x, y, sample_weight: As in `keras.Model.fit`.
            *options: The other arguments of Keras' `ArrayDataAdapter`.
        """
        if not array_data_adapter.can_convert_arrays((x, y, sample_weight)):
            return x
        adapter = array_data_adapter.ArrayDataAdapter(x, y, sample_weight, *options)
        with meanwhile(tf.random, shuffle=self._shuffled):  # Only Keras' code runs in here.
            dataset = adapter.get_tf_dataset()
        adapter.get_tf_dataset = lambda: dataset
        return adapter

    def _shuffled(self, indices):
        order = tf.numpy_function(
            lambda array: self.shuffle(array.copy()), [indices], indices.dtype
        )
        return tf.ensure_shape(order, indices.shape)


def told_as_it_is(call: Callable) -> Callable:
    """Return a layer's `call` or `__call__` whose errors, where this library raises them, stay so.

    Keras puts a line for each argument around an error in a call, but not around one that has that;
    and a sentence before one in a network of which it asks the shapes only.
    """

    @functools.wraps(call)
    def checked(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except (TypeError, ValueError) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if not frame.f_globals.get("__name__", "").startswith("dtransformer."):
                raise
            told = _BEFORE.sub("", str(error)).partition("\x1b[0m")[0]
            own = error if told == str(error) else type(error)(told)
            own._keras_call_info_injected = True
            raise own.with_traceback(error.__traceback__) from None

    return checked
