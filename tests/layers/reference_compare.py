"""Comparison of a Keras layer with the reference: output and all gradients."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layers import reference_weights
from tests.tolerances import LAYERS, assert_all_close

POLICIES = tuple(LAYERS)
each_policy = pytest.mark.parametrize("policy", POLICIES)


@contextlib.contextmanager
def dtype_policy(name):
    """Set the dtype policy `name` for layers created in the `with` block."""
    outer = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(outer)


def compare(policy, make, reference, inputs, weights=None, call=None, tolerance=LAYERS):
    """Compare a layer's output and all gradients with the reference.

    Args:
        policy: Name of the dtype policy.
        make: Function without arguments that creates the layer.
        reference: Function of `(*inputs, weights)` that returns `(output, backward)`. It takes no
            weights if `weights` is `None`.
        inputs: List of arrays. Float arrays have gradients, ids do not.
        weights: Nested dictionary of arrays with the layer's attribute names. The layer must have
            exactly these weights.
        call: Function of `(layer, *tensors)` that returns the output. Defaults to calling the
            layer.
        tolerance: Table in tests/tolerances.py.

    Returns:
        The layer with `weights` as its variables.
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
    factor = reference_weights.numbers(np.random.default_rng(7), *output.shape)
    sources.update((name, variable.value) for name, variable in variables.items())
    gradients = tape.gradient(output, sources, tf.cast(factor, output.dtype))

    expected, backward = reference(*inputs) if weights is None else reference(*inputs, weights)
    input_gradients, weight_gradients = backward(factor)
    expected_gradients = {f"input {i}": g for i, g in enumerate(input_gradients)}
    expected_gradients.update(reference_weights.leaves(weight_gradients))
    assert output.dtype == tf.as_dtype(keras.DTypePolicy(policy).compute_dtype)
    assert_all_close({"output": output}, {"output": expected}, tolerance[policy])
    assert_all_close(gradients, expected_gradients, tolerance[policy])
    return layer


def assign(layer, weights):
    """Assign nested weights to a layer and return its variables by path.

    Fails if the layer has other weights or other shapes.
    """
    variables = {}
    for path, value in reference_weights.leaves(weights):
        part = layer
        for name in path.split("."):
            part = part[int(name)] if name.isdigit() else getattr(part, name)
        assert tuple(part.shape) == value.shape, path
        part.assign(value)
        variables[path] = part
    known = {id(variable) for variable in variables.values()}
    unexpected = [v.path for v in layer.trainable_variables if id(v) not in known]
    assert not unexpected, f"weights that the contract does not name: {unexpected}"
    assert len(layer.trainable_variables) == len(variables)
    return variables
