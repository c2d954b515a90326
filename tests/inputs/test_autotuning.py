"""Datasets of `fit` stop without delay, unless their options enable tuning."""

import tensorflow as tf

from dtransformer.inputs.autotuning import without_autotuning


def test_autotuning_is_disabled_unless_options_set_it():
    data = tf.data.Dataset.range(3).map(lambda x: x, num_parallel_calls=tf.data.AUTOTUNE)
    quiet = without_autotuning(data)
    assert quiet.options().autotune.enabled is False
    assert int(quiet.cardinality()) == 3 and list(quiet.as_numpy_iterator()) == [0, 1, 2]
    options = tf.data.Options()
    options.autotune.enabled = True
    requested = data.with_options(options)
    assert without_autotuning(requested) is requested
