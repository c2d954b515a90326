"""The base of every layer: weights with logical axes and reproducible values."""

import functools
import inspect
import types

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.arguments import KeepsSettings, as_config, checked, settings_of
from dtransformer.layers.initializers import seeded
from dtransformer.layers.low_rank import TakesLowRank, built_with_factors
from dtransformer.parallel import parallelize
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.axis_rules import check_axes, override_rules
from dtransformer.parallel.variable_factory import make_variable

register = keras.saving.register_keras_serializable("dtransformer")


class Layer(KeepsSettings, TakesLowRank):
    """A Keras layer whose weights name their dimensions.

    `add_weight` takes the logical name of every dimension, from which the rules of
    `dtransformer.parallel.mesh.axis_rules` derive how it is sharded; `shard` replaces rows of
    them for this layer alone. A random initializer without a seed of its own gets one that
    depends on the job's seed and on the weight's path only.
    """

    _own_rules = {}
    # Whether the backward pass computes the layer again: see `parallel.recompute`.
    recomputes = False
    # The pipeline stage that has the layer, or the model chunk where stages have several; -1 for
    # the last. None where each stage may compute it.
    pipeline_stage = None
    # Which of its results are weights: the number of the result and the attribute.
    results_that_are_weights = types.MappingProxyType({})
    # Other model chunks that need these weights, which `share_weights` finds out.
    copied_to = frozenset()

    build = parallelize.build_method(keras.layers.Layer.build)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if not keras.backend.is_float_dtype(self.compute_dtype):
            raise ValueError(f"dtype must be of a floating type, got {self.compute_dtype!r}")

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)
        if "build" in vars(cls):
            cls.build = parallelize.build_method(built_with_factors(cls.build))
        if "call" in vars(cls):
            cls.call = _compat.told_as_it_is(parallelize.call_method(cls.call))

    def takes(self, num_features: int) -> None:
        """Let inputs with another last dimension be refused, by Keras, before they are used."""
        self.input_spec = keras.layers.InputSpec(axes={-1: num_features})

    def shard(self, **rules: str | None) -> "Layer":
        """Shard this layer, and the layers inside of it, by rules of its own.

        Args:
            **rules: logical name of a dimension = the mesh axis that shards it, `"data"`,
                `"context"`, `"model"` or None.

        Returns:
            The layer.

        Raises:
            ValueError: a name is unknown, or the layer has its weights already.

        Example:

        >>> from dtransformer.layers import FeedForward
        >>> replicated = FeedForward(8, 32).shard(mlp=None)
        """
        for name, axis in rules.items():
            check_axes((name,), 1, f"the rule {name}={axis!r}")
            allowed = (*validators.MESH_AXES, None)
            if axis not in allowed:
                raise ValueError(f"the rule {name}={axis!r} must be one of {allowed}")
        for layer in _compat.flat_layers(self):
            if layer.weights:
                raise ValueError(f"{layer.path} has its weights already: call shard before build")
            if isinstance(layer, Layer):
                layer._own_rules = {**layer._own_rules, **rules}
        return self

    def __call__(self, *args, **kwargs):
        if "mask" in kwargs and "mask" not in (names := inspect.signature(self.call).parameters):
            mask = kwargs.pop("mask")
            first, *others = args or [kwargs.pop(next(iter(names)))]
            if mask is not None:
                first = Masked(dtype=self.dtype_policy)(first, mask=mask)
            args = first, *others
        if not self._own_rules:
            return super().__call__(*args, **kwargs)
        with override_rules(self._own_rules):
            return super().__call__(*args, **kwargs)

    def add_weight(
        self,
        shape: tuple[int, ...],
        initializer: str | keras.initializers.Initializer = "glorot_uniform",
        *,
        axes: tuple,
        name: str,
        dtype: str | keras.DTypePolicy | None = None,
        trainable: bool = True,
        autocast: bool = True,
        regularizer: keras.regularizers.Regularizer | None = None,
        constraint: keras.constraints.Constraint | None = None,
        aggregation: str = "none",
        overwrite_with_gradient: bool = False,
        num_inputs: int | None = None,
        true_shape: tuple[int, ...] | None = None,
    ) -> keras.Variable:
        """Add a weight.

        Args:
            shape: tuple of ints.
            initializer: a Keras initializer, or its name.
            axes: tuple with the logical name, or None, of every dimension.
            name: str, unique in the layer.
            dtype, trainable, autocast, regularizer, constraint: as in Keras' `add_weight`.
            aggregation, overwrite_with_gradient: as there.
            num_inputs: of a kernel that `parallel.tensor_parallel` multiplies with, the number of
                leading dimensions that are summed over; None for other weights.
            true_shape: shape without padding, which checkpoints hold; by default `shape`.

        Returns:
            A `keras.Variable` with the attribute `logical_axes`.

        Raises:
            ValueError: `axes` does not fit `shape`, holds an unknown name, or shards a
                dimension that is not divisible.
        """
        check_axes(axes, len(shape), f"the weight {self.path}/{name}")
        dtype = keras.backend.standardize_dtype(dtype or self.variable_dtype)
        with keras.name_scope(self.name, caller=self), override_rules(self._own_rules):
            path = f"{_compat.current_path()}/{name}"
            weight = make_variable(
                seeded(keras.initializers.get(initializer), path),
                shape=shape,
                axes=axes,
                path=path,
                dtype=dtype,
                compute_dtype=self.compute_dtype if autocast else dtype,
                has_constraint=constraint is not None,
                trainable=trainable,
                autocast=autocast,
                aggregation=aggregation,
                name=name,
            )
        weight.regularizer = keras.regularizers.get(regularizer)
        weight.constraint = keras.constraints.get(constraint)
        weight.overwrite_with_gradient = overwrite_with_gradient
        self._track_variable(weight)
        weight.logical_axes = axes
        if true_shape is not None:
            weight.true_shape = true_shape
        if num_inputs is not None:
            weight.num_inputs = num_inputs
        return weight

    def get_config(self) -> dict:
        """Return the arguments of the constructors, and what was set on the layer.

        Arguments are attributes of the same names, or in `arguments`, a dict of them.
        """
        own = {
            name: getattr(self, name) for name in _arguments_of(type(self)) if hasattr(self, name)
        }
        own |= getattr(self, "arguments", {})
        return {**super().get_config(), **as_config(own), **settings_of(self)}

    def save_own_variables(self, store: dict) -> None:
        for number, variable in enumerate(
            [*self._trainable_variables, *self._non_trainable_variables]
        ):
            store[str(number)] = variable.numpy()


