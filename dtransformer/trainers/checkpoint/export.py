"""Weights for one process: from a checkpoint to Keras' files and to safetensors, and back."""

import functools
import pathlib

import keras
import numpy as np
import safetensors
import safetensors.numpy

from dtransformer.errors import InputError
from dtransformer.parallel.object_collectives import together
from dtransformer.trainers.checkpoint import files
from dtransformer.trainers.checkpoint.differences import differences
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
        held = held_of_network(network)
        _check_fits(checkpoint.path, held, checkpoint.shapes_of(NETWORK))
        for one in held:
            one.assign(files.read_part(checkpoint, one))
        _written(filepath, lambda: network.save_weights(filepath))
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
    _written(filepath, lambda: safetensors.numpy.save_file(tensors, filepath, metadata=about))
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
    held = together(lambda: held_of_network(network), "safetensors/network")

    def opened():
        if not pathlib.Path(filepath).exists():
            raise InputError(f"{filepath}: there is no such file")
        try:
            file = safetensors.safe_open(filepath, "numpy")
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(f"{filepath}: is no safetensors file, or damaged ({error})") from None
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        return file, {f"{NETWORK}{n}": s for n, s in shapes.items() if not n.startswith(OPTIMIZER)}

    file, there = together(opened, "safetensors/opened")
    _check_fits(filepath, held, there)
    for one in held:
        whole = file.get_slice(one.name.removeprefix(NETWORK))
        one.assign(one.put_together(functools.partial(_box_of, whole)))


def _written(filepath, write):
    """Call a function that writes a file; an InputError tells why it cannot."""
    try:
        write()
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{filepath}: cannot be written ({error})") from None


def _box_of(whole, box):
    return whole[tuple(slice(*ends) for ends in box)] if box else whole[...]


def _check_fits(path, held, there):
    """Raise an InputError, on every rank, where shapes by name are not those of all ranks."""
    missing, unexpected, other_shapes = differences(held, there)
    told = [f"it lacks {name}" for name in missing]
    told += [f"it also has {name}" for name in unexpected]
    told += [f"{name} is {its}, not {ours}" for name, (ours, its) in sorted(other_shapes.items())]
    if told:
        told = [text.replace(NETWORK, "") for text in told]
        more = f" and {len(told) - 5} more" if len(told) > 5 else ""
        raise InputError(f"{path} does not fit the network: {'; '.join(told[:5])}{more}")


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
