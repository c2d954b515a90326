"""Ranks that compute on one batch compare theirs."""

import collections

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.process_groups import Group, exchange_json

EVERY = 100  # steps: the ranks exchange checksums on the host


class ReplicaConsistency:
    """Comparison of the batches of a mesh's or pipeline's ranks: 1, 2 and every 100th."""

    def __init__(self):
        self._counts = collections.Counter()

    def check(self, batch, kind: str) -> None:
        """Compare a batch, where its turn has come.

        Args:
            batch: nested tensors; None stays out.
            kind: what is done with it; batches of each kind are counted for themselves.

        Raises:
            ValueError: see `check_replica_consistency`.
        """
        self._counts[kind] += 1
        if self._counts[kind] <= 2 or self._counts[kind] % EVERY == 0:
            check_replica_consistency(batch, job.model_parallel_group(), "a mesh")
            check_replica_consistency(batch, job.pipeline_group(), "a pipeline")


def check_replica_consistency(batch, group: Group, name: str) -> None:
    """Compare the nested tensors of a batch of ranks that compute on the same one.

    Args:
        batch: nested tensors; None stays out.
        group: the `Group` of the ranks.
        name: what the ranks are together, for the error.

    Raises:
        ValueError: shapes, types or contents differ; on every rank of the group.
    """
    if group.size == 1:
        return
    flat = [x for x in tf.nest.flatten(batch, expand_composites=True) if x is not None]
    tensors = [tf.convert_to_tensor(x) for x in flat]
    shapes = "; ".join(f"{x.dtype.name} {list(x.shape)}" for x in tensors)
    everyone = transport.all_gather(fingerprint([tf.constant([shapes]), *tensors]), group, "same_batch")
    if len({*everyone.numpy()}) == 1:
        return
    texts = exchange_json(
        shapes, lambda text: transport.concatenate(text, group, "same_batch_shapes")
    )
    listing = ", ".join(f"rank {rank} has {text}" for rank, text in zip(sorted(group.ranks), texts))
    raise ValueError(
        f"the ranks of {name} compute on one batch, and theirs differ: {listing}; give them the "
        "same rows in the same order, those of dtransformer.parallel.runtime.job.data_shard(), and "
        "fit(shuffle=False) where they are arrays"
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
