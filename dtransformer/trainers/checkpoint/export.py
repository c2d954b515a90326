"""Weights for one process: from a checkpoint to Keras' files and to safetensors, and back."""

import pathlib

import keras
import numpy as np
import safetensors
import safetensors.numpy

from dtransformer.errors import InputError
from dtransformer.trainers.checkpoint import files
from dtransformer.trainers.checkpoint.state import NETWORK, OPTIMIZER, held_of_network

_KERAS = ".weights.h5"
_SAFETENSORS = ".safetensors"


def export(path, filepath, network=None, with_optimizer=False):
    """Write the weights of a checkpoint to one file.

    Args:
        path: a checkpoint's folder; or a folder of them, of which the newest is taken.
        filepath: of the file, `.weights.h5` or `.safetensors`.
        network: a `keras.Model` like the one that was saved, for `.weights.h5`; by default
            it is made from the config in the checkpoint.
        with_optimizer: whether a `.safetensors` file has the optimizer's states too.

    Returns:
        The number of tensors.

    Raises:
        InputError: the checkpoint is damaged, the file has another ending, or the network
            cannot be made from its config.
    """
    checkpoint = files.Checkpoint(files.open_or_latest(path)[0])
    problems = checkpoint.problems()
    if problems:
        raise InputError("; ".join(problems.values()))
    if str(filepath).endswith(_KERAS):
        if with_optimizer:
            raise InputError(f"{filepath}: only .safetensors files take the optimizer's states")
        network = _network_of(checkpoint) if network is None else network
        if not network.built:
            network.build()
        for one in held_of_network(network):
            if checkpoint.shapes.get(one.name) != one.shape:
                raise InputError(
                    f"{checkpoint.path} does not fit the network: {one.name} is not in it"
                )
            one.assign(files.read_part(checkpoint, one))
        network.save_weights(filepath)
        return len(network.variables)
    if not is_safetensors(filepath):
        raise InputError(f"{filepath}: give a file that ends with {_KERAS} or {_SAFETENSORS}")
    kinds = (NETWORK, OPTIMIZER) if with_optimizer else (NETWORK,)
    tensors = {
        name.removeprefix(NETWORK): np.ascontiguousarray(files.read_box(checkpoint, name).numpy())
        for name in checkpoint.shapes
        if name.startswith(kinds)
    }
    about = {"format": "dtransformer", "step": str(checkpoint.step)}
    safetensors.numpy.save_file(tensors, filepath, metadata=about)
    return len(tensors)


def is_safetensors(filepath):
    """Return whether a path is that of a safetensors file."""
    return str(filepath).endswith(_SAFETENSORS)


def load_safetensors(network, filepath):
    """Set the weights of a built network; each rank reads the slices that it has.

    Args:
        network: a `keras.Model`.
        filepath: of a `.safetensors` file that `export` wrote.

    Raises:
        InputError: there is no such file, or it lacks a weight, has others, or has one of
            another shape.
    """
    held = held_of_network(network)
    if not pathlib.Path(filepath).exists():
        raise InputError(f"{filepath}: there is no such file")
    try:
        with safetensors.safe_open(filepath, "numpy") as file:
            _check_names(filepath, file, held)
            for one in held:
                whole = file.get_slice(one.name.removeprefix(NETWORK))
                one.assign(one.put_together(lambda box: _box_of(whole, box)))
    except safetensors.SafetensorError as error:
        raise InputError(f"{filepath}: is no safetensors file, or damaged ({error})") from None


def _box_of(whole, box):
    return whole[tuple(slice(*ends) for ends in box)] if box else whole[...]


def _check_names(filepath, file, held):
    there = {name for name in file.keys() if not name.startswith(OPTIMIZER)}
    told = []
    for one in held:
        name = one.name.removeprefix(NETWORK)
        if name not in there:
            told.append(f"it lacks {name}")
        elif tuple(file.get_slice(name).get_shape()) != one.shape:
            told.append(f"{name} is {tuple(file.get_slice(name).get_shape())}, not {one.shape}")
    if told:
        raise InputError(f"{filepath} does not fit the network: {'; '.join(told[:5])}")


def _network_of(checkpoint):
    config = checkpoint.manifest["network"]
    if config is None:
        raise InputError(
            f"{checkpoint.path}: the network has no Keras config: call "
            "dtransformer.trainers.checkpoint.export with the network itself"
        )
    try:
        network = keras.saving.deserialize_keras_object(config)
        network.build()
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{checkpoint.path}: the network cannot be made from its config ({error}): call "
            "dtransformer.trainers.checkpoint.export with the network itself"
        ) from None
    return network
