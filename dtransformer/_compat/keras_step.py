"""Private names of Keras that a training step uses: masks, losses, and attributes of optimizers."""

import contextlib
import functools
import re
import traceback
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.trainers import compile_utils

_KERAS_PREFIX = re.compile(r"^.*Error encountered:\n\n", re.DOTALL)


def get_keras_mask(tensor: tf.Tensor) -> tf.Tensor | None:
    """Return the mask that a Keras layer attached to its result, or `None`.

    Unnecessary if Keras had a public function to read the mask of `keras.layers.Masking`'s
    protocol.
    """
    return getattr(tensor, "_keras_mask", None)


def with_mask(tensor: tf.Tensor, mask: tf.Tensor) -> tf.Tensor:
    """Return the tensor with a mask for the next layer or loss. For the reason, see `get_keras_mask`."""
    tensor._keras_mask = mask
    return tensor


def get_keras_masks(tensors) -> dict[int, tf.Tensor]:
    """Return the masks of nested tensors as a dict by flat index, without tensors that have none.

    Masks are attributes and get lost when tensors enter or leave a function or are sent.
    For the reason, see `get_keras_mask`.
    """
    masks = {i: get_keras_mask(x) for i, x in enumerate(tf.nest.flatten(tensors))}
    return {i: mask for i, mask in masks.items() if mask is not None}


def with_masks(tensors, masks: dict[int, tf.Tensor]):
    """Return nested tensors with the masks from `get_keras_masks`.

    For the reason, see `get_keras_mask`.
    """
    flat = tf.nest.flatten(tensors)
    for i, mask in masks.items():
        flat[i] = with_mask(tf.identity(flat[i]), mask)
    return tf.nest.pack_sequence_as(tensors, flat)


class CompileLoss(compile_utils.CompileLoss):
    """Keras' assignment of the losses in `compile` to the network's outputs.

    Unnecessary if Keras exposed the loss of each output.

    Args:
        loss, loss_weights: Arguments of `keras.Model.compile`.
        output_names: List of the outputs' names, or `None`.
        term: Function `(loss, name)` that returns the loss function to compute instead.
    """

    def __init__(self, loss, loss_weights, output_names, term):
        super().__init__(loss, loss_weights, output_names=output_names)
        self._term = term

    def __setattr__(self, name, value):
        super().__setattr__(
            name, _ListOfLengthOne() if name == "_flat_losses" and value == [] else value
        )

    def build(self, y_true, y_pred):
        super().build(y_true, y_pred)
        self._flat_losses = [
            loss._replace(loss=self._term(loss.loss, loss.name)) for loss in self._flat_losses
        ]

    @property
    def metrics(self):
        return [None] * len(self._flat_losses or [None])


class _ListOfLengthOne(list):
    """List that reports a length of one, because Keras would create metrics for several losses."""

    def __len__(self):
        return 1


def keep_error_messages(call: Callable) -> Callable:
    """Decorate a layer's `call` or `__call__` so that Keras does not extend this library's errors.

    Keras appends a line per argument to errors in a call, unless the error is marked as extended.
    For symbolic calls it also prepends a sentence. Errors from other modules are raised unchanged.
    """

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except (TypeError, ValueError) as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if not frame.f_globals.get("__name__", "").startswith("dtransformer."):
                raise
            text = _KERAS_PREFIX.sub("", str(error)).partition("\x1b[0m")[0]
            new_error = error if text == str(error) else type(error)(text)
            new_error._keras_call_info_injected = True
            raise new_error.with_traceback(error.__traceback__) from None

    return wrapped


@contextlib.contextmanager
def patched(owner: object, **attributes):
    """Context manager that temporarily sets attributes of an object, without Keras' tracking.

    Unnecessary if Keras' methods accepted these values as arguments.
    """
    current = vars(owner)
    saved = {name: current[name] for name in attributes if name in current}
    current.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del current[name]
        current.update(saved)


@contextlib.contextmanager
def declared_dtype(variables: list, dtype: str):
    """Context manager that lets Keras variables report another dtype, without a conversion.

    Keras' operations choose their type by it. Unnecessary if optimizers could compute in a wider type
    than their states.
    """
    with contextlib.ExitStack() as stack:
        for variable in variables:
            stack.enter_context(patched(variable, _dtype=dtype))
        yield


def get_learning_rate(optimizer: keras.optimizers.Optimizer):
    """Return an optimizer's learning rate: a variable, a schedule or a function.

    The public property evaluates schedules and functions. Unnecessary if Keras returned the object.
    """
    return optimizer._learning_rate


def learning_rate_times(optimizer: keras.optimizers.Optimizer, factor: float) -> dict:
    """Return attributes for `patched` that multiply an optimizer's learning rate by `factor`.

    Unnecessary if Keras' optimizers had groups of weights.
    """
    rate = optimizer._learning_rate
    is_schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)

    def product():
        value = rate(optimizer.iterations) if is_schedule else rate() if callable(rate) else rate
        return keras.ops.multiply(value, factor)

    return {"_learning_rate": product}


