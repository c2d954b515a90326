"""Base class for batches whose rows are created on access, each from its index."""

import abc

import numpy as np
import tensorflow as tf

from dtransformer.datasets.batch_plan import check_rows
from dtransformer.datasets.epochs import Epochs, check_shard
from dtransformer.datasets.mixture import permuted
from dtransformer.datasets.skipped_records import warn_skipped
from dtransformer.datasets.token_shards import TokenShards
from dtransformer.errors import InputError, check_int

Example = tuple[dict[str, np.ndarray], np.ndarray | dict[str, np.ndarray]]
IGNORED = -100  # Label of tokens that losses ignore.


class IndexedBatches(Epochs):
    """Base class for batches of one shape whose rows a subclass creates from their index.

    The order of an epoch is a permutation that is computed without being stored. A batch depends
    only on its index, the seed and the epoch. So every rank can create its rows of each global
    batch, and an epoch can start at any batch.

    Args:
        shards: `TokenShards` or `EncodedRecords`: an object with `special_ids` and `fingerprint`.
        num_rows: Integer. Number of rows of an epoch.
        what: Description of the data, such as "12 documents", for error messages.
        length: Integer. Number of tokens of a row.
        batch_size: Integer. Number of rows of a global batch.
        shuffle: Boolean. Whether to shuffle each epoch. Defaults to the value of `training`.
        seed: Integer. All random numbers depend on the seed and the epoch. Defaults to 0.
        shard_index, num_shards: Index of this data rank and number of data ranks. This rank gets
            the rows shard_index, shard_index + num_shards, … of each global batch.
        pad_rows_to_multiple_of: Integer. Empty rows are added to this rank's rows of a batch until
            their number is a multiple of it, as the micro-batches of a pipeline require. Defaults
            to 1.
        training: Boolean. Whether to leave out rows that do not fill a batch. Otherwise empty rows
            fill it. Defaults to `True`.

    Raises:
        InputError: If the batch size is less than the number of ranks, an integer is less than 1,
            or the rows fill no batch.
    """

    ignore_id = IGNORED

    def __init__(
        self,
        shards: TokenShards,
        num_rows: int,
        what: str,
        *,
        length: int,
        batch_size: int,
        shuffle: bool | None = None,
        seed: int = 0,
        shard_index: int = 0,
        num_shards: int = 1,
        pad_rows_to_multiple_of: int = 1,
        training: bool = True,
    ):
        check_shard(shard_index, num_shards)
        check_rows(batch_size, num_shards, f"`{batch_size=}`")
        check_int("pad_rows_to_multiple_of", pad_rows_to_multiple_of)
        num_batches = num_rows // batch_size if training else -(-num_rows // batch_size)
        if not num_batches:
            raise InputError(
                f"{what} make {num_rows} rows, which do not fill a batch of {batch_size}. Use more "
                "text, shorter rows or smaller batches."
            )
        same = {"length": length, "batch_size": batch_size, "data": shards.fingerprint}
        super().__init__(num_batches, seed, **same)
        num_skipped = num_rows % batch_size if training else 0
        warn_skipped(
            self,
            num_skipped,
            num_rows,
            f"rows do not fill a batch of {batch_size} and are left out",
        )
        self.num_rows = num_rows
        self.length = length
        self.batch_size = batch_size
        self.pad_id = shards.special_ids.get("pad", 0)
        self._shuffle = training if shuffle is None else shuffle
        self._training = training
        self._shard_index = shard_index
        self.num_shards = num_shards
        local_rows = -(-batch_size // num_shards)
        self._local_rows = local_rows + -local_rows % pad_rows_to_multiple_of

    @abc.abstractmethod
    def row(self, epoch: int, index: int) -> Example:
        """Return the inputs and labels of a row, arrays without the batch dimension.

        Args:
            epoch: Integer. Index of the epoch, from 0.
            index: Integer. Index of the row, from 0.
        """

    @abc.abstractmethod
    def empty_row(self) -> Example:
        """Return a row of padding, whose labels are ignored."""

    def rows(self, epoch: int, batch: int) -> np.ndarray:
        """Return the indices of this rank's rows of a batch, int64 [n]."""
        index = self._shard_index
        count = self.num_shards
        places = np.arange(
            batch * self.batch_size, min((batch + 1) * self.batch_size, self.num_rows)
        )
        places = places[index::count]
        return permuted(places, self.num_rows, [self._seed, epoch]) if self._shuffle else places

    def batch(self, epoch: int, batch: int) -> Example:
        rows = [self.row(epoch, int(index)) for index in self.rows(epoch, batch)]
        rows += [self.empty_row()] * (self._local_rows - len(rows))
        return tf.nest.map_structure(lambda *arrays: np.stack(arrays), *rows)

    def spec(self) -> Example:
        def row_spec(array):
            return tf.TensorSpec((self._local_rows, *np.shape(array)), array.dtype)

        return tf.nest.map_structure(row_spec, self.empty_row())
