"""Saving of checkpoints: all ranks write their shards in parallel while training continues."""

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
from dtransformer.parallel.collectives.objects import (
    all_gather_json,
    call_on_all,
    from_chief,
    on_all,
)
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.shard_bounds import Bounds, CheckpointShard, slice_spec
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.manifest import describe_file, describe_run
from dtransformer.trainers.checkpoint.saved_checkpoint import LATEST, PREFIX, REPLICAS
from dtransformer.trainers.checkpoint.training_state import TrainingState

# Save plan, pure data: which rank writes which shards.


ShardKey = tuple[str, Bounds]  # Name of a tensor, and bounds of a shard in it.


@dataclasses.dataclass(frozen=True)
class DataFile:
    """File of a checkpoint, written by one rank.

    Args:
        writer: The rank.
        shards: Names and bounds of the shards in the file.
        replica_of: Index in the plan of the file that it duplicates, or `None`.
    """

    writer: int
    shards: tuple[ShardKey, ...]
    replica_of: int | None = None


def plan_files(
    rank_shards: Sequence[Mapping[ShardKey, int]], with_replicas: bool = False
) -> list[DataFile]:
    """Return the plan of a checkpoint's files, with replicas last.

    Args:
        rank_shards: For each rank a dict that maps its shards to their sizes in bytes.
        with_replicas: Whether shards of several ranks are written twice, by different ranks. All
            shards of a file then belong to the same ranks.

    Example:

    >>> left, right, gamma = ("w", ((0, 4),)), ("w", ((4, 8),)), ("gamma", ((0, 2),))
    >>> for file in plan_files([{left: 16, gamma: 8}, {right: 16, gamma: 8}]):
    ...     print(file.writer, [name for name, _ in file.shards])
    0 ['gamma', 'w']
    1 ['w']
    """
    ranks_with = {}
    for rank, shards in enumerate(rank_shards):
        for key in shards:
            ranks_with.setdefault(key, []).append(rank)
    rank_keys = [[] for _ in rank_shards]
    num_bytes = [0] * len(rank_shards)
    # Assign shards of a single rank first, then large shards.
    order = sorted(
        ranks_with,
        key=lambda key: (len(ranks_with[key]) > 1, -rank_shards[ranks_with[key][0]][key], key),
    )
    for key in order:
        writer = min(ranks_with[key], key=lambda rank: (num_bytes[rank], rank))
        num_bytes[writer] += rank_shards[writer][key]
        rank_keys[writer].append(key)
    files = []
    for rank, keys in enumerate(rank_keys):
        groups = {}
        for key in keys:
            groups.setdefault(tuple(ranks_with[key]) if with_replicas else None, []).append(key)
        files += [DataFile(rank, tuple(sorted(groups[ranks]))) for ranks in sorted(groups)]
    if not with_replicas:
        return files
    return files + [
        DataFile(rank, file.shards, index)
        for index, file in enumerate(files)
        for rank in _other_ranks(file, rank_shards)[:1]
    ]


def _other_ranks(file, rank_shards):
    """Return the other ranks that have all shards of a file, starting after the writer."""
    ranks = [(file.writer + step) % len(rank_shards) for step in range(1, len(rank_shards))]
    return [rank for rank in ranks if rank_shards[rank].keys() >= set(file.shards)]


@dataclasses.dataclass
class Save:
    """One save on this rank.

    Args:
        path: Folder of the checkpoint.
        files: Plan of the files of all ranks.
        values: Dict of the shards that this rank writes: key -> tensor, local value and shard.
        assets: See `CheckpointWriter.start`.
        manifest: Manifest without `files` and `tensors`.
    """

    path: pathlib.Path
    files: Sequence[DataFile]
    values: dict[ShardKey, tuple[ShardedTensor, tf.Tensor, CheckpointShard]]
    assets: Mapping
    manifest: Mapping

    @property
    def folder(self) -> pathlib.Path:
        """Folder that is written until the checkpoint is complete."""
        return folders.unfinished_path(self.path)

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
        A dict that maps the index of each file in the plan to its manifest entry, with `tensors`
        added: a dict of names, shapes and dtypes.
    """
    entries = {}
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
        entry = describe_file(pathlib.Path(save.data_path(index)))
        tensors = {tensor.name: [list(tensor.shape), tensor.dtype] for tensor, _, _ in values}
        entries[index] = {**entry, "rank": job.rank(), "tensors": tensors}
    return entries


def merge_shards(save: Save, written: Mapping[str, dict]) -> None:
    """Merge the files of all ranks into one checkpoint and rename it to its final path.

    Args:
        save: The `Save`.
        written: Merged results of `write_shards` on all ranks. JSON has converted the indices to
            strings.

    Raises:
        FileNotFoundError: If another rank's file is not in the folder.
    """
    _check_all_files(save)
    merged = [index for index, file in enumerate(save.files) if file.replica_of is None]
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[save.prefix(index) for index in merged],
        destination_prefix=str(save.folder / PREFIX),
        delete_old_dirs=False,
    )
    tensors = {}
    entries = {}
    for entry in written.values():
        tensors.update(entry.pop("tensors"))
    for i, index in enumerate(merged):
        entries[DATA.format(i, len(merged))] = written[str(index)]
    for index, file in enumerate(save.files):
        if file.replica_of is not None:
            name = DATA.format(merged.index(file.replica_of), len(merged))
            entries[f"{REPLICAS}/{name}"] = written[str(index)]
            (save.folder / REPLICAS).mkdir(exist_ok=True)
            os.rename(save.data_path(index), save.folder / REPLICAS / name)
            os.remove(save.index_path(index))
    (save.folder / LATEST).write_text(f'model_checkpoint_path: "{PREFIX}"\n')
    for path in (save.folder / f"{PREFIX}.index", save.folder / LATEST, *_write_assets(save)):
        entries[str(path.relative_to(save.folder))] = {**describe_file(path), "rank": 0}
    folders.commit(save.path, {**save.manifest, "files": entries, "tensors": tensors})


def _check_all_files(save):
    missing = [
        index
        for index in range(len(save.files))
        if not pathlib.Path(save.index_path(index)).exists()
    ]
    if missing:
        ranks = sorted({save.files[index].writer for index in missing})
        raise FileNotFoundError(
            f"The files of ranks {', '.join(map(str, ranks))} are missing. The folder must be on a "
            "file system that all hosts share."
        )


def _write_assets(save):
    """Write the user's assets and return the paths of their files."""
    paths = []
    for name, asset in save.assets.items():
        asset.save(save.folder / name)
        candidates = [save.folder / name, *(save.folder / name).rglob("*")]
        paths += [path for path in candidates if path.is_file()]
    return paths