def shared_weight_decay(optimizer: keras.optimizers.Optimizer) -> dict:
    """Return attributes for `patched` that compute the rate of weight decay once for all weights.

    The dict is empty if the optimizer's class overrides weight decay. Unnecessary if Keras multiplied
    two scalars instead of multiplying each weight twice.
    """
    if type(optimizer)._apply_weight_decay is not keras.optimizers.Optimizer._apply_weight_decay:
        return {}

    def decay(variables):
        if optimizer.weight_decay is None:
            return
        rate = keras.ops.multiply(optimizer.learning_rate, optimizer.weight_decay)
        for variable in variables:
            if optimizer._use_weight_decay(variable):
                variable.assign_sub(variable * keras.ops.cast(rate, variable.dtype))

    return {"_apply_weight_decay": decay}


def shared_adam_step(optimizer: keras.optimizers.Optimizer) -> dict:
    """Return attributes for `patched` that replace Keras' update step of Adam.

    The dict is empty unless the optimizer is `Adam` or `AdamW` without `amsgrad`, or a subclass with the
    same update step.
    """
    if type(optimizer).update_step is not keras.optimizers.Adam.update_step or optimizer.amsgrad:
        return {}
    return {"update_step": _AdamStep(optimizer)}


class _AdamStep:
    """Replacement of `keras.optimizers.Adam.update_step` with one operation per float32 variable.

    Keras' method creates about 20 operations per weight. Powers of `beta_1` and `beta_2` are shared.
    Unnecessary if Keras called `ResourceApplyAdam`.

    Args:
        optimizer: Built Keras `Adam`.

    Call arguments:
        gradient: Tensor.
        parameter: `ParameterProxy`.
        learning_rate: Scalar tensor.
    """

    def __init__(self, optimizer):
        self._optimizer = optimizer
        step = tf.cast(optimizer.iterations + 1, "float32")
        self._beta_1 = tf.constant(optimizer.beta_1, "float32")
        self._beta_2 = tf.constant(optimizer.beta_2, "float32")
        self._epsilon = tf.constant(optimizer.epsilon, "float32")
        self._beta_1_power = tf.pow(self._beta_1, step)
        self._beta_2_power = tf.pow(self._beta_2, step)

    def __call__(self, gradient, parameter, learning_rate):
        moments = _adam_moments(self._optimizer, parameter)
        values = [parameter.bound, *(moment.value for moment in moments)]
        if any(value.dtype != tf.float32 for value in values):
            type(self._optimizer).update_step(self._optimizer, gradient, parameter, learning_rate)
            return
        gradient = tf.cast(gradient, "float32")
        rate = tf.cast(learning_rate, "float32")
        if all(isinstance(value, tf.Variable) for value in values):
            self._update_variables(gradient, rate, *(value.handle for value in values))
        else:
            self._update(gradient, rate, parameter, *values[1:])

    def _update_variables(self, gradient, rate, variable, first, second):
        tf.raw_ops.ResourceApplyAdam(
            var=variable,
            m=first,
            v=second,
            beta1_power=self._beta_1_power,
            beta2_power=self._beta_2_power,
            lr=rate,
            beta1=self._beta_1,
            beta2=self._beta_2,
            epsilon=self._epsilon,
            grad=gradient,
            use_locking=True,
        )

    def _update(self, gradient, rate, parameter, first, second):
        """Compute the same update for a value or a moment that is a tensor."""
        first.assign_add((gradient - first) * (1.0 - self._beta_1))
        second.assign_add((tf.square(gradient) - second) * (1.0 - self._beta_2))
        rate *= tf.sqrt(1.0 - self._beta_2_power) / (1.0 - self._beta_1_power)
        parameter.assign_sub(first * rate / (tf.sqrt(second) + self._epsilon))


def _adam_moments(optimizer, variable):
    index = optimizer._get_variable_index(variable)
    return optimizer._momentums[index], optimizer._velocities[index]


def get_moving_averages(optimizer: keras.optimizers.Optimizer) -> list:
    """Return a built optimizer's moving averages, or an empty list without `use_ema`.

    Unnecessary if they were public.
    """
    return list(optimizer._model_variables_moving_average) if optimizer.use_ema else []


def average_only(
    optimizer: keras.optimizers.Optimizer, indices: list[int], variables: list
) -> dict:
    """Return attributes for `patched` that restrict `use_ema` to some of the variables.

    They also select new values instead of branching, because a branch cannot assign tensors of the
    outer graph. The dict is empty without `use_ema`. Unnecessary if `apply` averaged and overwrote only
    the variables that it receives.

    Args:
        optimizer: Built Keras optimizer.
        indices: Indices of the variables in the order of the build.
        variables: Objects that replace these variables.
    """
    averages = get_moving_averages(optimizer)
    if not averages:
        return {}
    selected = [averages[i] for i in indices]
    settings = {"_trainable_variables": variables, "_model_variables_moving_average": selected}
    if optimizer.ema_overwrite_frequency:
        overwrite = functools.partial(
            _average_and_overwrite, optimizer, selected, optimizer.ema_overwrite_frequency
        )
        settings["_update_model_variables_moving_average"] = overwrite
        settings["ema_overwrite_frequency"] = None
    return settings


def _average_and_overwrite(optimizer, averages, frequency, variables):
    type(optimizer)._update_model_variables_moving_average(optimizer, variables)
    is_due = keras.ops.equal((optimizer.iterations + 1) % frequency, 0)
    for variable, average in zip(variables, averages):
        variable.assign(keras.ops.where(is_due, average, variable))
