"""Saving: all ranks write their shards at the same time, while training goes on."""

import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence

import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.inputs.manifest import DATA
from dtransformer.parallel.collectives.objects import all_gather_json, from_chief, on_all, together
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.shard_bounds import Bounds, CheckpointShard, slice_spec
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.manifest import describe_file, describe_run
from dtransformer.trainers.checkpoint.saved_checkpoint import LATEST, PREFIX, REPLICAS
from dtransformer.trainers.checkpoint.training_state import TrainingState

# Save plan: which rank writes which shards of a checkpoint, pure data.


ShardKey = tuple[str, Bounds]  # a tensor's name, and the shard's bounds in it


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file of a checkpoint, which one rank writes.

    Args:
        writer: the rank.
        shards: which shards are in it, by tensor name and bounds.
        replica_of: index in the plan of the file that it repeats; None where it is no replica.
    """

    writer: int
    shards: tuple[ShardKey, ...]
    replica_of: int | None = None


def plan_files(
    rank_shards: Sequence[Mapping[ShardKey, int]], with_replicas: bool = False
) -> list[DataFile]:
    """Return the files of a checkpoint, replicas last.

    Args:
        rank_shards: for each rank the shards that it holds, and their bytes.
        with_replicas: whether shards that several ranks hold are written twice, by different
            ranks. All shards of a file then belong to the same ranks.

    Example:

    >>> left, right, gamma = ("w", ((0, 4),)), ("w", ((4, 8),)), ("gamma", ((0, 2),))
    >>> for file in plan_files([{left: 16, gamma: 8}, {right: 16, gamma: 8}]):
    ...     print(file.writer, [name for name, _ in file.shards])
    0 ['gamma', 'w']
    1 ['w']
    """
    holders = {}
    for rank, shards in enumerate(rank_shards):
        for key in shards:
            holders.setdefault(key, []).append(rank)
    chosen, load = [[] for _ in rank_shards], [0] * len(rank_shards)
    # First the shards that a single rank holds, then the largest.
    order = sorted(
        holders, key=lambda key: (len(holders[key]) > 1, -rank_shards[holders[key][0]][key], key)
    )
    for key in order:
        writer = min(holders[key], key=lambda rank: (load[rank], rank))
        load[writer] += rank_shards[writer][key]
        chosen[writer].append(key)
    files = []
    for rank, keys in enumerate(chosen):
        groups = {}
        for key in keys:
            groups.setdefault(tuple(holders[key]) if with_replicas else None, []).append(key)
        files += [DataFile(rank, tuple(sorted(groups[ranks]))) for ranks in sorted(groups)]
    if not with_replicas:
        return files
    return files + [
        DataFile(rank, file.shards, index)
        for index, file in enumerate(files)
        for rank in _other_holders(file, rank_shards)[:1]
    ]


def _other_holders(file, rank_shards):
    """Return the other ranks that hold all shards of a file, the next ones first."""
    ranks = [(file.writer + step) % len(rank_shards) for step in range(1, len(rank_shards))]
    return [rank for rank in ranks if all(key in rank_shards[rank] for key in file.shards)]


@dataclasses.dataclass
class Save:
    """One save, as this rank sees it.

    Args:
        path: the checkpoint's folder.
        files: the plan of the files that all ranks write.
        values: for each shard that this rank writes the tensor, its local value, and the shard.
        assets: see `CheckpointWriter.start`.
        manifest: what the manifest holds but for `files` and `tensors`.
    """

    path: pathlib.Path
    files: Sequence[DataFile]
    values: dict[ShardKey, tuple[ShardedTensor, tf.Tensor, CheckpointShard]]
    assets: Mapping
    manifest: Mapping

    @property
    def folder(self) -> pathlib.Path:
        """The folder that is written until the checkpoint is complete."""
        return folders.unfinished(self.path)

    def prefix(self, index: int) -> str:
        """Return the prefix of a file of the plan before the files are merged."""
        return str(self.folder / f"shards-{index:05d}")

    def data_path(self, index: int) -> str:
        """Return the path of the data of a file of the plan before the files are merged."""
        return f"{self.prefix(index)}.data-00000-of-00001"

    def index_path(self, index: int) -> str:
        """Return the path of the index of a file of the plan before the files are merged."""
        return f"{self.prefix(index)}.index"


def write_shards(save: Save) -> dict[int, dict]:
    """Write this rank's files.

    Returns:
        For each of them, by its index in the plan, what the manifest says about it, and its `tensors`
        with their shapes and data types.
    """
    described = {}
    for index, file in enumerate(save.files):
        if file.writer != job.rank():
            continue
        values = [save.values[key] for key in file.shards]
        tf.raw_ops.SaveV2(
            prefix=save.prefix(index),
            tensor_names=[tensor.name for tensor, _, _ in values],
            shape_and_slices=[
                slice_spec(tensor.shape, shard.bounds) for tensor, _, shard in values
            ],
            tensors=[tensor.extract(local, shard) for tensor, local, shard in values],
        )
        data = describe_file(pathlib.Path(save.data_path(index)))
        tensors = {tensor.name: [list(tensor.shape), tensor.dtype] for tensor, _, _ in values}
        described[index] = {**data, "rank": job.rank(), "tensors": tensors}
    return described


def merge_shards(save: Save, written: Mapping[str, dict]) -> None:
    """Make one checkpoint of all ranks' files, and rename it to its path.

    Args:
        save: the save.
        written: what `write_shards` returned on all ranks; JSON has made texts of the indices.

    Raises:
        FileNotFoundError: another rank's file is not in the folder.
    """
    _check_all_there(save)
    merged = [index for index, file in enumerate(save.files) if file.replica_of is None]
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[save.prefix(index) for index in merged],
        destination_prefix=str(save.folder / PREFIX),
        delete_old_dirs=False,
    )
    tensors, described = {}, {}
    for about in written.values():
        tensors.update(about.pop("tensors"))
    for number, index in enumerate(merged):
        described[DATA.format(number, len(merged))] = written[str(index)]
    for index, file in enumerate(save.files):
        if file.replica_of is not None:
            name = DATA.format(merged.index(file.replica_of), len(merged))
            described[f"{REPLICAS}/{name}"] = written[str(index)]
            (save.folder / REPLICAS).mkdir(exist_ok=True)
            os.rename(save.data_path(index), save.folder / REPLICAS / name)
            os.remove(save.index_path(index))
    (save.folder / LATEST).write_text(f'model_checkpoint_path: "{PREFIX}"\n')
    for path in (save.folder / f"{PREFIX}.index", save.folder / LATEST, *_write_assets(save)):
        described[str(path.relative_to(save.folder))] = {**describe_file(path), "rank": 0}
    folders.commit(save.path, {**save.manifest, "files": described, "tensors": tensors})


def _check_all_there(save):
    missing = [
        index
        for index in range(len(save.files))
        if not pathlib.Path(save.index_path(index)).exists()
    ]
    if missing:
        ranks = sorted({save.files[index].writer for index in missing})
        raise FileNotFoundError(
            f"the files that ranks {', '.join(map(str, ranks))} have written are not here: the folder "
            "has to be on a file system that all hosts share"
        )


def _write_assets(save):
    """Return the paths of the files that the user adds, written."""
    paths = []
    for name, asset in save.assets.items():
        asset.save(save.folder / name)
        found = [save.folder / name, *(save.folder / name).rglob("*")]
        paths += [path for path in found if path.is_file()]
    return paths


class CheckpointWriter:
    """Writes checkpoints, one at a time.

    A save keeps the values that variables have: TensorFlow gives a variable new memory when it
    changes while its old value is in use. Those of a GPU are copied to the host first.
    """

    _running = None  # the save that is under way in this process, whichever trainer's

    def __init__(self):
        self._digest = self._files = self._num_bytes = None
        job.before_leaving(CheckpointWriter.finish)

    def start(
        self,
        path: str | os.PathLike,
        state: TrainingState,
        info: Mapping,
        *,
        overwrite: bool = True,
        replicas: bool = False,
        assets: Mapping | None = None,
    ) -> None:
        """Begin to save; all ranks have to call. A save that is under way is waited for.

        Args:
            path: the checkpoint's folder.
            state: what is saved.
            info: what else the manifest holds.
            overwrite: whether it may replace a checkpoint; else it is saved beside one.
            replicas: whether shards that several ranks hold are written twice.
            assets: names of files or folders to add, and objects whose `save(path)` writes them.

        Raises:
            InputError: it cannot be written there; on every rank.
        """
        self.finish()
        path = pathlib.Path(path).absolute()
        tensors, manifest = together(
            lambda: (state.tensors(), describe_run(state)), "checkpoint/state"
        )
        tensors = [tensor for tensor in tensors if tensor.is_saved]
        self._plan(tensors, replicas)
        begin = lambda: str(folders.begin(path, self._num_bytes, overwrite))
        path = pathlib.Path(from_chief(begin, "checkpoint/begin"))
        values = _values_to_write(tensors, self._files)
        save = Save(path, self._files, values, assets or {}, {**manifest, **info})
        CheckpointWriter._running = _THREAD.submit(_run, save)

    @classmethod
    def finish(cls) -> None:
        """Wait until the save that is under way is complete.

        Raises:
            InputError: it could not be written; the same on every rank.
        """
        if cls._running is not None:
            running, CheckpointWriter._running = cls._running, None
            running.result()

    def _plan(self, tensors: Sequence[ShardedTensor], replicas: bool):
        """Plan the files that all ranks write; the last plan holds where no rank's shards changed."""
        own = [
            [tensor.name, shard.bounds, tensor.num_bytes(shard), tensor.shape, tensor.dtype]
            for tensor in tensors
            for shard in tensor.saved_shards
        ]
        digest = hashlib.sha256(repr((own, replicas)).encode()).hexdigest()
        if all(all_gather_json(digest == self._digest, "checkpoint/same_plan")):
            return
        rank_shards = [
            {(name, tuple(map(tuple, bounds))): size for name, bounds, size, _, _ in theirs}
            for theirs in all_gather_json(own, "checkpoint/shards")
        ]
        self._digest, self._files = digest, plan_files(rank_shards, replicas)
        self._num_bytes = sum(
            rank_shards[file.writer][key] for file in self._files for key in file.shards
        )


