"""Shapes that are known in part."""

import numpy as np
import tensorflow as tf

from dtransformer.parallel.tracing.tensor_specs import open_specs


def test_dimensions_that_are_told_to_vary_are_open():
    told = ({"ids": tf.TensorSpec([None, None])}, tf.TensorSpec([8, None]), None)
    ids = tf.zeros([2, 5], "int32")
    inputs, labels, weight = open_specs(({"ids": ids}, ids, None), told)
    assert inputs["ids"] == tf.TensorSpec([None, None], "int32")
    assert labels == tf.TensorSpec([2, None], "int32")
    assert weight is None


def test_what_is_not_told_of_stays_as_it_is():
    known = tf.TensorSpec([2, 5], "int32")
    x = tf.constant(np.zeros([2, 5], "int32"))
    assert open_specs(x, None) == known
    assert open_specs((x, x), (tf.TensorSpec([None]), None)) == (known, known)
    assert open_specs([x], (tf.TensorSpec([None, None]), None)) == [known]
