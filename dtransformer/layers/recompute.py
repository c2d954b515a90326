"""Recompute: the backward pass computes activations again instead of keeping them.

Reference: Chen et al., 2016, "Training deep nets with sublinear memory cost", arXiv
1604.06174; what is worth it in a Transformer: Korthikanti et al., 2022, arXiv
2205.05198, §5.
"""

import contextlib

import keras
import tensorflow as tf
from keras.src.backend.common.variables import AutocastScope

from dtransformer.layers import dropout
from dtransformer.parallel.axis_rules import activation_specs, mesh_axis
from dtransformer.parallel.config import TransformerRecomputeConfig
from dtransformer.parallel.custom_gradient import custom_gradient
from dtransformer.parallel.dtensor.layouts import axis_size, relayout
from dtransformer.parallel.sharded_variable import trained_value
from dtransformer.parallel.tensor_parallel.linear import keep_sums
from dtransformer.parallel.trace import is_on_mesh
from dtransformer.parallel.zero.gather import (
    current_unsharding,
    unsharding,
)
from dtransformer.parallel.zero.variables import FullyShardedVariable


def as_recompute_config(value):
    """Return True, False or a `TransformerRecomputeConfig` as the latter."""
    if isinstance(value, TransformerRecomputeConfig):
        return value
    return TransformerRecomputeConfig(recompute=bool(value))


def recomputed(function, inputs, weights, config=None):
    """Return function(*inputs), of which the backward pass keeps the inputs only.

    Dropout masks are the same both times.

    Args:
        function: a function of tensors that returns one tensor. What else it reads has
            no gradient.
        inputs: list of float tensors [b, s, h].
        weights: list of the Keras variables that it reads.
        config: a `TransformerRecomputeConfig`, of what is kept on a mesh; by default
            nothing but the inputs.

    Returns:
        A tensor.
    """
    config = config or TransformerRecomputeConfig()
    outer = current_unsharding()
    is_parted = lambda w: outer is not None and isinstance(w, FullyShardedVariable)
    parted = [weight for weight in weights if is_parted(weight)]
    whole = [weight for weight in weights if not is_parted(weight)]
    with AutocastScope(None):
        values = [tf.convert_to_tensor(trained_value(weight)) for weight in whole]
        values += [outer.part(weight) for weight in parted]
    name = outer.message("recomputed") if parted else ""
    number = outer.number if parted else 0
    seed, num_inputs = dropout.current_seed(), len(inputs)
    keeps_sums = not config.mp_comm_recompute and is_on_mesh()
    slices = config.recompute_slice_activation and is_on_mesh()

    def run(args, sums, replay, seed=seed, gate=None):
        values = args[num_inputs:]
        with contextlib.ExitStack() as stack:
            stack.enter_context(dropout.dropout_seed(seed))
            stack.enter_context(keras.StatelessScope(list(zip(whole, values))))
            if parted:
                parts = {id(w): part for w, part in zip(parted, values[len(whole) :])}
                keeps = replay and not config.parallel_optimizer_comm_recompute
                options = {"parts": parts, "keeps": keeps, "gate": gate}
                again = "/again" * replay
                stack.enter_context(unsharding(f"{name}{again}", **options))
            if keeps_sums:
                stack.enter_context(keep_sums(sums, replay))
            return function(*args[:num_inputs])

    @custom_gradient
    def forward(*args):
        sums = []
        # Their layout is that of the second time, when they are whole again: else dropout would
        # draw other masks.
        args = [_whole(x) if slices and i < num_inputs else x for i, x in enumerate(args)]
        result = run(args, sums, replay=False, gate=outer.before_block if parted else None)
        kept = [_slice(x) if slices else x for x in args[:num_inputs]]

        def gradient(dy):
            again = [_after(_whole(x) if slices else x, dy) for x in kept]
            again += args[num_inputs:]
            with tf.GradientTape() as tape:
                tape.watch(again)
                gate = outer.after_block.get(number + 1, dy) if parted else None
                y = run(again, list(sums), replay=True, seed=_seed_after(seed, dy), gate=gate)
            gradients = tape.gradient(y, again, dy, unconnected_gradients="zero")
            return [_whole(g) if slices and i < num_inputs else g for i, g in enumerate(gradients)]

        return result, gradient

    return forward(*inputs, *values)


def _after(x, dy):
    """Return x once dy is known: nothing may be computed again before.

    Compilers, and DTensor, respect a dependence on values only: what is added is 0 where
    dy is a number.
    """
    if x.shape != dy.shape or not is_on_mesh():
        # On a mesh a single entry lies on one device: there all are looked at.
        dy = tf.reduce_min(dy) if is_on_mesh() else _first_entry(dy)
    return x + tf.cast(tf.where(dy == dy, 0.0, float("nan")), x.dtype)


def _seed_after(seed, dy):
    """Return the seed once dy is known: else masks are kept, as they depend on shapes only.

    On a mesh they are: a byte an entry is less than what waiting for all devices costs.
    """
    if is_on_mesh():
        return seed
    first = _first_entry(dy)
    return seed + tf.where(first == first, 0, 1)


def _first_entry(x):
    return tf.reduce_min(tf.reshape(x, [-1])[:1])


def _slice(x):
    """Cut what a device keeps of an activation [b, s, h] along s, where that is divisible."""
    batch, length, *others = _specs(x)
    axis = mesh_axis("mlp")
    divides = x.shape[1] % axis_size(axis) == 0
    return relayout(x, (batch, axis if length is None and divides else length, *others))


def _whole(x):
    return relayout(x, _specs(x))


def _specs(x):
    return activation_specs(("batch", "length", None), x.shape)
