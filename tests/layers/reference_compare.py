"""Runs a Keras layer and the reference on the same numbers and compares everything."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tests.layers.reference_weights as weights_of
from tests.tolerances import LAYERS, assert_all_close

POLICIES = tuple(LAYERS)
each_policy = pytest.mark.parametrize("policy", POLICIES)


@contextlib.contextmanager
def dtype_policy(name):
    """Layers made inside have Keras' dtype policy `name`, as users set it."""
    outer = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(outer)


def compare(policy, make, reference, inputs, weights=None, call=None, tolerance=LAYERS):
    """Output and every gradient of a layer against the reference.

    Args:
        policy: The dtype policy to make the layer under.
        make: Function without arguments that makes the layer.
        reference: Function (*inputs, weights) -> (output, backward); without the
            weights where there are none.
        inputs: List of arrays; float arrays get gradients, ids do not.
        weights: Nested dict of arrays under the layer's attribute names; the
            layer must have these weights and no others.
        call: Function (layer, *tensors) -> the output; the layer itself if None.
        tolerance: A table of tests/tolerances.py.

    Returns:
        The layer, with `weights` in its variables.
    """
    with dtype_policy(policy):
        layer = make()
    call = call or (lambda layer, *tensors: layer(*tensors, training=True))
    tensors = [tf.constant(x, "float32" if x.dtype == np.float64 else x.dtype) for x in inputs]
    call(layer, *tensors)
    variables = assign(layer, weights or {})
    sources = {f"input {i}": t for i, t in enumerate(tensors) if t.dtype == tf.float32}

    with tf.GradientTape() as tape:
        tape.watch(list(sources.values()))
        output = call(layer, *tensors)
    factor = weights_of.numbers(np.random.default_rng(7), *output.shape)
    sources.update((name, variable.value) for name, variable in variables.items())
    gradients = tape.gradient(output, sources, tf.cast(factor, output.dtype))

    expected, backward = reference(*inputs) if weights is None else reference(*inputs, weights)
    input_gradients, weight_gradients = backward(factor)
    wanted = {f"input {i}": g for i, g in enumerate(input_gradients)}
    wanted.update(weights_of.leaves(weight_gradients))
    assert output.dtype == tf.as_dtype(keras.DTypePolicy(policy).compute_dtype)
    assert_all_close({"output": output}, {"output": expected}, tolerance[policy])
    assert_all_close(gradients, wanted, tolerance[policy])
    return layer


def assign(layer, weights):
    """Puts nested weights into a layer; returns its variables by their path.

    Fails where the layer lacks one, has it in another shape, or has others.
    """
    variables = {}
    for path, value in weights_of.leaves(weights):
        part = layer
        for name in path.split("."):
            part = part[int(name)] if name.isdigit() else getattr(part, name)
        assert tuple(part.shape) == value.shape, path
        part.assign(value)
        variables[path] = part
    known = {id(variable) for variable in variables.values()}
    others = [v.path for v in layer.trainable_variables if id(v) not in known]
    assert not others, f"weights that the contract does not name: {others}"
    assert len(layer.trainable_variables) == len(variables)
    return variables
