"""Private names of Keras."""

import contextlib
import copy
import functools
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec as compute_output_spec
from keras.src.backend.common import global_state
from keras.src.backend.common.name_scope import current_path as current_path
from keras.src.backend.common.remat import RematMode
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope as in_symbolic_scope
from keras.src.backend.common.variables import AutocastScope, get_autocast_scope
from keras.src.backend.tensorflow import core
from keras.src.utils.naming import to_snake_case as to_snake_case

from dtransformer._compat.optimizer_internals import patched

# Keras: variables.


def stateless_value(variable: keras.Variable):
    """Return a variable's value in the current `keras.StatelessScope`, or `None` outside a scope.

    Sharded variables have no single tensor that Keras could replace. Unnecessary if Keras had a
    public function for the current scope.
    """
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def autocast(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """Return a variable's value in the compute dtype of the enclosing layer.

    Unnecessary if the current autocast dtype were public.
    """
    return variable._maybe_autocast(value)


def without_autocast() -> contextlib.AbstractContextManager:
    """Return a context manager that reads variables in their storage dtype.

    Recomputation reads them before the layer casts them. Unnecessary if the autocast dtype were
    public.
    """
    return AutocastScope(None)


def autocast_scope(layer: keras.layers.Layer) -> contextlib.AbstractContextManager:
    """Return a context manager that reads variables in the dtype that a layer reads them in.

    Unnecessary if the scope that `keras.layers.Layer.__call__` opens were public.
    """
    casts = layer.autocast and tf.as_dtype(layer.compute_dtype).is_floating
    return AutocastScope(layer.compute_dtype if casts else None)


def variable_key(variable: tf.Variable) -> str:
    """Return the key that Keras' optimizers use for a `tf.Variable`.

    A flat shard replaces a weight in an optimizer. Unnecessary if optimizers accepted any object
    with a shape and a dtype.
    """
    return variable._unique_id


def with_variable_key(value: tf.Tensor, name: str) -> tf.Tensor:
    """Return `value`, marked with the key of the variable that Keras' optimizers should see.

    Optimizers look up the tensor inside a Keras variable, and a sharded variable returns a new
    tensor on each read. Unnecessary if `exclude_from_weight_decay` compared Keras variables.
    """
    if tf.executing_eagerly():
        value._unique_id = name
    return value


@contextlib.contextmanager
def without_values():
    """Context manager that gives new Keras variables a shape but never a value.

    Unnecessary if a layer could report its weights' shapes before it is built.
    """
    name = "uninitialized_variables"  # Keras would initialize the variables in this list later.
    previous = global_state.get_global_attribute(name)
    global_state.set_global_attribute(name, [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        global_state.set_global_attribute(name, previous)


def initializes_variables() -> bool:
    """Return whether new variables are initialized, which `without_values` prevents.

    Unnecessary if the current `keras.StatelessScope` were public.
    """
    scope = get_stateless_scope()
    return scope is None or scope.initialize_variables


# Keras: layers and models.


def flat_layers(layer: keras.layers.Layer, include_self=True, recursive=True) -> list:
    """Return a layer and all its sublayers, outer layers first.

    `keras.Model.layers` contains only direct sublayers, and other layers have no such list.
    Unnecessary if Keras could list nested layers publicly.
    """
    return layer._flatten_layers(include_self=include_self, recursive=recursive)


def initialize_variable(variable: keras.Variable, initializer: Callable) -> None:
    """Create a variable's storage again, with new values.

    Layers that have the variable keep it when its class changes. Unnecessary if a Keras layer could
    replace a weight.

    Args:
        variable: Keras variable.
        initializer: Function of a shape and a dtype that returns the value.
    """
    variable._initialize_with_initializer(initializer)


def direct_variables(layer: keras.layers.Layer) -> list:
    """Return a layer's variables without its sublayers' variables. For the reason, see `flat_layers`."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def is_seed(variable: keras.Variable) -> bool:
    """Return whether a variable is the state of a `keras.random.SeedGenerator`.

    Unnecessary if Keras marked these variables.
    """
    return variable.name == "seed_generator_state"


def direct_trainable_variables(layer: keras.layers.Layer) -> list:
    """Return the layer's variables that were created as trainable, frozen or not.

    For the reason, see `flat_layers`.
    """
    return list(layer._trainable_variables)


def replace_root(network: keras.Model, name: str) -> None:
    """Replace the first part of the paths of a built network's layers and weights.

    Two networks of one class have equal paths. Unnecessary if Keras could rename a built model.

    Args:
        network: Built `keras.Model`.
        name: The new first part.
    """
    for owner in [*flat_layers(network), *network.variables]:
        if owner._path:
            owner._path = "/".join([name, *owner._path.split("/")[1:]])


def unlock_layer(layer: keras.layers.Layer) -> None:
    """Unlock a built layer, so that it can add weights or be built again.

    A pipeline stage may discover after the build that it needs a copy of another stage's table.
    Adapters are added to existing kernels, like Keras' `enable_lora`. Unnecessary if setting
    `built` to False allowed new weights.
    """
    layer._tracker.unlock()


def forget_weight(layer: keras.layers.Layer, variable: keras.Variable) -> None:
    """Remove a variable from a layer's weights. Unnecessary with an opposite of `add_weight`."""
    layer._untrack_variable(variable)


def replace_layer(owner: keras.layers.Layer, name: str, layer: keras.layers.Layer | None) -> None:
    """Replace the layer in an owner's attribute with another layer or `None`.

    Keras keeps replaced layers and their weights. Unnecessary if setting the attribute removed
    them.
    """
    old = getattr(owner, name)
    owner._tracker.unlock()
    if old is not None:
        owner._tracker.untrack(old)
    setattr(owner, name, layer)


def drop_value(layer: keras.layers.Layer, variable: keras.Variable, read: Callable) -> None:
    """Remove a variable from a layer's weights and drop its value, but keep its shape.

    The value belongs to another pipeline stage. Keras creates variables without values only
    temporarily, in a `keras.StatelessScope`. Unnecessary if Keras had layers without values, like
    PyTorch's meta device.

    Args:
        layer: The layer.
        variable: A variable from `direct_variables`.
        read: Function `(shape, dtype) -> tensor` that replaces reads of the value.
    """
    layer._untrack_variable(variable)
    uninitialized = global_state.get_global_attribute("uninitialized_variables", [])
    uninitialized[:] = [v for v in uninitialized if v is not variable]
    variable._value = None
    variable._initializer = read


def dropped_value(variable: keras.Variable):
    """Return the replacement for reading a variable without a value, or `None`.

    For the reason, see `drop_value`.
    """
    read = variable._initializer
    return None if read is None else read(variable._shape, variable._dtype)


def compile_options(model: keras.Model) -> dict:
    """Return the arguments of a model's last `compile`, or an empty dict.

    Unnecessary if `get_compile_config` returned the objects instead of their configs.
    """
    return model._compile_config.config if model.compiled else {}


def replace_moments(layer: keras.layers.BatchNormalization, moments: Callable) -> None:
    """Replace the mean and variance that a `BatchNormalization` computes in training.

    Keras reduces them over `tf.distribute` replicas, and only without a mask. Unnecessary if the
    layer took a function for its moments.

    Args:
        layer: The layer.
        moments: Function `(layer, local_moments, inputs, mask)` that returns the mean and the
            variance. `local_moments(inputs, mask)` returns Keras' result without synchronization.
    """

    def local_moments(inputs, mask):
        with patched(layer, synchronized=False):
            return type(layer)._moments(layer, inputs, mask)

    object.__setattr__(layer, "_moments", functools.partial(moments, layer, local_moments))


def replace_remat(remat: Callable) -> None:
    """Let `keras.remat` and `keras.RematScope` use another function than `tf.recompute_grad`.

    The original draws other dropout masks in the backward pass, fails for inner layers in graphs,
    and loses the gradients of weights that are tensors. Unnecessary without these faults.

    Args:
        remat: Function from a function, such as a layer's bound method `call`, to a function with
            the same arguments.
    """
    core.remat = remat


def set_remat(layer: keras.layers.Layer, enabled: bool) -> None:
    """Apply `keras.remat` to a layer's calls, or stop applying it.

    Unnecessary if a layer could enter a `keras.RematScope` after its construction.
    """
    layer._remat_mode = RematMode("full", 0, []) if enabled else None


def get_remat_mode(layer: keras.layers.Layer):
    """Return the `RematMode` of a layer in a `keras.RematScope`, or `None`. See `set_remat`."""
    return layer._remat_mode


def is_training_call() -> bool:
    """Return whether the current call of a Keras layer has `training=True`.

    Unnecessary if every layer received `training`.
    """
    context = global_state.get_global_attribute("current_call_ctx")
    return context is not None and bool(context.get_value("training"))


def capture_call_state() -> Callable[[], contextlib.AbstractContextManager]:
    """Return a function whose context managers restore the state of the current Keras call.

    The state is the value of `training` that inner layers receive and the autocast dtype. A
    backward pass computes a layer outside of Keras' call. Unnecessary if both were arguments.
    """
    name = "current_call_ctx"
    context = copy.copy(global_state.get_global_attribute(name))
    scope = get_autocast_scope()

    @contextlib.contextmanager
    def restored():
        previous = global_state.get_global_attribute(name)
        # Inner layers change the context.
        global_state.set_global_attribute(name, copy.copy(context))
        try:
            with AutocastScope(scope and scope.dtype):
                yield
        finally:
            global_state.set_global_attribute(name, previous)

    return restored


# `current_path` returns the path of the enclosing name scopes, so that a weight's path is known
# before it is created. Unnecessary if Keras passed the variable's path to its initializer.

# `compute_output_spec` returns the shapes and dtypes of a function's results for
# `keras.KerasTensor`s. Unnecessary if Keras exported it, like the method of a layer.

# `in_symbolic_scope` returns whether Keras only infers shapes. A sharded weight is not gathered
# then. For the reason, see `stateless_value`.

# `to_snake_case` derives a layer's default name from its class. The trainer detects default names
# to make names equal in every process. Unnecessary if Keras marked default names.
