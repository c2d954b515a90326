"""Recompute: the backward pass computes activations again instead of storing them.

Reference:
    - [Chen et al., 2016](https://arxiv.org/abs/1604.06174)
    - [Korthikanti et al., 2022, §5](https://arxiv.org/abs/2205.05198), for the choice of activations
      in a Transformer
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer.parallel.config.config import TransformerRecomputeConfig
from dtransformer.parallel.mesh.axis_rules import (
    activation_specs,
    axis_size,
    constrain,
    mesh_axis,
    relayout,
)
from dtransformer.parallel.ops.custom_gradient import custom_gradient, delay_seed, depend_on
from dtransformer.parallel.ops.split_backward import not_splitting_backward
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
from dtransformer.parallel.zero.gather import full_trained_value

_saved_sums = Scoped("saved_sums")
"""`(sums, is_recomputing)`, where `sums` is the list of results that `keep_for_recompute` saves."""


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

    Both computations draw the same dropout masks.

    Args:
        function: Function of tensors that returns a tensor. Gradients are computed for its inputs
            and `weights` only.
        inputs: List of floating-point tensors of shape `[b, s, h]`.
        weights: List of the Keras variables that `function` reads.
        config: `TransformerRecomputeConfig`. Selects results that are saved in addition to the
            inputs. Defaults to `TransformerRecomputeConfig()`.
        add_loss: Function that takes the list of losses that layers add inside `function`. By
            default they are discarded.

    Returns:
        The result of `function`.
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
        scope = StateScope(zip(weights, args[num_inputs:]), collect_losses=True)
        saved_sums = _saved_sums.get()
        if not config.mp_comm_recompute and trace.is_on_mesh():
            saved_sums = sums, is_recomputing
        with (
            dropout_seed(seed),
            use_random_ids(random_ids),
            not_splitting_backward(),
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
            recomputed_args = [depend_on(unshard(x), dy) for x in saved_inputs] + args[num_inputs:]
            with tf.GradientTape() as tape:
                tape.watch(recomputed_args)
                results, _ = run(
                    recomputed_args, delay_seed(seed, dy), list(sums), is_recomputing=True
                )
            upstream = [dy, *other_gradients][: len(results)]
            gradients = tape.gradient(
                results, recomputed_args, upstream, unconnected_gradients="zero"
            )
            return [*map(unshard, gradients[:num_inputs]), *gradients[num_inputs:]]

        return [*results, *auxiliary], gradient

    def report(losses, metrics):
        if add_loss is not None:
            add_loss(losses)
        report_all(metrics)

    return effects.publish(forward(*inputs, *values), report)


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