class CheckpointWriter:
    """Writer of checkpoints, one at a time.

    A save refers to the current values of variables. TensorFlow allocates new memory for a variable
    that changes while its old value is in use. Values on a GPU are first copied to the host.
    """

    _running = None  # Running save of any trainer in this process.

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
        """Start a save, after waiting for a running one. All ranks must call it.

        Args:
            path: Folder of the checkpoint.
            state: The `TrainingState` to save.
            info: Additional items of the manifest.
            overwrite: Whether an existing checkpoint may be replaced. Otherwise another path is
                used.
            replicas: Whether shards of several ranks are written twice.
            assets: Dict that maps names of additional files or folders to objects with a method
                `save(path)`.

        Raises:
            InputError: If the folder cannot be written. All ranks raise the error.
        """
        self.finish()
        requested = pathlib.Path(path).absolute()
        tensors, manifest = call_on_all(
            lambda: (state.tensors(), describe_run(state)), "checkpoint/state"
        )
        tensors = [tensor for tensor in tensors if tensor.is_saved]
        self._plan(tensors, replicas)

        def create_folder():
            return str(folders.create_folder(requested, self._num_bytes, overwrite))

        path = pathlib.Path(from_chief(create_folder, "checkpoint/begin"))
        values = _values_to_write(tensors, self._files)
        save = Save(path, self._files, values, assets or {}, {**manifest, **info})
        CheckpointWriter._running = _THREAD.submit(_run, save)

    @classmethod
    def finish(cls) -> None:
        """Wait until the running save is complete.

        Raises:
            InputError: If the checkpoint could not be written. All ranks raise the same error.
        """
        if cls._running is not None:
            running = cls._running
            CheckpointWriter._running = None
            running.result()

    def _plan(self, tensors: Sequence[ShardedTensor], replicas: bool):
        """Plan the files of all ranks, unless no rank's shards have changed since the last plan."""
        local_shards = [
            [tensor.name, shard.bounds, tensor.num_bytes(shard), tensor.shape, tensor.dtype]
            for tensor in tensors
            for shard in tensor.saved_shards
        ]
        digest = hashlib.sha256(repr((local_shards, replicas)).encode()).hexdigest()
        if all(all_gather_json(digest == self._digest, "checkpoint/same_plan")):
            return
        rank_shards = []
        for shards in all_gather_json(local_shards, "checkpoint/shards"):
            rank_shards.append(
                {(name, tuple(map(tuple, bounds))): size for name, bounds, size, _, _ in shards}
            )
        self._digest = digest
        self._files = plan_files(rank_shards, replicas)
        self._num_bytes = sum(
            rank_shards[file.writer][key] for file in self._files for key in file.shards
        )


def _values_to_write(tensors: Sequence[ShardedTensor], files: Sequence[DataFile]):
    """Return a dict of the shards that this rank writes: key -> tensor, local value and shard."""
    keys = {key for file in files if file.writer == job.rank() for key in file.shards}
    values = {}
    for tensor in tensors:
        shards = [shard for shard in tensor.saved_shards if (tensor.name, shard.bounds) in keys]
        local = tensor.read() if shards else None
        values.update({(tensor.name, shard.bounds): (tensor, local, shard) for shard in shards})
    return values


# A process waits for this thread before it exits.
_THREAD = concurrent.futures.ThreadPoolExecutor(1)


def _run(save: Save):
    """Write this rank's shards, and on rank 0 merge the files of all ranks.

    Raises:
        InputError: If the checkpoint could not be written. All ranks raise the same error.
    """
    try:
        with tf.device("CPU:0"):
            written = {}
            for entries in on_all(lambda: write_shards(save), "checkpoint/written"):
                written.update(entries)

            def merge():
                if job.is_chief():
                    merge_shards(save, written)

            call_on_all(merge, "checkpoint/committed")
    except (ValueError, RuntimeError) as error:  # The error of any rank.
        if job.is_chief():
            shutil.rmtree(save.folder, ignore_errors=True)
        raise InputError(f"{save.path}: the checkpoint could not be written: {error}") from None
    finally:
        save.values.clear()
