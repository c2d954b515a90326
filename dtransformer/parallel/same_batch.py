"""Ranks that compute on one batch compare theirs."""

import zlib

import numpy as np
import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.json_exchange import exchange_json


def check_mesh_batch(batch):
    """Compare the batch of the island's ranks: they compute on the same one.

    Raises:
        ValueError: see `check_same_batch`.
    """
    check_same_batch(batch, job.model_parallel_group(), "an island")


def check_same_batch(batch, group, name):
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
    arrays = [np.asarray(x) for x in tf.nest.flatten(batch) if x is not None]
    shapes = "; ".join(f"{x.dtype} {list(x.shape)}" for x in arrays)
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(array), checksum)
    mine = np.array([zlib.crc32(shapes.encode()), checksum], "int64")
    hvd, ranks = job.horovod(), {"process_set": group.process_set}
    everyone = hvd.allgather(mine[None], name="same_batch", **ranks)
    if (everyone.numpy() == mine).all():
        return
    texts = exchange_json(shapes, lambda own: hvd.allgather(own, name="same_batch_shapes", **ranks))
    told = ", ".join(f"rank {rank} has {text}" for rank, text in zip(group.ranks, texts))
    raise ValueError(
        f"the ranks of {name} compute on one batch, and theirs differ: {told}; give them the "
        "same rows in the same order, those of dtransformer.parallel.job.data_shard(), and "
        "fit(shuffle=False) where they are arrays"
    )