@functools.cache
def _arguments_of(kind):
    """Return the names of the arguments of a class of layers, and of those it is derived from."""
    own = [
        vars(x)["__init__"] for x in kind.__mro__ if issubclass(x, Layer) and "__init__" in vars(x)
    ]
    names = {name for init in own for name in inspect.signature(init).parameters}
    return sorted(names - {"self", "args", "kwargs", "name", "dtype", "trainable"})


class StreamLayer(Layer):
    """A layer whose result has the shape of its first input; a mask of Keras' goes on with it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def compute_output_shape(self, input_shape: tuple, *args, **kwargs) -> tuple:
        return input_shape


@register
class Masked(keras.layers.Layer):
    """Give a tensor a mask as Keras' own, for the layer that takes it."""

    supports_masking = True

    def call(self, inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
        return tf.identity(inputs)


def check_rate(name: str, rate: float) -> float:
    """Check a dropout rate: a number in [0, 1)."""
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if not is_number or not 0 <= rate < 1:
        raise ValueError(f"{name} must be a number in [0, 1), got {rate!r}")
    return float(rate)


def check_divisible(**sizes: int):
    """Check that model_parallel divides each size.

    Raises:
        ValueError: it does not divide one of them; names all the numbers.
    """
    model_parallel = get_parallel_config().model_parallel
    if any(size % model_parallel for size in sizes.values()):
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"model_parallel={model_parallel} must divide each of {given}")
