"""Datasets whose iterators stop without delay."""

import tensorflow as tf


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Disable autotuning of a dataset, unless its options already enable or disable it.

    With autotuning, destroying an iterator may wait for the next turn of the tuner's thread: as
    long as the iteration has taken so far, up to a minute in each epoch. Without it,
    `tf.data.AUTOTUNE` means the number of cores. This function is unnecessary once TensorFlow wakes
    the thread when its iterator is cancelled.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
