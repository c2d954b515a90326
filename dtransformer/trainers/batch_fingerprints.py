"""Comparison of the data of data-parallel ranks, by fingerprints of their batches.

A step adds them up with its sums. The host compares them when it reads the logs, so that no step
sends more messages or waits for the host.
"""

import numpy as np
import tensorflow as tf

from dtransformer.parallel.collectives.replica_consistency import fingerprint
from dtransformer.parallel.runtime import job

FINGERPRINTS = "fingerprints"  # The key in the sums and the logs of a step.
_DIFFERENT = (
    "rank {} and rank {} have different batches in step {}. Give every rank the same data in the "
    "same order (a dataset that shuffles needs a seed), or pass shard=False if each rank has its "
    "own rows"
)
_EQUAL = (
    "rank {} and rank {} have the same rows up to step {}, but each must have its own (shard=False, "
    "or as_dataset() without num_shards=1). Pass shard=True, or give each rank the rows of "
    "dtransformer.data_shard()"
)


def fingerprint_table(batch, is_shared: bool) -> tf.Tensor:
    """Return this rank's row of a table whose other rows are zeros: the sum over ranks fills it.

    The fingerprint of a shared batch depends on the order of the rows. The fingerprint of a
    separate share does not.

    Args:
        batch: Nested tensors [b, ...]. `None` is skipped.
        is_shared: Whether all ranks must have the same batch.

    Returns:
        A float32 tensor [data ranks, 5]. Columns 0 to 3 have 16 bits
        of the fingerprint each, which float32 adds exactly. Column 4 is `is_shared`.
    """
    group = job.data_parallel_group()
    bits = tf.bitcast(fingerprint(batch, ordered=is_shared), tf.uint16)
    row = tf.concat([tf.cast(bits, "float32"), [float(is_shared)]], 0)
    return tf.one_hot(group.index, group.size)[:, None] * row


def compare_batches(tables, step, totals):
    """Compare the batches of the ranks in some steps.

    Ranks with separate shares may receive equal rows by chance. Their sums since the first step
    are equal only if the ranks have had the same rows so far, in any order.

    Args:
        tables: List of arrays, for each step the sum of the ranks' `fingerprint_table`s.
        step: Number of steps before.
        totals: Sums of the fingerprints of earlier steps, by rank. 0 in the first step.

    Returns:
        The sums up to the last step.

    Raises:
        ValueError: If ranks that share their data have different batches, or ranks with separate
            shares have the same rows. All ranks raise the same error.
    """
    for i, table in enumerate(tables, step + 1):
        numbers = table[:, :4].astype("uint16").view("uint64")[:, 0]
        totals, is_shared = totals + numbers, table[:, 4].any()
        values = numbers if is_shared else totals
        is_equal = values[:, None] == values
        wrong = np.argwhere(~is_equal if is_shared else np.triu(is_equal, 1))
        if wrong.size:
            ranks = job.data_parallel_group().ranks
            message = _DIFFERENT if is_shared else _EQUAL
            raise ValueError(message.format(*(ranks[position] for position in wrong[0]), i))
    return totals
