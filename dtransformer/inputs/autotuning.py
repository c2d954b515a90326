"""Datasets whose iterators end at once."""

import tensorflow as tf


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset whose iterators end at once, unless it says itself what to tune.

    Where the parallelism of a dataset is tuned, the end of an iterator may wait for the tuner's
    next turn: as long as the iteration has taken so far, up to a minute, in each epoch.
    `tf.data.AUTOTUNE` is the number of cores then. Unnecessary if the tuner's thread woke up when
    its iterator is cancelled.
    """
    if dataset.options().autotune.enabled is not None:
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
