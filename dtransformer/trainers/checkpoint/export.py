"""Weights in single files: export of checkpoints to Keras and safetensors files, and loading."""

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping

import keras
import numpy as np
import safetensors
import safetensors.numpy
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.files import atomic_write
from dtransformer.inputs.conversion import convert
from dtransformer.inputs.files import opened
from dtransformer.inputs.safetensors_file import SafetensorsFile
from dtransformer.parallel.collectives.objects import call_on_all
from dtransformer.trainers.checkpoint.folders import list_checkpoints
from dtransformer.trainers.checkpoint.saved_checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.training_state import (
    NETWORK,
    describe_differences,
    find_differences,
    network_tensors,
)

# Seal of a weights file: a last line with its checksum and the run that it belongs to.


RUN = "run.json"  # Name of the file in a run folder and in its checkpoints.
NO_RUN = "0" * 64
_LINE = re.compile(rb"\ndtransformer ([0-9a-f]{64}) ([0-9a-f]{64})\n")
_LINE_BYTES = len(b"\ndtransformer  \n") + 2 * 64
_CHUNK_BYTES = 2**22


def seal(path: str | os.PathLike, run: str = NO_RUN) -> None:
    """Append the seal to a complete weights file.

    Args:
        path: Path of the file.
        run: SHA-256 of the run's `run.json`.

    Raises:
        OSError: If the disk is full.
    """
    digest = hash_file(path, run)
    with open(path, "ab") as file:
        file.write(f"\ndtransformer {digest} {run}\n".encode())


def check_seal(path: str | os.PathLike, run: str) -> None:
    """Check, without parsing it, that a weights file is intact and belongs to a run.

    Args:
        path: Path of the file.
        run: Expected SHA-256 of the run's `run.json`.

    Raises:
        InputError: If the file is damaged, has no seal, or belongs to another run.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size - _LINE_BYTES
        file.seek(max(size, 0))
        line = _LINE.fullmatch(file.read(_LINE_BYTES))
    if line is None:
        raise InputError(
            f"{path}: the weights are damaged, or were not written by this version of "
            "dtransformer: they do not end with their checksum."
        )
    digest, owner = (value.decode() for value in line.groups())
    if hash_file(path, owner, size) != digest:
        raise InputError(
            f"{path}: the weights are damaged: their content does not match their checksum."
        )
    if owner != run:
        raise InputError(
            f"{path}: the weights belong to another run than the {RUN} beside them. Copy the "
            "weights of this run, or export one of its checkpoints."
        )


def hash_file(path: str | os.PathLike, ending: str = "", size: float = math.inf) -> str:
    """Return the SHA-256 of the first `size` bytes of a file, followed by `ending`.

    Args:
        path: Path of the file.
        ending: String that is hashed after the file.
        size: Number of bytes. Defaults to all.

    Returns:
        A string of 64 hexadecimal digits.

    Raises:
        InputError: If the file cannot be read.
    """
    digest = hashlib.sha256()
    with opened(path) as file:
        while chunk := file.read(min(_CHUNK_BYTES, size)):
            digest.update(chunk)
            size -= len(chunk)
    digest.update(ending.encode())
    return digest.hexdigest()


_KERAS = ".weights.h5"
_SAFETENSORS = ".safetensors"
_HEAD_BYTES = 2**16  # Upper bound on a file's header.
_TENSOR_BYTES = 2**12  # Upper bound on the additional bytes per tensor.


def export(
    path: str | os.PathLike,
    filepath: str | os.PathLike,
    network: keras.Model | None = None,
    overwrite: bool = False,
) -> int:
    """Write the weights of a checkpoint to one file, atomically.

    Args:
        path: Folder of a checkpoint. Or a folder of checkpoints, whose newest one is exported.
        filepath: Path of the new file, ending with `.weights.h5` or `.safetensors`.
        network: Model with the saved architecture, only used for `.weights.h5`. By default it is
            created from the config in the checkpoint.
        overwrite: Whether an existing file may be replaced. Defaults to `False`.

    Returns:
        The number of tensors.

    Raises:
        InputError: If the checkpoint is damaged, a weight is not finite, the file exists, cannot be
            written or has another ending, or if the network cannot be created from its config.
    """
    if os.path.lexists(filepath) and not overwrite:
        raise InputError(f"{filepath} exists. Pass another path, or overwrite it (--overwrite).")
    checkpoint = Checkpoint(list_checkpoints(path)[0])
    problems = checkpoint.problems()
    if problems:
        raise InputError("; ".join(problems.values()))
    if str(filepath).endswith(_KERAS):
        return _export_keras(checkpoint, filepath, network)
    if not is_safetensors(filepath):
        raise InputError(f"{filepath} must end with {_KERAS} or {_SAFETENSORS}.")
    tensors = {
        name.removeprefix(NETWORK): np.ascontiguousarray(checkpoint.read(name).numpy())
        for name in checkpoint.get_shapes(NETWORK)
    }
    check_finite(checkpoint.path, tensors)
    metadata = {"format": "dtransformer", "step": str(checkpoint.step)}
    with atomic_write(filepath, _file_bytes(tensors.values())) as target:
        try:
            safetensors.numpy.save_file(tensors, target, metadata=metadata)
        except safetensors.SafetensorError as error:
            raise InputError(f"{filepath}: cannot be written ({error})") from None
    return len(tensors)


def _export_keras(checkpoint, filepath, network):
    network = _network_from_config(checkpoint) if network is None else network
    if not network.built:
        network.build()
    tensors = network_tensors(network)
    _check_fits(checkpoint.path, tensors, checkpoint.get_shapes(NETWORK))
    for tensor in tensors:
        tensor.assign(checkpoint.read_local(tensor))
    check_finite(checkpoint.path, network_values(network))
    has_run = RUN in checkpoint.manifest["files"]
    run = hash_file(checkpoint.path / RUN) if has_run else NO_RUN

    def save(target):
        network.save_weights(target)
        seal(target, run)

    write_keras(network, filepath, save)
    return len(network.variables)


def write_keras(network: keras.Model, filepath: str | os.PathLike, save: Callable) -> None:
    """Write a network's file atomically: after a failure the old file is unchanged.

    Args:
        network: The `keras.Model`. Its variables determine the required disk space.
        filepath: Path of the file. An existing file is replaced.
        save: Function that writes the file to the temporary path that it receives.

    Raises:
        InputError: If the file cannot be written.
    """
    with atomic_write(filepath, _file_bytes(network.variables)) as target:
        save(target)


def network_values(network: keras.Model) -> dict[str, tf.Tensor]:
    """Return this rank's parts of the weights of a built network by name."""
    return {tensor.name.removeprefix(NETWORK): tensor.read() for tensor in network_tensors(network)}


