"""A complete checkpoint: its manifest, its tensors, and whether its files are intact."""

import os
import pathlib
import shutil
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError, one_line
from dtransformer.files import replacing
from dtransformer.inputs.files import inside
from dtransformer.inputs.manifest import INDEX
from dtransformer.parallel.weights.shard_bounds import Bounds, slice_spec
from dtransformer.parallel.weights.sharded_tensor import ShardedTensor
from dtransformer.trainers.checkpoint.folders import find_checkpoint
from dtransformer.trainers.checkpoint.manifest import MANIFEST, checksum, read_manifest

PREFIX, REPLICAS = "state", "replicas"
LATEST = "checkpoint"  # the file in which TensorFlow keeps the prefix


class Checkpoint:
    """A checkpoint that was written to the end.

    `tf.train.load_checkpoint(path).get_tensor(name)` reads any of its tensors, too.

    Args:
        path: its folder.

    Attributes:
        path: the folder, a `pathlib.Path`.
        manifest: dict with the content of checkpoint.json: `step`, `position` in the data,
            `seed`, `metrics`, `network` and `optimizer` (their Keras configs), `parallel` (the
            job's config), `tensors` (for each name its shape and data type), `files` (for each
            name its size, its CRC-32 and the rank that wrote it).

    Raises:
        InputError: there is no checkpoint, or its checkpoint.json is damaged.
    """

    def __init__(self, path: str | os.PathLike):
        found = find_checkpoint(path)
        if found is None:
            raise InputError(f"{path}: there is no checkpoint here ({MANIFEST} is missing)")
        self.path: pathlib.Path = found
        self.manifest: dict = read_manifest(found)

    @property
    def step(self) -> int:
        """The number of steps that the optimizer had done when it was saved."""
        return self.manifest["step"]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names of all tensors, and their shapes."""
        return {name: tuple(shape) for name, (shape, _) in self.manifest["tensors"].items()}

    def shapes_of(self, *prefixes: str) -> dict[str, tuple[int, ...]]:
        """Return those of `shapes` whose names begin with one of the prefixes."""
        return {name: shape for name, shape in self.shapes.items() if name.startswith(prefixes)}

    def read(self, name: str, bounds: Bounds | None = None) -> tf.Tensor:
        """Return a tensor, or a rectangle of it; TensorFlow checks its own checksum.

        Args:
            name: the tensor's name.
            bounds: (start, stop) in each dimension; None for the full tensor.
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
        """Return what this rank holds of a tensor of the same name and shape."""
        return tensor.assemble(lambda bounds: self.read(tensor.name, bounds))

    def file_names(self) -> list[str]:
        """Return the names of all files, sorted."""
        return sorted(self.manifest["files"])

    def problem_with(self, name: str) -> str:
        """Read a file; return what is wrong with it, "" where nothing is."""
        expected = self.manifest["files"][name]
        try:
            path = inside(self.path, name)
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{path} has {size:,} bytes, {expected['bytes']:,} were written"
            found = checksum(path)
        except FileNotFoundError:
            return f"{path} is missing"
        except InputError as error:
            return str(error)
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if found != expected["crc32"]:
            return f"{path} is damaged: its checksum is {found}, {expected['crc32']} was written"
        return self._problem_with_index() if name == INDEX else ""

    def _problem_with_index(self):
        """Compare TensorFlow's list of the tensors with the manifest's."""
        path = self.path / INDEX
        try:
            reader = tf.train.load_checkpoint(str(self.path / PREFIX))
            types = reader.get_variable_to_dtype_map()
            found = {
                name: [list(shape), types[name].name]
                for name, shape in reader.get_variable_to_shape_map().items()
            }
        except Exception as error:  # TensorFlow makes several of Python's
            return f"{path} is damaged: {one_line(error, 100)}"
        if found != self.manifest["tensors"]:
            return f"{path} is damaged: its tensors are not those of {MANIFEST}"
        return ""

    def problems(self, names: Sequence[str] | None = None) -> dict[str, str]:
        """Return the damaged ones of some files, by default of all, and what is wrong with each."""
        names = self.file_names() if names is None else names
        found = {name: self.problem_with(name) for name in names}
        return {name: problem for name, problem in found.items() if problem}

    def repair(self, name: str) -> bool:
        """Replace a damaged file by its replica; return whether there is an intact one."""
        replica = f"{REPLICAS}/{name}"
        if replica not in self.manifest["files"] or self.problem_with(replica):
            return False
        try:
            with replacing(inside(self.path, name)) as fresh:
                shutil.copyfile(self.path / replica, fresh, follow_symlinks=False)
        except InputError:  # the disk is full or read-only, or the file is a link
            return False
        return True
