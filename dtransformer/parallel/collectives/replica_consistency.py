"""Checks that ranks that compute on the same batch have the same tensors."""

import collections

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.process_groups import Group, exchange_json

EVERY = 100  # The host waits for each comparison.


class ReplicaConsistency:
    """Comparison of batches within a mesh and a pipeline: the first two and every 100th batch."""

    def __init__(self):
        self._counts = collections.Counter()

    def check(self, batch, kind: str) -> None:
        """Compare a batch, or only count it.

        Args:
            batch: Nested tensors. `None` is skipped.
            kind: Name of the computation. Each kind has a separate count.

        Raises:
            ValueError: If ranks have different batches.
        """
        self._counts[kind] += 1
        if self._counts[kind] <= 2 or self._counts[kind] % EVERY == 0:
            check_replica_consistency(batch, job.model_parallel_group(), "a mesh")
            check_replica_consistency(batch, job.pipeline_group(), "a pipeline")


def check_replica_consistency(batch, group: Group, name: str) -> None:
    """Check that ranks that compute on the same batch have the same tensors.

    Args:
        batch: Nested tensors. `None` is skipped.
        group: The `Group` of the ranks.
        name: Name of the group, such as "a mesh", for the error message.

    Raises:
        ValueError: If shapes, types or contents differ. All ranks of the group raise the error.
    """
    if group.size == 1:
        return
    shapes = "; ".join(
        f"{x.dtype.name} {list(x.shape)}"
        for x in tf.nest.flatten(batch, expand_composites=True)
        if x is not None
    )
    gathered = exchange_json(
        [shapes, int(fingerprint(batch))],
        lambda text: transport.concatenate(text, group, "same_batch"),
    )
    if all(entry == gathered[0] for entry in gathered):
        return
    listing = ", ".join(
        f"rank {rank} has {text}" for rank, (text, _) in zip(sorted(group.ranks), gathered)
    )
    raise ValueError(
        f"The ranks of {name} have different batches: {listing}. Give them the same rows in the "
        "same order, see `dtransformer.data_shard()`."
    )


def fingerprint(batch, ordered: bool = True) -> tf.Tensor:
    """Return 64 bits that depend on the contents of a batch.

    Args:
        batch: Nested tensors [b, ...]. `None` is skipped.
        ordered: Whether the order of the rows counts. If not, the result is a sum over the rows.

    Returns:
        An int64 scalar.
    """
    tensors = tf.nest.flatten(batch, expand_composites=True)
    with tf.device("CPU:0"):
        rows = tf.concat([tf.fingerprint(x) for x in tensors if x is not None], 0)
        if ordered:
            rows = tf.fingerprint(tf.reshape(rows, [1, -1]))
        return tf.reduce_sum(tf.bitcast(rows, tf.int64))
