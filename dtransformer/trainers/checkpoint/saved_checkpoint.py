"""A complete checkpoint: its manifest, its tensors, and checks and repair of its files."""

import os
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError, to_one_line
from dtransformer.files import atomic_write
from dtransformer.inputs.files import inside
from dtransformer.inputs.manifest import INDEX
from dtransformer.parallel.weights.shard_bounds import Bounds, slice_spec
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor
from dtransformer.trainers.checkpoint.folders import find_checkpoint
from dtransformer.trainers.checkpoint.manifest import MANIFEST, checksum, read_manifest

PREFIX = "state"
REPLICAS = "replicas"
LATEST = "checkpoint"  # TensorFlow's file with the prefix of the latest checkpoint.


class Checkpoint:
    """A complete checkpoint on disk.

    `tf.train.load_checkpoint(path).get_tensor(name)` also reads its tensors.

    Args:
        path: Folder of the checkpoint.

    Attributes:
        path: The folder, a `pathlib.Path`.
        manifest: Dict with the content of checkpoint.json: `step`, `position` in the data, `seed`,
            `metrics`, `network` and `optimizer` (their Keras configs), `parallel` (the parallel
            config), `tensors` (name -> shape and dtype) and `files` (name -> size, CRC-32 and the
            rank that wrote it).

    Raises:
        InputError: If there is no complete checkpoint, or if its manifest is damaged.
    """

    def __init__(self, path: str | os.PathLike):
        folder = find_checkpoint(path)
        if folder is None:
            raise InputError(f"{path} is not a checkpoint: {MANIFEST} is missing.")
        self.path: pathlib.Path = folder
        self.manifest: dict = read_manifest(folder)

    @property
    def step(self) -> int:
        """Number of optimizer steps before it was saved."""
        return self.manifest["step"]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Dict that maps the names of all tensors to their shapes."""
        return {name: tuple(shape) for name, (shape, _) in self.manifest["tensors"].items()}

    def get_shapes(self, *prefixes: str) -> dict[str, tuple[int, ...]]:
        """Return the items of `shapes` whose names start with one of the prefixes."""
        return {name: shape for name, shape in self.shapes.items() if name.startswith(prefixes)}

    def read(self, name: str, bounds: Bounds | None = None) -> tf.Tensor:
        """Return a tensor, or a rectangle of it. TensorFlow verifies its checksum.

        Args:
            name: Name of the tensor.
            bounds: `(start, stop)` for each dimension, or `None` for the full tensor.
        """
        shape, dtype = self.manifest["tensors"][name]
        with tf.device("CPU:0"):
            (value,) = tf.raw_ops.RestoreV2(
                prefix=str(self.path / PREFIX),
                tensor_names=[name],
                shape_and_slices=["" if bounds is None else slice_spec(shape, bounds)],
                dtypes=[tf.as_dtype(dtype)],
            )
        return value

    def read_local(self, tensor: ShardedTensor) -> tf.Tensor | np.ndarray:
        """Return this rank's part of a tensor with the same name and shape."""
        return tensor.assemble(lambda bounds: self.read(tensor.name, bounds))

    def file_names(self) -> list[str]:
        """Return the sorted names of all files."""
        return sorted(self.manifest["files"])

    def problem_with(self, name: str) -> str:
        """Read a file and return a description of its damage, or `""` if it is intact."""
        expected = self.manifest["files"][name]
        try:
            path = inside(self.path, name)
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path} has {size:,} bytes instead of {expected['bytes']:,}"
            crc32 = checksum(path)
        except FileNotFoundError:
            return f"{path} is missing"
        except InputError as error:
            return str(error)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if crc32 != expected["crc32"]:
            return f"{path} is damaged: its checksum is {crc32} instead of {expected['crc32']}"
        return self._problem_with_index() if name == INDEX else ""

    def _problem_with_index(self):
        """Compare the tensors in TensorFlow's index with the manifest."""
        path = self.path / INDEX
        try:
            reader = tf.train.load_checkpoint(str(self.path / PREFIX))
            types = reader.get_variable_to_dtype_map()
            tensors = {
                name: [list(shape), types[name].name]
                for name, shape in reader.get_variable_to_shape_map().items()
            }
        except Exception as error:  # TensorFlow raises several built-in types.
            return f"{path} is damaged: {to_one_line(error, 100)}"
        if tensors != self.manifest["tensors"]:
            return f"{path} is damaged: its tensors do not match {MANIFEST}"
        return ""

    def problems(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """Return a dict that maps each damaged file to a description.

        Args:
            names: Names of the files to check. Defaults to all files.
        """
        names = self.file_names() if names is None else names
        problems = {name: self.problem_with(name) for name in names}
        return {name: problem for name, problem in problems.items() if problem}

    def repair(self, name: str) -> bool:
        """Replace a damaged file by its replica; return whether that was possible."""
        replica = f"{REPLICAS}/{name}"
        if replica not in self.manifest["files"] or self.problem_with(replica):
            return False
        try:
            with atomic_write(inside(self.path, name)) as target:
                shutil.copyfile(self.path / replica, target, follow_symlinks=False)
        except InputError:  # The disk is full or read-only, or the file is a link.
            return False
        return True