def _values_to_write(tensors: Sequence[ShardedTensor], files: Sequence[DataFile]):
    """Return {(name, bounds): (tensor, its local value, shard)} of what this rank writes."""
    own = {key for file in files if file.writer == job.rank() for key in file.shards}
    values = {}
    for tensor in tensors:
        shards = [shard for shard in tensor.saved_shards if (tensor.name, shard.bounds) in own]
        local = tensor.read() if shards else None
        values.update({(tensor.name, shard.bounds): (tensor, local, shard) for shard in shards})
    return values


# A process that ends waits for it.
_THREAD = concurrent.futures.ThreadPoolExecutor(1)


def _run(save: Save):
    """Write this rank's shards, and on rank 0 make one checkpoint of all ranks' files.

    Raises:
        InputError: it could not be written; the same on every rank.
    """
    try:
        with tf.device("CPU:0"):
            everyone = on_all(lambda: write_shards(save), "checkpoint/written")
            written = {name: about for files in everyone for name, about in files.items()}
            merge = lambda: job.is_chief() and merge_shards(save, written)
            together(merge, "checkpoint/committed")
    except (ValueError, RuntimeError) as error:  # some rank's
        if job.is_chief():
            shutil.rmtree(save.folder, ignore_errors=True)
        raise InputError(f"{save.path}: the checkpoint could not be written: {error}") from None
    finally:
        save.values.clear()
