"""Recompute: the backward pass computes activations again instead of keeping them.

Reference: Chen et al., 2016, "Training deep nets with sublinear memory cost", arXiv
1604.06174; what is worth it in a Transformer: Korthikanti et al., 2022, arXiv
2205.05198, §5.
"""

import contextlib
from collections.abc import Callable

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.config.config import TransformerRecomputeConfig
from dtransformer.parallel.mesh.axis_rules import (
    activation_specs,
    axis_size,
    constrain,
    mesh_axis,
    relayout,
)
from dtransformer.parallel.ops.custom_gradient import after, custom_gradient, seed_after
from dtransformer.parallel.ops.split_backward import not_splitting_backward
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.auxiliary_metrics import collecting, is_collecting, report_all
from dtransformer.parallel.tracing.dropout_seed import (
    current_dropout_seed,
    dropout_seed,
    replaced_random_ids,
    use_random_ids,
)
from dtransformer.parallel.tracing.scoped import Scoped
from dtransformer.parallel.weights.sharded_variable import trained_value
from dtransformer.parallel.zero.gather import RecomputedUnsharding

_saved_sums = Scoped("saved_sums")
"""`(sums, is_recomputing)` of row-parallel products that the backward pass does not repeat."""


def as_recompute_config(value: bool | TransformerRecomputeConfig) -> TransformerRecomputeConfig:
    """Return True, False or a `TransformerRecomputeConfig` as the latter."""
    if isinstance(value, TransformerRecomputeConfig):
        return value
    return TransformerRecomputeConfig(recompute=bool(value))


def recomputed(
    function: Callable,
    inputs: list[tf.Tensor],
    weights: list[keras.Variable],
    config: TransformerRecomputeConfig | None = None,
    add_loss: Callable = lambda losses: None,
) -> tf.Tensor:
    """Return function(*inputs), of which the backward pass keeps the inputs only.

    Dropout masks are the same both times.

    Args:
        function: a function of tensors that returns one tensor. What else it reads has
            no gradient.
        inputs: list of float tensors [b, s, h].
        weights: list of the Keras variables that it reads.
        config: a `TransformerRecomputeConfig`, of what is kept besides; by default nothing.
        add_loss: is called with the list of what layers inside of the function add to the loss.

    Returns:
        A tensor.
    """
    config = config or TransformerRecomputeConfig()
    shard, unshard = _sharding_of_inputs(config)
    unsharding = RecomputedUnsharding(weights, keeps=not config.parallel_optimizer_comm_recompute)
    others = unsharding.others
    with _compat.without_autocast():  # gradients are taken of the type that is stored
        values = [tf.convert_to_tensor(trained_value(weight)) for weight in others]
        values += unsharding.shards()
    seed, num_inputs, metric_names, states = current_dropout_seed(), len(inputs), [], []
    numbers = replaced_random_ids()
    is_training_step = trace.is_training_step()

    def run(args, seed, sums, dy=None):
        """Compute for the first time; or again, once the gradient dy of the result is known.

        Returns the result, what layers add to the loss, and, the first time, what they tell, and
        the new values of their states.
        """
        num_tensors = num_inputs + len(others)
        own, shards = args[num_inputs:num_tensors], args[num_tensors:]
        with contextlib.ExitStack() as stack:
            stack.enter_context(dropout_seed(seed))
            stack.enter_context(use_random_ids(numbers))
            stack.enter_context(not_splitting_backward())
            stack.enter_context(trace.training_step(is_training_step))
            scope = StateScope(list(zip(others, own)), collect_losses=True)
            stack.enter_context(scope)
            stack.enter_context(unsharding.scope(shards, dy))
            if not config.mp_comm_recompute and trace.is_on_mesh():
                stack.enter_context(_saved_sums.set((sums, dy is not None)))
            auxiliary_metrics = stack.enter_context(collecting(is_collecting() and dy is None))
            results = [function(*args[:num_inputs]), *scope.losses]
            if dy is not None:
                return results
            metric_names[:], states[:] = auxiliary_metrics, scope.states.values()
            return [*results, *auxiliary_metrics.values(), *map(scope.get_current_value, states)]

    @custom_gradient
    def forward(*args):
        # The layout is that of the second time, when they are unsharded again: else dropout
        # would draw other masks.
        args = [*map(unshard, args[:num_inputs]), *args[num_inputs:]]
        sums = []
        results = run(args, seed, sums)
        kept = [shard(x) for x in args[:num_inputs]]

        def gradient(dy, *of_besides):
            again = [after(unshard(x), dy) for x in kept] + args[num_inputs:]
            with tf.GradientTape() as tape:
                tape.watch(again)
                results = run(again, seed_after(seed, dy), list(sums), dy)
            upstream = [dy, *of_besides][: len(results)]
            gradients = tape.gradient(results, again, upstream, unconnected_gradients="zero")
            return [*map(unshard, gradients[:num_inputs]), *gradients[num_inputs:]]

        return results, gradient

    result, *besides = forward(*inputs, *values)
    num_losses = len(besides) - len(metric_names) - len(states)
    add_loss(besides[:num_losses])
    report_all(dict(zip(metric_names, besides[num_losses:])))
    for variable, value in zip(states, besides[num_losses + len(metric_names) :]):
        variable.assign(value)
    return result


class StateScope(keras.StatelessScope):
    """A scope inside of another that remembers which variables are set.

    Attributes:
        states: dict of their ids and themselves, but for the seeds of Keras' own dropout.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.states = {}

    def add_update(self, update):
        super().add_update(update)
        if update[0].dtype != "uint32":
            self.states[id(update[0])] = update[0]

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        return value


def keep_for_recompute(compute: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Return compute(), which `recomputed` keeps with `mp_comm_recompute=False`.

    Args:
        compute: a function that returns a tensor, a sum over the mesh axis; it is not called
            the second time.
    """
    if _saved_sums.get() is None:
        return compute()
    sums, again = _saved_sums.get()
    if again:
        return sums.pop(0)
    sums.append(compute())
    return sums[-1]


def sum_gradients_first(inputs: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the inputs of a block, whose gradients of one input are summed within the block.

    They are with `recomputed`: so its results are the same to the last bit. On the mesh,
    where a sum takes a collective, DTensor decides.
    """
    return inputs if trace.is_on_mesh() else [tf.identity(x) for x in inputs]


_AXES = "batch", "length", None  # of a kept input


def _sharding_of_inputs(config):
    """Return functions that shard an input that is kept, and unshard it for its use."""
    if config.recompute_slice_activation and trace.is_on_mesh():
        return _shard_length, lambda x: constrain(x, _AXES)
    return (lambda x: x), (lambda x: x)


def _shard_length(x):
    """Shard an activation [b, s, h] along s over the model axis, where that is divisible."""
    batch, length, *others = activation_specs(_AXES, x.shape)
    axis = mesh_axis("mlp")
    divides = x.shape[1] % axis_size(axis) == 0
    return relayout(x, (batch, axis if length is None and divides else length, *others))
