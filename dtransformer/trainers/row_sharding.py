"""Sharding of a batch's rows over the data shards of the job."""

import dataclasses

import keras
import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.tensor_specs import count_rows


@dataclasses.dataclass(frozen=True)
class RowSharding:
    """Distribution of a batch's rows over data shards.

    Args:
        is_global: True if every rank has the same batch, so that each data shard computes its
            slice of the rows. False if a rank's batch contains only its local rows.
    """

    is_global: bool = False

    @classmethod
    def from_data(cls, data: object, shard: bool | None = None) -> "RowSharding":
        """Return the sharding of data that are passed to `fit`.

        Args:
            data: Data as `Trainer.fit` takes them.
            shard: As in `Trainer.fit`. `None` means True, except for objects with `as_dataset()`
                whose `num_shards` is not 1.
        """
        if job.data_shard()[1] == 1:
            return cls(is_global=False)
        if shard is not None:
            return cls(is_global=shard)
        makes_shares = hasattr(data, "as_dataset") and getattr(data, "num_shards", None) != 1
        return cls(is_global=not makes_shares)

    @property
    def num_shards(self) -> int:
        """Number of data shards that share a batch of this rank."""
        return job.data_shard()[1] if self.is_global else 1

    @property
    def num_batches_per_step(self) -> int:
        """Number of different batches that the job computes in a step."""
        return 1 if self.is_global else job.data_shard()[1]

    def local_rows(self, batch: object, num_parts: int = 1) -> object:
        """Return this data shard's rows of a global batch.

        Args:
            batch: Nested tensors [b, ...].
            num_parts: Integer. Number of contiguous parts of the batch. The result has the local
                rows of each part, so that all data shards together compute one part after the
                other. Defaults to `1`.
        """
        if num_parts == 1:
            return take_shard(batch, *job.data_shard())
        parts = (take_shard(batch, i, num_parts) for i in range(num_parts))
        local_parts = [take_shard(part, *job.data_shard()) for part in parts]
        with tf.device("CPU:0"):
            return keras.tree.map_structure(concat_rows, *local_parts)

    def first_rows(self, batch: object, num_parts: int) -> tf.Tensor:
        """Return the index of this data shard's first row in each part of the global batch.

        Ranks with separate batches of equal size count as one batch, in the order of the ranks.

        Args:
            batch: Nested tensors [b, ...], before `local_rows`.
            num_parts: Integer. Number of micro-batches.

        Returns:
            An int64 tensor `[num_parts]`.
        """
        shard, num_shards = job.data_shard()
        rows = tf.cast(count_rows(keras.tree.flatten(batch)[0]), INDEX_TYPE)
        bounds = rows * tf.range(num_parts + 1, dtype=INDEX_TYPE) // num_parts
        if not self.is_global:
            return shard * rows + bounds[:-1]
        sizes = bounds[1:] - bounds[:-1]
        return bounds[:-1] + sizes * shard // num_shards

    def gather_rows(self, outputs: object) -> object:
        """Return the outputs of all rows, from nested outputs [local b, ...] of each data shard."""
        if not self.is_global:
            return outputs
        group = job.data_parallel_group()
        flat = [
            transport.concatenate(tf.convert_to_tensor(x), group, f"all_rows_{i}")
            for i, x in enumerate(keras.tree.flatten(outputs))
        ]
        return keras.tree.pack_sequence_as(outputs, flat)


def take_shard(batch: object, i: int | tf.Tensor, num_shards: int, on_host: bool = True) -> object:
    """Return a contiguous shard of nested tensors [b, ...].

    Shards differ by at most one row. `None` stays `None`.

    Args:
        batch: Nested tensors [b, ...].
        i: Integer or scalar tensor. Index of the shard.
        num_shards: Integer. Number of shards.
        on_host: Boolean. Whether the tensors are in host memory, as batches are, so that a GPU
            receives only its rows. Defaults to `True`.
    """

    def take(x):
        if x is None:
            return None
        rows = count_rows(x)
        with tf.device("CPU:0" if on_host else None):
            return x[rows * i // num_shards : rows * (i + 1) // num_shards]

    return keras.tree.map_structure(take, batch)


def concat_rows(*tensors: tf.Tensor | None) -> tf.Tensor | None:
    """Return tensors [bᵢ, ...], concatenated to [Σ bᵢ, ...], or `None` if they are `None`."""
    return None if tensors[0] is None else tf.concat(tensors, 0)
