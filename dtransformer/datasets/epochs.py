"""State of an iteration over epochs of batches, from which it goes on."""

from collections.abc import Mapping

from dtransformer.errors import InputError


class Epochs:
    """Epochs of so many batches each, of which one is chosen with `set_epoch`.

    `Trainer.fit` calls `set_epoch` before each epoch, and keeps `position` in checkpoints.

    Args:
        num_batches: number of batches of an epoch.
        seed: what the shuffling depends on, besides the epoch.
        **same: what else has to be the same when a run goes on, as JSON has it.
    """

    def __init__(self, num_batches: int, seed: int, **same: object):
        self._num_batches, self._seed = num_batches, seed
        self._epoch, self._first_batch = 0, 0
        self._same = {"num_batches": num_batches, "seed": seed, **same}

    def __len__(self) -> int:
        """The number of batches of a full epoch, the same on every rank."""
        return self._num_batches

    def set_epoch(self, epoch: int, start: int | None = None) -> None:
        """Choose the epoch that the next iteration goes through, and its first batch.

        Args:
            epoch: number of the epoch, from 0.
            start: the batch to begin with. By default 0; or, where this epoch is already
                chosen, what was chosen with it, so that `Trainer.fit` keeps the position
                that `restore` has set.

        Raises:
            InputError: there is no such batch.
        """
        if start is None:
            start = self._first_batch if epoch == self._epoch else 0
        if epoch < 0 or not 0 <= start <= len(self):
            raise InputError(
                f"epoch {epoch}, batch {start} is no position in epochs of {len(self)} batches: "
                "restore with the data and options that the run began with"
            )
        self._epoch, self._first_batch = int(epoch), int(start)

    def position(self, batches_done: int = 0) -> dict[str, int | str]:
        """Return where training stands, to go on from there with `restore`.

        Args:
            batches_done: number of batches that were trained on since the iteration began. (The
                pipeline itself cannot tell: it is always some batches ahead.)

        Returns:
            The `epoch` and `batch` that come next, `num_batches` and `seed`; and what else tells
            these data from others.
        """
        epoch, batch = self._epoch, self._first_batch + int(batches_done)
        if batch >= len(self):
            epoch, batch = epoch + batch // len(self), batch % len(self)
        return {"epoch": epoch, "batch": batch, **self._same}

    def restore(self, position: Mapping[str, int | str]) -> None:
        """Go to a position: the next iteration begins with its batch.

        Args:
            position: what `position` returned.

        Raises:
            InputError: the position is of other data or options, so that the batches that
                remain would be others.
        """
        for name, own in self._same.items():
            if position.get(name, own) != own:
                raise InputError(
                    f"the saved position has {name}={position[name]}, this data has {own}: "
                    "resume with the data, seed and batch size that the run began with"
                )
        self.set_epoch(position["epoch"], position["batch"])


def check_shard(shard_index: int, num_shards: int) -> None:
    """Check that a data rank is one of those that share a batch.

    Raises:
        InputError: it is not.
    """
    if not 0 <= shard_index < num_shards:
        raise InputError(
            f"shard_index={shard_index} is not one of {num_shards} shards: give 0 to "
            f"{num_shards - 1}"
        )
