"""Training data for the small networks: sentences of random words."""

import numpy as np
import tensorflow as tf

from dtransformer.parallel.runtime import job

# Rows, source and target positions of batches: sizes that every layout divides, sizes that need
# padding, and uneven lengths with rows that micro-batches divide.
EVEN, UNEVEN, OF_EVEN_ROWS = (8, 16, 8), (6, 13, 11), (8, 13, 11)


def batches(num_batches, vocab_size, seed, shapes=(EVEN, UNEVEN)):
    """Return a list of `(inputs, labels)` batches with padded sentences of different lengths.

    Args:
        num_batches: Number of batches.
        vocab_size: Upper bound of the ids, exclusive.
        seed: Integer.
        shapes: Tuple of (rows, source positions, target positions). The batches cycle through
            the shapes.
    """
    rng = np.random.default_rng(seed)

    def sentences(num_rows, width):
        lengths = rng.integers(1, width, num_rows)
        rows = [rng.integers(4, vocab_size, length) for length in lengths]
        return np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype("int32")

    result = []
    for i in range(num_batches):
        num_rows, source_width, target_width = shapes[i % len(shapes)]
        source, labels = sentences(num_rows, source_width), sentences(num_rows, target_width)
        target = np.pad(labels, ((0, 0), (1, 0)), constant_values=2)[:, :-1]
        labels[range(num_rows), np.count_nonzero(labels, axis=1)] = 3
        result.append(({"source": source, "target": target}, labels))
    return result


def replica_share(of_all, num_rows=None):
    """Return a dataset with this replica's rows of each batch, contiguous and in rank order.

    Args:
        of_all: List of `batches`.
        num_rows: Number of rows of a global batch if it is constant, or `None`.
    """
    index, count = job.data_shard()
    num_rows = num_rows and num_rows // count
    ids = tf.TensorSpec([num_rows, None], "int32")

    def local_rows(x):
        return x[len(x) * index // count : len(x) * (index + 1) // count]

    return tf.data.Dataset.from_generator(
        lambda: (tf.nest.map_structure(local_rows, batch) for batch in of_all),
        output_signature=({"source": ids, "target": ids}, ids),
    )
