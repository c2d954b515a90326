"""Recompute: the backward pass computes activations again instead of storing them.

Reference:
    - [Chen et al., 2016](https://arxiv.org/abs/1604.06174)
    - [Korthikanti et al., 2022, §5](https://arxiv.org/abs/2205.05198), for the choice of activations
      in a Transformer
"""

import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import TransformerRecomputeConfig
from dtransformer.parallel.mesh.axis_rules import (
    activation_specs,
    axis_size,
    constrain,
    current_overrides,
    mesh_axis,
    override_rules,
    relayout,
)
from dtransformer.parallel.ops.custom_gradient import custom_gradient, delay_seed, depend_on
from dtransformer.parallel.ops.split_backward import not_splitting_backward
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import report_all
from dtransformer.parallel.tracing.dropout_seed import (
    current_dropout_seed,
    dropout_seed,
    replaced_random_ids,
    use_random_ids,
)
from dtransformer.parallel.tracing.scoped import Scoped
from dtransformer.parallel.tracing.state_scope import SideEffects, StateScope
from dtransformer.parallel.zero.gather import full_trained_value, inside_unit

_saved_sums = Scoped("saved_sums")
"""`(sums, is_recomputing)`, where `sums` is the list of results that `keep_for_recompute` saves."""

_requested = Scoped("recompute_requested")
"""The layer whose next call is recomputed, or `None`."""


def as_recompute_config(value: bool | TransformerRecomputeConfig) -> TransformerRecomputeConfig:
    """Convert a boolean to a `TransformerRecomputeConfig`. Return other configs unchanged."""
    if isinstance(value, TransformerRecomputeConfig):
        return value
    return TransformerRecomputeConfig(recompute=bool(value))


