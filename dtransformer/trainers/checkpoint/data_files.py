"""The files of a checkpoint: each rank writes its own, rank 0 merges them into one checkpoint."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import tensorflow as tf

from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.shard_bounds import CheckpointShard, slice_spec
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor
from dtransformer.trainers.checkpoint import folders
from dtransformer.trainers.checkpoint.manifest import describe_file
from dtransformer.trainers.checkpoint.save_plan import DataFile, ShardKey
from dtransformer.trainers.checkpoint.saved_checkpoint import LATEST, PREFIX, REPLICAS, data_file


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
        described[data_file(number, len(merged))] = written[str(index)]
    for index, file in enumerate(save.files):
        if file.replica_of is not None:
            name = data_file(merged.index(file.replica_of), len(merged))
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
