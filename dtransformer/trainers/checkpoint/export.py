"""Weights for one process: from a checkpoint to Keras' files and to safetensors, and back."""

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
from dtransformer.files import replacing
from dtransformer.inputs.conversion import convert
from dtransformer.inputs.files import opened
from dtransformer.inputs.safetensors_file import SafetensorsFile
from dtransformer.parallel.collectives.objects import together
from dtransformer.trainers.checkpoint.folders import checkpoints_of
from dtransformer.trainers.checkpoint.saved_checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.training_state import (
    NETWORK,
    differences,
    misfit,
    network_tensors,
)

# The seal of a file of weights: its last line, with its checksum and the run that it belongs to.


RUN = "run.json"  # in a run folder, and in its checkpoints
NO_RUN = "0" * 64
_LINE = re.compile(rb"\ndtransformer ([0-9a-f]{64}) ([0-9a-f]{64})\n")
_LINE_BYTES = len(b"\ndtransformer  \n") + 2 * 64
_CHUNK_BYTES = 2**22


def seal(path: str | os.PathLike, run: str = NO_RUN) -> None:
    """Add the seal to a file of weights that was written to the end.

    Args:
        path: the file.
        run: the SHA-256 of the `run.json` of its run.

    Raises:
        OSError: the disk is full.
    """
    digest = sha256_of(path, run)
    with open(path, "ab") as file:
        file.write(f"\ndtransformer {digest} {run}\n".encode())


def check_seal(path: str | os.PathLike, run: str) -> None:
    """Refuse a file of weights that is damaged, or of another run; it is not parsed.

    Args:
        path: the file.
        run: the SHA-256 of the `run.json` that it has to belong to.

    Raises:
        InputError: says what is wrong with it.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size - _LINE_BYTES
        file.seek(max(size, 0))
        line = _LINE.fullmatch(file.read(_LINE_BYTES))
    if line is None:
        raise InputError(
            f"{path}: these weights are damaged, or were not written by this dtransformer: they do "
            "not end with their checksum"
        )
    digest, owner = (value.decode() for value in line.groups())
    if sha256_of(path, owner, size) != digest:
        raise InputError(
            f"{path}: these weights are damaged: their content does not match its checksum"
        )
    if owner != run:
        raise InputError(
            f"{path}: these weights are of another run than the {RUN} beside them: put the run's own "
            "there, or export one of its checkpoints"
        )


def sha256_of(path: str | os.PathLike, ending: str = "", size: float = math.inf) -> str:
    """Return the SHA-256 of a file's first `size` bytes and of an ending, 64 hexadecimal digits.

    Raises:
        InputError: it cannot be read.
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
_HEAD_BYTES = 2**16  # what a file has besides its tensors, and
_TENSOR_BYTES = 2**12  # for each of them, at most


def export(
    path: str | os.PathLike,
    filepath: str | os.PathLike,
    network: keras.Model | None = None,
    overwrite: bool = False,
) -> int:
    """Write the weights of a checkpoint to one file, which is complete or not there.

    Args:
        path: a checkpoint's folder; or a folder of checkpoints, of which the newest is taken.
        filepath: the file to write, `.weights.h5` or `.safetensors`.
        network: a model like the one that was saved, for `.weights.h5`; by default it is made from
            the config in the checkpoint.
        overwrite: whether a file that is there may be replaced.

    Returns:
        The number of tensors.

    Raises:
        InputError: the checkpoint is damaged, a weight is not finite, the file is there, cannot be
            written or has another ending, or the network cannot be made from its config.
    """
    if os.path.lexists(filepath) and not overwrite:
        raise InputError(
            f"{filepath}: is there already: give another path, or overwrite (--overwrite)"
        )
    checkpoint = Checkpoint(checkpoints_of(path)[0])
    problems = checkpoint.problems()
    if problems:
        raise InputError("; ".join(problems.values()))
    if str(filepath).endswith(_KERAS):
        return _export_keras(checkpoint, filepath, network)
    if not is_safetensors(filepath):
        raise InputError(f"{filepath}: give a file that ends with {_KERAS} or {_SAFETENSORS}")
    tensors = {
        name.removeprefix(NETWORK): np.ascontiguousarray(checkpoint.read(name).numpy())
        for name in checkpoint.shapes_of(NETWORK)
    }
    check_finite(checkpoint.path, tensors)
    about = {"format": "dtransformer", "step": str(checkpoint.step)}
    with replacing(filepath, _file_bytes(tensors.values())) as fresh:
        try:
            safetensors.numpy.save_file(tensors, fresh, metadata=about)
        except safetensors.SafetensorError as error:
            raise InputError(f"{filepath}: cannot be written ({error})") from None
    return len(tensors)


