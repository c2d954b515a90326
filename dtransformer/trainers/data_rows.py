"""Row sharding of global batches, and the outputs put together again."""

import keras
import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.collectives.replica_consistency import arrays_of, checksums
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.tensor_specs import number_of_rows


def shards_rows(data: object, shard: bool | None) -> bool:
    """Return whether data are the same on every rank, of which each data shard takes its rows.

    Args:
        data: as `fit` takes them.
        shard: as of `fit`.
    """
    if job.data_shard()[1] == 1:
        return False
    if shard is not None:
        return shard
    return not hasattr(data, "as_dataset") or getattr(data, "num_shards", None) == 1


def own_rows(batch: object) -> object:
    """Return this data shard's rows of nested tensors [b, ...], where None stays None.

    The rows of the first shard come first. Where the shards do not divide b, some have one
    row more than others.
    """
    index, count = job.data_shard()

    def take(x):
        rows = number_of_rows(x)
        return x[rows * index // count : rows * (index + 1) // count]

    return keras.tree.map_structure(lambda x: None if x is None else take(x), batch)


def all_rows(outputs: object) -> object:
    """Return nested outputs [b, ...] of all rows, from those [b', ...] of each data shard's."""
    group = job.data_parallel_group()
    flat = [
        transport.concatenate(tf.convert_to_tensor(x), group, f"all_rows_{number}")
        for number, x in enumerate(keras.tree.flatten(outputs))
    ]
    return keras.tree.pack_sequence_as(outputs, flat)


def check_rows_of_ranks(first: object, shards: bool) -> None:
    """Compare the first rows of the ranks' data: shards of one batch, or shares of their own.

    Args:
        first: their first batch, or some rows of it; None where it cannot be seen.
        shards: whether each rank was to be given the same.

    Raises:
        ValueError: they are to be the same, and differ; or they are to be shares, and are the
            same, so that every row would be trained with several times.
    """
    num_shards = job.data_shard()[1]
    if num_shards == 1:
        return
    own = None if first is None else checksums(arrays_of(first))
    found = all_gather_json([own, job.data_shard()[0]], "first_rows")
    sums = [own for own, _ in found]
    if None in sums:
        return
    if shards and any(own != sums[0] for own in sums):
        rank = next(rank for rank, own in enumerate(sums) if own != sums[0])
        raise ValueError(
            f"the data of rank 0 and rank {rank} begin with different rows: give every rank the "
            "same data, of which fit takes the rank's rows (a dataset that shuffles needs a seed), "
            "or shard=False where they are this rank's share already"
        )
    one_each = {shard: own for own, shard in found}
    if not shards and len({tuple(own) for own in one_each.values()}) < num_shards:
        raise ValueError(
            "the data are taken for each rank's own share (shard=False, or as_dataset() without "
            "num_shards=1), and two data shards have the same rows, which would be trained with "
            "twice: give shard=True, or each rank the rows of dtransformer.data_shard()"
        )
