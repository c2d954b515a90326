"""Random batches in the form of `TranslationBatches`, for benchmarks and tests."""

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError


def random_translation_batches(
    num_batches: int,
    batch_size: int,
    source_length: int,
    target_length: int,
    vocab_size: int,
    seed: int = 0,
    start_id: int = 2,
    end_id: int = 3,
) -> tf.data.Dataset:
    """Make batches of random ids, all of one shape and without padding.

    Ids of text lie above the special ones, `end_id + 1` to `vocab_size - 1`. The batches
    are made once and kept, so that reading them costs nothing that a benchmark would see.

    Args:
        num_batches: number of batches.
        batch_size: number of sentences of a batch.
        source_length: number of tokens of a source sentence.
        target_length: number of tokens of a target sentence, the start or end token included.
        vocab_size: size of the vocabulary.
        seed: what the ids depend on.
        start_id: id that begins each target.
        end_id: id that ends each row of labels.

    Returns:
        A finite `tf.data.Dataset` of `({"source": int32 [b, s], "target": int32 [b, t]},
        labels int32 [b, t])`.

    Raises:
        InputError: no id lies between the special ids and `vocab_size`, or a size is
            less than 1.

    Example:

    >>> dataset = random_translation_batches(2, 4, 7, 5, vocab_size=100)
    >>> [labels.shape.as_list() for _, labels in dataset]
    [[4, 5], [4, 5]]
    """
    sizes = (num_batches, batch_size, source_length, target_length)
    if min(sizes) < 1:
        raise InputError(
            f"num_batches, batch_size, source_length, target_length = {sizes}: each has to be at "
            "least 1"
        )
    first = max(start_id, end_id) + 1
    if vocab_size <= first:
        raise InputError(f"vocab_size={vocab_size} has to be more than {first}")
    rng = np.random.default_rng(seed)

    def ids(length):
        return rng.integers(first, vocab_size, (num_batches, batch_size, length), np.int32)

    source, text = ids(source_length), ids(target_length - 1)
    column = np.ones((num_batches, batch_size, 1), np.int32)
    target = np.concatenate([start_id * column, text], axis=-1)
    labels = np.concatenate([text, end_id * column], axis=-1)
    return tf.data.Dataset.from_tensor_slices(({"source": source, "target": target}, labels))