def _export_keras(checkpoint, filepath, network):
    network = _network_of(checkpoint) if network is None else network
    if not network.built:
        network.build()
    tensors = network_tensors(network)
    _check_fits(checkpoint.path, tensors, checkpoint.shapes_of(NETWORK))
    for tensor in tensors:
        tensor.assign(checkpoint.read_local(tensor))
    check_finite(checkpoint.path, network_values(network))
    has_run = RUN in checkpoint.manifest["files"]
    run = sha256_of(checkpoint.path / RUN) if has_run else NO_RUN

    def save(fresh):
        network.save_weights(fresh)
        seal(fresh, run)

    write_keras(network, filepath, save)
    return len(network.variables)


def write_keras(network: keras.Model, filepath: str | os.PathLike, save: Callable) -> None:
    """Write a file of a network; a full disk, or a kill, leaves it as it was.

    Args:
        network: the network.
        filepath: the file, replaced where it is there.
        save: a function of the path that it writes to, which becomes the file.

    Raises:
        InputError: it cannot be written.
    """
    with replacing(filepath, _file_bytes(network.variables)) as fresh:
        save(fresh)


def network_values(network: keras.Model) -> dict[str, tf.Tensor]:
    """Return what this rank holds of the weights of a built network, by their names."""
    return {tensor.name.removeprefix(NETWORK): tensor.read() for tensor in network_tensors(network)}


def check_finite(path: str | os.PathLike, values: Mapping[str, tf.Tensor | np.ndarray]) -> None:
    """Refuse weights that are not numbers.

    Args:
        path: where they come from, for the error.
        values: the names of tensors and their values.

    Raises:
        InputError: names the first that has a NaN or an infinity.
    """
    for name, value in values.items():
        value = np.asarray(value)
        if value.dtype.kind not in "biu" and not np.isfinite(value).all():
            raise InputError(
                f"{path}: {name} has values that are not finite (NaN or infinity), as its training "
                "went astray: take earlier weights, or train again with a lower learning rate"
            )


def _file_bytes(variables):
    """Return at least the bytes that a file of variables takes."""
    sizes = [math.prod(one.shape) * tf.as_dtype(one.dtype).size for one in variables]
    return _HEAD_BYTES + sum(size + _TENSOR_BYTES for size in sizes)


def is_safetensors(filepath: str | os.PathLike) -> bool:
    """Return whether a path has the ending of a safetensors file."""
    return str(filepath).endswith(_SAFETENSORS)


def load_safetensors(network: keras.Model, filepath: str | os.PathLike) -> None:
    """Set the weights of a built network; each rank reads only the shards that it holds.

    Args:
        network: the network.
        filepath: a `.safetensors` file that `export` wrote.

    Raises:
        InputError: there is no such file, it is damaged, its weights are not the network's, or have
            values that are not finite; nothing is changed then.
    """
    tensors = together(lambda: network_tensors(network), "safetensors/network")

    def opened():
        file = SafetensorsFile(filepath)
        return file, {f"{NETWORK}{name}": shape for name, shape in file.shapes.items()}

    def value(tensor):
        name = tensor.name.removeprefix(NETWORK)
        kind = tf.as_dtype(tensor.dtype).as_numpy_dtype
        return tensor.assemble(
            lambda bounds: convert(_read(file[name], bounds), kind, f"{filepath}: {name}")
        )

    def check():
        for tensor in tensors:
            value(tensor)

    file, in_file = together(opened, "safetensors/opened")
    _check_fits(filepath, tensors, in_file)
    together(check, "safetensors/values")
    for tensor in tensors:
        tensor.assign(value(tensor))


def _read(stored, bounds):
    return stored[tuple(slice(*ends) for ends in bounds)] if bounds else stored[...]


def _check_fits(path, tensors, in_file):
    """Raise an InputError, on every rank, where the tensors of all ranks are not a file's."""
    if what := misfit(*differences(tensors, in_file)):
        raise InputError(f"{path} does not fit the network: {what.replace(NETWORK, '')}")


def _network_of(checkpoint):
    config = checkpoint.manifest["network"]
    if config is None:
        raise InputError(
            f"{checkpoint.path}: the network was saved without a Keras config: call "
            "dtransformer.trainers.checkpoint.export with the network itself"
        )
    _check_depth(checkpoint, config)
    try:
        network = keras.saving.deserialize_keras_object(config)
        network.build()
    except Exception as error:  # whatever Keras raises for a config
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{checkpoint.path}: the network cannot be made from its config ({reason}): call "
            "dtransformer.trainers.checkpoint.export with the network itself"
        ) from None
    return network


_DEPTHS = "num_layers", "encoder_layers", "decoder_layers"


def _check_depth(checkpoint, config):
    """Refuse a config with more layers than the checkpoint has tensors, before they are made."""
    num_tensors = len(checkpoint.shapes_of(NETWORK))
    arguments = config.get("config")
    is_ours = str(config.get("registered_name")).startswith("dtransformer>")
    for name in _DEPTHS if is_ours and isinstance(arguments, dict) else ():
        depth = arguments.get(name)
        if isinstance(depth, int) and depth > num_tensors:
            raise InputError(
                f"{checkpoint.path}: the network's config has {name}={depth}, and the checkpoint "
                f"{num_tensors} tensors: give the network's own checkpoint"
            )
