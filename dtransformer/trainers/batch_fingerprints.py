"""Check, by fingerprints of their batches, that data-parallel ranks have the right rows.

Each step reduces the fingerprints together with its other sums. The host compares them when it
reads the logs, so the check sends no extra messages and never blocks a step.
"""

import numpy as np
import tensorflow as tf

from dtransformer.parallel.collectives.replica_consistency import fingerprint
from dtransformer.parallel.runtime import job

FINGERPRINTS = "fingerprints"  # Key in the sums and logs of a step.
_DIFFERENT = (
    "Rank {} and rank {} have different batches in step {}. Pass the same data in the same order "
    "on every rank (shuffle datasets with a seed), or pass `shard=False` if each rank has "
    "different rows."
)
_EQUAL = (
    "Rank {} and rank {} have had the same rows up to step {}, but ranks must have different rows "
    "with `shard=False` or an `as_dataset()` that shards. Pass `shard=True`, or select each rank's "
    "rows by `dtransformer.data_shard()`."
)


def fingerprint_table(batch, is_shared: bool) -> tf.Tensor:
    """Return a table with this rank's batch fingerprint in one row, and zeros elsewhere.

    The sum of the tables of all ranks contains every rank's fingerprint. The fingerprint of a
    shared batch depends on the order of its rows. The fingerprint of local rows does not.

    Args:
        batch: Nested tensors [b, ...]. `None` is skipped.
        is_shared: Whether all ranks must have the same batch.

    Returns:
        A float32 tensor [data ranks, 5]. Columns 0 to 3 contain 16 bits of the fingerprint each,
        which float32 adds exactly. Column 4 is `is_shared`.
    """
    group = job.data_parallel_group()
    bits = tf.bitcast(fingerprint(batch, ordered=is_shared), tf.uint16)
    row = tf.concat([tf.cast(bits, "float32"), [float(is_shared)]], 0)
    return tf.one_hot(group.index, group.size)[:, None] * row


def compare_batches(tables, step, totals):
    """Compare the batches of all ranks in consecutive steps.

    Ranks with different rows may have equal batches in one step by chance. Such batches are
    therefore compared by the sum of their fingerprints since the first step, which is equal only
    if the ranks have had the same rows so far, in any order.

    Args:
        tables: List of arrays [data ranks, 5], one per step: `fingerprint_table` summed over ranks.
        step: Number of steps before the first table.
        totals: Fingerprints [data ranks] summed over all earlier steps, or 0 before the first step.

    Returns:
        `totals` including these steps.

    Raises:
        ValueError: If ranks with a shared batch have different batches, or if ranks with local rows
            have had the same rows since the first step. All ranks raise the same error.
    """
    for i, table in enumerate(tables, step + 1):
        fingerprints = table[:, :4].astype("uint16").view("uint64")[:, 0]
        totals = totals + fingerprints
        is_shared = table[:, 4].any()
        values = fingerprints if is_shared else totals
        is_equal = values[:, None] == values
        wrong = np.argwhere(~is_equal if is_shared else np.triu(is_equal, 1))
        if wrong.size:
            ranks = job.data_parallel_group().ranks
            message = _DIFFERENT if is_shared else _EQUAL
            first, second = wrong[0]
            raise ValueError(message.format(ranks[first], ranks[second], i))
    return totals
