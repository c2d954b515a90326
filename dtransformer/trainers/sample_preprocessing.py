"""Preprocessing of raw samples by the network, as in KerasHub's tasks."""

import typing

import keras
import tensorflow as tf

PREPROCESS = "preprocess_samples"
_KERAS_BATCH_SIZE = 32


class Samples(typing.NamedTuple):
    """Data of `fit`, `evaluate` or `predict`, as in `keras.Model.fit`."""

    x: object
    y: object = None
    sample_weight: object = None
    batch_size: int | None = None


def preprocess_batch(network: keras.Model, x, y=None, sample_weight=None) -> tuple:
    """Apply the network's preprocessing to a batch.

    Networks with a method `preprocess_samples(x, y, sample_weight)` preprocess their data, unless
    their attribute `preprocessor` is `None`. A dict with the names of the network's inputs is
    already preprocessed.

    Args:
        network: The `keras.Model`.
        x, y, sample_weight: As in `keras.Model.train_on_batch`.

    Returns:
        A tuple `(x, y, sample_weight)`. Without preprocessing, the arguments.
    """
    if not _needs_preprocessing(network, x):
        return x, y, sample_weight
    batch = getattr(network, PREPROCESS)(x, y, sample_weight)
    return keras.utils.unpack_x_y_sample_weight(batch)


def preprocess_data(network: keras.Model, samples: Samples) -> Samples:
    """Apply the network's preprocessing to the data of `fit`, `evaluate` or `predict`.

    Arrays and lists become a `tf.data.Dataset` of batches in the order of their rows, as in
    KerasHub. See `preprocess_batch` for networks and data that need no preprocessing.

    Args:
        network: The `keras.Model`.
        samples: The `Samples`.

    Returns:
        The preprocessed `Samples`. Without preprocessing, the argument.

    Raises:
        ValueError: If the data are neither arrays nor a `tf.data.Dataset`.
    """
    x = samples.x
    is_dataset = isinstance(x, tf.data.Dataset)
    first = keras.utils.unpack_x_y_sample_weight(x.element_spec)[0] if is_dataset else x
    if hasattr(x, "as_dataset") or not _needs_preprocessing(network, first):
        return samples
    dataset = x
    if not is_dataset:
        if not (hasattr(x, "shape") or tf.nest.is_nested(x)):
            raise ValueError(
                f"{type(network).__name__} preprocesses arrays, lists and `tf.data.Dataset`, but "
                f"received a {type(x).__name__}. Set its `preprocessor` to `None`, and pass batches "
                "of the network's inputs."
            )
        rows = keras.utils.pack_x_y_sample_weight(*samples[:3])
        dataset = tf.data.Dataset.from_tensor_slices(rows)
        dataset = dataset.batch(samples.batch_size or _KERAS_BATCH_SIZE)
        samples = Samples(dataset)
    dataset = dataset.map(getattr(network, PREPROCESS), num_parallel_calls=tf.data.AUTOTUNE)
    return samples._replace(x=dataset.prefetch(tf.data.AUTOTUNE))


def _needs_preprocessing(network, x):
    if not hasattr(network, PREPROCESS) or getattr(network, "preprocessor", network) is None:
        return False
    input_names = {symbol.name for symbol in getattr(network, "inputs", None) or ()}
    return not (isinstance(x, dict) and {*x} == input_names)
