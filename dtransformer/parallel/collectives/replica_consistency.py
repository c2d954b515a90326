"""Ranks that compute on one batch compare theirs."""

import collections
import zlib

import numpy as np
import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.runtime import job
from dtransformer.parallel.runtime.process_groups import Group, exchange_json

EVERY = 100  # steps: the ranks exchange checksums on the host


class ReplicaConsistency:
    """Compares the batches of the ranks of a mesh, and of a pipeline: the first, and every 100th."""

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
        if self._counts[kind] % EVERY == 1:
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
    arrays = arrays_of(batch)
    own = np.array(checksums(arrays), "int64")
    everyone = transport.all_gather(tf.constant(own), group, "same_batch")
    if (everyone.numpy() == own).all():
        return
    texts = exchange_json(
        _shapes(arrays), lambda text: transport.concatenate(text, group, "same_batch_shapes")
    )
    listing = ", ".join(f"rank {rank} has {text}" for rank, text in zip(sorted(group.ranks), texts))
    raise ValueError(
        f"the ranks of {name} compute on one batch, and theirs differ: {listing}; give them the "
        "same rows in the same order, those of dtransformer.parallel.runtime.job.data_shard(), and "
        "fit(shuffle=False) where they are arrays"
    )


def arrays_of(batch) -> list[np.ndarray]:
    """Return the arrays of nested tensors; of ragged and sparse ones those that they are made of."""
    flat = tf.nest.flatten(batch, expand_composites=True)
    return [np.asarray(x) for x in flat if x is not None]


def checksums(arrays: list[np.ndarray]) -> list[int]:
    """Return the checksums of the shapes and types, and of the contents, of arrays."""
    checksum = 0
    for array in arrays:  # one of texts has their addresses
        content = repr(array.tolist()).encode() if array.dtype.hasobject else array
        checksum = zlib.crc32(np.ascontiguousarray(content), checksum)
    return [zlib.crc32(_shapes(arrays).encode()), checksum]


def _shapes(arrays):
    return "; ".join(f"{x.dtype} {list(x.shape)}" for x in arrays)