def check_finite(path: str | os.PathLike, values: Mapping[str, tf.Tensor | np.ndarray]) -> None:
    """Check that weights contain no NaN and no infinity.

    Args:
        path: Source of the weights, for the error.
        values: Dict that maps tensor names to values.

    Raises:
        InputError: If a value is not finite. The error contains the name of the first such tensor.
    """
    for name, value in values.items():
        value = np.asarray(value)
        if value.dtype.kind not in "biu" and not np.isfinite(value).all():
            raise InputError(
                f"{path}: {name} has values that are not finite (NaN or infinity), because the "
                "training diverged. Use earlier weights, or train again with a lower learning rate."
            )


def _file_bytes(variables):
    """Return an upper bound on the size in bytes of a file with these variables."""
    sizes = [math.prod(x.shape) * tf.as_dtype(x.dtype).size for x in variables]
    return _HEAD_BYTES + sum(size + _TENSOR_BYTES for size in sizes)


def is_safetensors(filepath: str | os.PathLike) -> bool:
    """Return whether a path ends with `.safetensors`."""
    return str(filepath).endswith(_SAFETENSORS)


def load_safetensors(network: keras.Model, filepath: str | os.PathLike) -> None:
    """Set the weights of a built network. Each rank reads only its shards.

    Args:
        network: The `keras.Model`.
        filepath: Path of a `.safetensors` file that `export` wrote.

    Raises:
        InputError: If the file does not exist, is damaged, does not fit the network, or has values
            that are not finite. The network is unchanged then.
    """
    tensors = call_on_all(lambda: network_tensors(network), "safetensors/network")

    def open_file():
        file = SafetensorsFile(filepath)
        return file, {f"{NETWORK}{name}": shape for name, shape in file.shapes.items()}

    def read_tensor(tensor):
        name = tensor.name.removeprefix(NETWORK)
        dtype = tf.as_dtype(tensor.dtype).as_numpy_dtype
        return tensor.assemble(
            lambda bounds: convert(_read(file[name], bounds), dtype, f"{filepath}: {name}")
        )

    def check():
        for tensor in tensors:
            read_tensor(tensor)

    file, in_file = call_on_all(open_file, "safetensors/opened")
    _check_fits(filepath, tensors, in_file)
    call_on_all(check, "safetensors/values")
    for tensor in tensors:
        tensor.assign(read_tensor(tensor))


def _read(stored, bounds):
    return stored[tuple(slice(*ends) for ends in bounds)] if bounds else stored[...]


def _check_fits(path, tensors, in_file):
    """Raise `InputError` on all ranks if their tensors do not match a file's."""
    if text := describe_differences(*find_differences(tensors, in_file)):
        raise InputError(f"{path} does not fit the network: {text.replace(NETWORK, '')}.")


def _network_from_config(checkpoint):
    config = checkpoint.manifest["network"]
    if config is None:
        raise InputError(
            f"{checkpoint.path} contains no Keras config of the network. Pass the network to "
            "dtransformer.trainers.checkpoint.export."
        )
    _check_depth(checkpoint, config)
    try:
        network = keras.saving.deserialize_keras_object(config)
        network.build()
    except Exception as error:  # An invalid config may raise any exception.
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{checkpoint.path}: the network cannot be created from its config ({reason}). Pass "
            "the network to dtransformer.trainers.checkpoint.export."
        ) from None
    return network


_DEPTHS = "num_layers", "encoder_layers", "decoder_layers"


def _check_depth(checkpoint, config):
    """Check, before building, that a config has no more layers than the checkpoint has tensors."""
    num_tensors = len(checkpoint.get_shapes(NETWORK))
    arguments = config.get("config")
    is_ours = str(config.get("registered_name")).startswith("dtransformer>")
    for name in _DEPTHS if is_ours and isinstance(arguments, dict) else ():
        depth = arguments.get(name)
        if isinstance(depth, int) and depth > num_tensors:
            raise InputError(
                f"{checkpoint.path}: the network's config has `{name}={depth}`, but the checkpoint "
                f"has only {num_tensors} tensors. Use a checkpoint of this network."
            )
