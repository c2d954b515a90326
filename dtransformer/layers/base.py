"""Base classes of all layers: weights with logical axes and reproducible initial values."""

import functools
import inspect
import types
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.arguments import (
    SettingsMixin,
    get_settings,
    serialize_arguments,
    validate_arguments,
)
from dtransformer.layers.initializers import with_derived_seed
from dtransformer.layers.low_rank import LowRankMixin, build_with_adapters
from dtransformer.parallel import parallelize
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.mesh.axis_rules import check_axes, override_rules
from dtransformer.parallel.ops.block_quantization import BlockLayout
from dtransformer.parallel.pipeline_parallel.stage_dispatch import dispatch, placeholder_outputs
from dtransformer.parallel.variable_factory import make_variable

register = keras.saving.register_keras_serializable("dtransformer")


class Layer(SettingsMixin, LowRankMixin):
    """Base class of Keras layers whose weights have logical axes.

    `add_weight` takes the logical axis of every dimension. The rules of
    `dtransformer.parallel.mesh.axis_rules` map logical axes to mesh axes; `shard` overrides them
    for a single layer. An unseeded random initializer receives a seed that depends only on the
    job's seed and the weight's path.

    The backward pass computes the layer again after `recompute`, or if `is_recomputed` is `True`
    because the config of its block selects it. See `parallel.recompute`.
    """

    _sharding_rules = {}
    recomputes_call = False  # Set by `recompute`.
    is_recomputed = False
    # Index of the layer's pipeline stage or, with several model chunks per stage, of its chunk. -1
    # is the last. `None` allows every stage to compute the layer.
    pipeline_stage = None
    # Maps the index of an output to the attribute of the weight that it returns.
    weight_outputs = types.MappingProxyType({})
    # Other model chunks that use these weights; set by `share_weights`.
    copy_chunks = frozenset()

    build = parallelize.build_method(keras.layers.Layer.build)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if not keras.backend.is_float_dtype(self.compute_dtype):
            raise ValueError(f"`dtype` must be a floating-point type, got {self.compute_dtype!r}.")

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = validate_arguments(cls.__init__)
        if "build" in vars(cls):
            cls.build = parallelize.build_method(build_with_adapters(cls.build))
        if "call" in vars(cls):
            cls.call = _compat.keep_error_messages(parallelize.call_method(cls.call))

    def require_features(self, num_features: int) -> None:
        """Let Keras reject inputs whose last dimension is not `num_features`."""
        self.input_spec = keras.layers.InputSpec(axes={-1: num_features})

    def shard(self, **rules: str | None) -> "Layer":
        """Override the sharding rules of this layer and of the layers inside it.

        Call it before the layer is built.

        Args:
            **rules: Logical axis and the mesh axis that shards it: `"data"`, `"context"`,
                `"model"`, or `None` to replicate it.

        Returns:
            The layer itself.

        Raises:
            ValueError: If an axis is unknown or the layer already has weights.

        Example:

        >>> from dtransformer.layers import FeedForward
        >>> replicated = FeedForward(8, 32).shard(mlp=None)
        """
        for name, axis in rules.items():
            check_axes((name,), 1, f"the rule {name}={axis!r}")
            allowed = (*validators.MESH_AXES, None)
            if axis not in allowed:
                raise ValueError(f"The mesh axis in `{name}={axis!r}` must be one of {allowed}.")
        for layer in _compat.flat_layers(self):
            if layer.weights:
                raise ValueError(f"{layer.path} already has weights. Call `shard` before `build`.")
            if isinstance(layer, Layer):
                layer._sharding_rules = {**layer._sharding_rules, **rules}
        return self

    def recompute(self, enabled: bool = True) -> None:
        """Let training compute the layer again in the backward pass.

        Only the inputs of the layer are stored. Call it before the first step.

        Args:
            enabled: Boolean. `False` stores all activations again. Defaults to `True`.
        """
        self.recomputes_call = bool(enabled)
        _compat.set_remat(self, enabled)

    def __call__(self, *args, **kwargs):
        if "mask" in kwargs and "mask" not in (names := inspect.signature(self.call).parameters):
            mask = kwargs.pop("mask")
            first, *other_args = args or [kwargs.pop(next(iter(names)))]
            if mask is not None:
                first = Masked(dtype=self.dtype_policy)(first, mask=mask)
            args = first, *other_args
        if not self._sharding_rules:
            return super().__call__(*args, **kwargs)
        with override_rules(self._sharding_rules):
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
        num_stacked: int = 0,
        true_shape: tuple[int, ...] | None = None,
    ) -> keras.Variable:
        """Add a weight.

        Args:
            shape: Tuple of integers.
            initializer: Keras initializer or its name. Defaults to `"glorot_uniform"`.
            axes: Tuple with the logical axis of every dimension. `None` replicates a dimension.
            name: String, unique within the layer.
            dtype, trainable, autocast, regularizer, constraint, aggregation,
                overwrite_with_gradient: See `keras.layers.Layer.add_weight`.
            num_inputs: Integer. Number of leading dimensions that a product sums over, for kernels
                of `parallel.tensor_parallel`. Defaults to `None`, for all other weights.
            num_stacked: Integer. Number of dimensions before these, such as 1 for the stacked
                kernels of experts. Stacked kernels cannot have adapters. Defaults to `0`.
            true_shape: Shape without padding, which checkpoints store. Defaults to `shape`.

        Returns:
            A `keras.Variable` with the attribute `logical_axes`, or a `QuantizedKernel` for a
            kernel that `models.quantize` selects.

        Raises:
            ValueError: If `axes` does not match `shape`, contains an unknown axis, or shards a
                dimension whose size is not divisible.
        """
        check_axes(axes, len(shape), f"the weight {self.path}/{name}")
        dtype = keras.backend.standardize_dtype(dtype or self.variable_dtype)
        with keras.name_scope(self.name, caller=self), override_rules(self._sharding_rules):
            path = f"{_compat.current_path()}/{name}"
            initializer = with_derived_seed(keras.initializers.get(initializer), path)
            if num_inputs is not None and (kind := self.select_format(name, path)) is not None:
                layout = BlockLayout.from_kernel(kind, shape, num_inputs, axes, path, num_stacked)
                kernel = self.add_quantized(layout, initializer, name, path, axes, true_shape)
                if not num_stacked:
                    kernel.num_inputs = num_inputs
                return kernel
            weight = make_variable(
                initializer,
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
        if num_inputs is not None and not num_stacked:
            weight.num_inputs = num_inputs
        return weight

    def get_config(self) -> dict:
        """Return the constructor arguments and the settings made after construction.

        An argument is read from the attribute of its name and from the dictionary `arguments`, if
        the layer has one.
        """
        arguments = {
            name: getattr(self, name)
            for name in _constructor_arguments(type(self))
            if hasattr(self, name)
        }
        arguments |= getattr(self, "arguments", {})
        return {**super().get_config(), **serialize_arguments(arguments), **get_settings(self)}

    def save_own_variables(self, store: dict) -> None:
        for index, variable in enumerate(
            [*self._trainable_variables, *self._non_trainable_variables]
        ):
            store[str(index)] = variable.numpy()


def decoding_method(method: Callable) -> Callable:
    """Wrap a layer's `prefill` or `decode_step`, which Keras does not call.

    As in a call of the layer, the first argument is cast to the compute type, the layer's sharding
    rules apply, and only the layer's pipeline stage computes it. Other stages return a placeholder
    or a received tensor, and `()` instead of a cache.

    Args:
        method: Method of a tensor and other arguments that returns an `(output, cache)` tuple. The
            output has the shape of the tensor.
    """

    def placeholder(layer, args, kwargs):
        return placeholder_outputs(layer, args[:1], {}), ()

    @functools.wraps(method)
    def run(layer, inputs, *args, **kwargs):
        args = tf.cast(inputs, layer.compute_dtype), *args
        compute = functools.partial(method, layer)
        with keras.name_scope(layer.name, caller=layer), override_rules(layer._sharding_rules):
            return dispatch(layer, compute, args, kwargs, placeholder)

    return run


@functools.cache
def _constructor_arguments(layer_class):
    """Return the sorted constructor arguments of a layer class and its base classes."""
    inits = [
        vars(x)["__init__"]
        for x in layer_class.__mro__
        if issubclass(x, Layer) and "__init__" in vars(x)
    ]
    names = {name for init in inits for name in inspect.signature(init).parameters}
    return sorted(names - {"self", "args", "kwargs", "name", "dtype", "trainable"})


class StreamLayer(Layer):
    """Base class of layers that preserve the shape and the Keras mask of their first input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def compute_output_shape(self, input_shape: tuple, *args, **kwargs) -> tuple:
        return input_shape


@register
class Masked(keras.layers.Layer):
    """Attach a Keras mask to a tensor."""

    supports_masking = True

    def call(self, inputs: tf.Tensor, mask: tf.Tensor | None = None) -> tf.Tensor:
        return tf.identity(inputs)


def check_rate(name: str, rate: float) -> float:
    """Return a dropout rate as a float.

    Raises:
        ValueError: If the rate is not a number in [0, 1).
    """
    is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if not is_number or not 0 <= rate < 1:
        raise ValueError(f"`{name}` must be a number in [0, 1), got {rate!r}.")
    return float(rate)


def check_divisible(**sizes: int):
    """Check that each size is divisible by `model_parallel`.

    Args:
        **sizes: Integers, by the names that the message shows.

    Raises:
        ValueError: If a size is not divisible.
    """
    model_parallel = get_parallel_config().model_parallel
    if any(size % model_parallel for size in sizes.values()):
        listing = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"`model_parallel={model_parallel}` must divide each of {listing}.")