def recomputed(
    function: Callable,
    inputs: list[tf.Tensor],
    weights: list[keras.Variable],
    config: TransformerRecomputeConfig | None = None,
    add_loss: Callable | None = None,
) -> tf.Tensor:
    """Call `function(*inputs)` with recompute: until the backward pass, only the inputs are saved.

    Both computations draw the same dropout masks, also in Keras' own dropout.

    Args:
        function: Function of tensors that returns nested tensors. Gradients are computed for its
            inputs and `weights` only.
        inputs: List of tensors. With `recompute_slice_activation` their shape is `[b, s, h]`.
        weights: List of the Keras variables that `function` reads.
        config: `TransformerRecomputeConfig`. Selects results that are saved in addition to the
            inputs. Defaults to `TransformerRecomputeConfig()`.
        add_loss: Function that takes the list of losses that layers add inside `function`. By
            default they are discarded.

    Returns:
        The result of `function`.

    Raises:
        ValueError: If `function` reads a trainable variable that is not in `weights`.
    """
    config = config or TransformerRecomputeConfig()
    slices = config.recompute_slice_activation and trace.is_on_mesh()
    shard = _shard_length if slices else _identity
    unshard = _unshard_length if slices else _identity
    values = list(map(full_trained_value, weights))
    seed = current_dropout_seed()
    random_ids = replaced_random_ids()
    is_training_step = trace.is_training_step()
    num_inputs = len(inputs)
    effects = SideEffects()

    def run(args, seed, sums, is_recomputing=False):
        """Compute the function. See `SideEffects.trace` for the results."""
        scope = StateScope(
            zip(weights, args[num_inputs:]),
            collect_losses=True,
            reads_others=False,
        )
        saved_sums = _saved_sums.get()
        if not config.mp_comm_recompute and trace.is_on_mesh():
            saved_sums = sums, is_recomputing
        with (
            dropout_seed(seed),
            use_random_ids(random_ids),
            not_splitting_backward(),
            inside_unit(),  # The weights are full tensors.
            trace.training_step(is_training_step),
            _saved_sums.set(saved_sums),
        ):
            return effects.trace(
                lambda: function(*args[:num_inputs]), scope, collects=not is_recomputing
            )

    @custom_gradient
    def forward(*args):
        # Both computations need the same layout, otherwise they would draw different masks. The
        # second one unshards the saved inputs.
        args = [*map(unshard, args[:num_inputs]), *args[num_inputs:]]
        sums = []
        results, auxiliary = run(args, seed, sums)
        saved_inputs = [shard(x) for x in args[:num_inputs]]

        def gradient(dy, *other_gradients):
            recomputed_args = [_delay(unshard(x), dy) for x in saved_inputs]
            # Only seeds are delayed, because a delay copies the value.
            for weight, x in zip(weights, args[num_inputs:]):
                recomputed_args.append(_delay(x, dy) if _compat.is_seed(weight) else x)
            sources = [x for x in recomputed_args if x.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch(sources)
                results, _ = run(
                    recomputed_args, delay_seed(seed, dy), list(sums), is_recomputing=True
                )
            upstream = [dy, *other_gradients][: len(results)]
            gradients = tape.gradient(results, sources, upstream, unconnected_gradients="zero")
            gradients = {id(x): gradient for x, gradient in zip(sources, gradients)}
            gradients = [gradients.get(id(x)) for x in recomputed_args]
            inputs = [x if x is None else unshard(x) for x in gradients[:num_inputs]]
            return [*inputs, *gradients[num_inputs:]]

        return [*results, *auxiliary], gradient

    def report(losses, metrics):
        if add_loss is not None:
            add_loss(losses)
        report_all(metrics)

    return effects.publish(forward(*inputs, *values), report)


def _delay(x, dy):
    """Return a tensor with a dependency on dy, see `depend_on` and `delay_seed`."""
    if x.dtype.is_floating:
        return depend_on(x, dy)
    return tf.cast(delay_seed(tf.cast(x, "int64"), dy), x.dtype)


def recompute_call(layer, call: Callable, args: tuple, kwargs: dict):
    """Return `call(*args, **kwargs)`, computed again in the backward pass.

    Args:
        layer: Layer or operation of Keras, or a function. Gradients are computed for its variables.
        call: Function to compute.
        args, kwargs: Arguments of the call, nested. Gradients are computed for dense float tensors.

    Raises:
        TypeError: If an argument is a ragged or sparse tensor.
    """
    if _compat.in_symbolic_scope():  # Keras only asks for shapes here.
        return call(*args, **kwargs)
    flat = tf.nest.flatten((args, kwargs))
    indices = [
        i
        for i, x in enumerate(flat)
        if tf.is_tensor(x) and (x.dtype.is_floating or x.dtype.is_integer)
    ]
    masks = _compat.get_keras_masks((args, kwargs))
    call_state = _compat.capture_call_state()
    overrides = current_overrides()

    def compute(*tensors):
        values = list(flat)
        for i, x in zip(indices, tensors):
            values[i] = x
        values = tf.nest.pack_sequence_as((args, kwargs), values)
        new_args, new_kwargs = _compat.with_masks(values, masks)
        with call_state(), override_rules(overrides), _requested.set(None):
            return call(*new_args, **new_kwargs)

    inputs = [flat[i] for i in indices]
    weights = getattr(layer, "variables", [])
    return recomputed(compute, inputs, weights, add_loss=getattr(layer, "add_loss", None))


def requested(layer, call: Callable) -> Callable:
    """Return a layer's `call`, with recompute if `remat` requested it for the current call."""
    if _requested.get() is not layer:
        return call
    return lambda *args, **kwargs: recompute_call(layer, call, args, kwargs)


def remat(function: Callable) -> Callable:
    """Return a function that training computes again in the backward pass, as `keras.remat` does.

    Keras calls it for layers in a `keras.RematScope`. A model is only computed again if the scope
    lists its name, or after `dtransformer.recompute`: it saves no memory to compute an entire
    network again.

    Args:
        function: Bound method of a layer, a layer, or a function that reads no trainable weights.

    Raises:
        ValueError: If the stages of a pipeline have parts of such a model. Raised by the returned
            function.
    """
    # A layer that a pipeline has placed wraps its method in a function.
    method = getattr(function, "__wrapped__", function)
    layer = getattr(function, "__self__", getattr(method, "__self__", function))

    @functools.wraps(function)
    def compute(*args, **kwargs):
        if not _compat.is_training_call():
            return function(*args, **kwargs)
        is_divided = _is_divided(layer)
        if is_divided or isinstance(layer, keras.Model):
            mode = _compat.get_remat_mode(layer)  # `None` if a method calls `keras.remat`.
            is_listed = mode is None or mode.mode == "list_of_layers"
            is_named = is_listed or getattr(layer, "recomputes_call", False)
            if is_divided and is_named:
                raise ValueError(
                    f"{layer.name!r} is recomputed, but stages of the pipeline have parts of it. "
                    "Recompute the layers inside of it instead."
                )
            if not is_named:
                return function(*args, **kwargs)
        # The stage of the layer recomputes its call.
        if hasattr(layer, "pipeline_stage") and function == layer.call:
            with _requested.set(layer):
                return function(*args, **kwargs)
        return recompute_call(layer, function, args, kwargs)

    return compute


def _is_divided(layer):
    """Return whether several model chunks have parts of a layer."""
    if job.placement().num_chunks == 1 or not isinstance(layer, keras.layers.Layer):
        return False
    inner = _compat.flat_layers(layer, include_self=False)
    return any(getattr(part, "pipeline_stage", None) is not None for part in inner)


_compat.replace_remat(remat)


def keep_for_recompute(compute: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return `compute()`. With `mp_comm_recompute=False`, `recomputed` saves the result.

    Args:
        compute: Function without arguments that returns a tensor, a sum over a mesh axis. The
            second computation uses the saved tensor instead of calling it.
    """
    if _saved_sums.get() is None:
        return compute()
    sums, is_recomputing = _saved_sums.get()
    if is_recomputing:
        return sums.pop(0)
    sums.append(compute())
    return sums[-1]


def sum_gradients_first(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the inputs of a block, so that each input's gradients are summed within the block.

    `recomputed` does the same. With and without it, results are therefore identical to the last
    bit. On a mesh, the inputs are returned unchanged, because a sum there can communicate and
    DTensor chooses its place.
    """
    return inputs if trace.is_on_mesh() else [tf.identity(x) for x in inputs]


_INPUT_AXES = "batch", "length", None
"""Logical axes of a saved input."""


def _identity(x):
    return x


def _unshard_length(x):
    return constrain(x, _INPUT_AXES)


def _shard_length(x):
    """Shard an activation [b, s, h] along s over the model axis, if the axis size divides s."""
    batch, length, *others = activation_specs(_INPUT_AXES, x.shape)
    axis = mesh_axis("mlp")
    divides = x.shape[1] % axis_size(axis) == 0
    return relayout(x, (batch, axis if length is None and divides else length, *others))
