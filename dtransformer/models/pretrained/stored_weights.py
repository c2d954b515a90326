"""Read the network's weights from the tensors of a published model."""

import warnings
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from dtransformer.errors import InputError
from dtransformer.inputs.conversion import convert
from dtransformer.models.base import TokenModel
from dtransformer.models.pretrained.families import Family
from dtransformer.models.pretrained.families.task_heads import network_tensors
from dtransformer.models.pretrained.folder import PretrainedFolder
from dtransformer.parallel.weights.sharded_variable import Bounds

_MAX_LISTED = 5


def has_tied_head(content: PretrainedFolder, family: Family, arguments: Mapping) -> bool:
    """Return the network argument `tied_head` that matches a folder's values.

    If the config ties the head but the file has a different kernel for it, the head is not
    tied, and a warning is issued. `transformers` decides the same way.

    Args:
        content: `PretrainedFolder` of the model.
        family: `Family` of the model.
        arguments: Arguments of the network, from the folder's config.

    Returns:
        A boolean.

    Raises:
        InputError: If the encoder's or decoder's embedding table differs from the shared
            one, or a stored table of positions differs from the sinusoidal formula.
    """
    names = family.stored_names(content.shapes)
    table = family.embedding_table
    is_tied = arguments["tied_head"]

    def tensor(name):
        return content[names[name]][...]

    heads = {family.head_name}
    copies = family.copies if is_tied is True else family.copies - heads
    differing = {x for x in names if x.endswith(family.files.position_tables)}
    differing = {x for x in differing if not _is_sinusoidal(tensor(x))}
    for copy in names.keys() & copies if table in names else ():
        if not np.array_equal(tensor(copy), tensor(table)):
            differing.add(copy)
    for name in differing - heads:
        raise InputError(
            f"{content.path}: {names[name]} differs from the embedding table that "
            f"{family.architecture} shares, or from its sinusoidal positions. Other values are not "
            "supported."
        )
    for head in differing:
        warnings.warn(
            f"{content.path}: {names[head]} differs from {names[table]}, but config.json ties "
            "them. The head keeps its values. Set `tie_word_embeddings` to false in config.json to "
            "silence this warning.",
            stacklevel=2,
        )
    return False if differing else is_tied


def sinusoids(length: int, size: int) -> np.ndarray:
    """Return sinusoidal positions [length, size] in Pegasus' order: all sines, then all cosines."""
    angles = np.arange(length)[:, None] / 10000 ** (2 * (np.arange(size) // 2) / size)
    halves = [np.sin(angles[:, ::2]), np.cos(angles[:, 1::2])]
    return np.concatenate(halves, axis=1).astype("float32")


def _is_sinusoidal(table):
    """Return whether a table equals the sinusoidal formula up to the precision of its type."""
    tolerance = 1e-3 if table.itemsize > 2 else 1e-2
    return table.ndim == 2 and np.allclose(table, sinusoids(*table.shape), rtol=0, atol=tolerance)


def _check_constants(content, constants):
    """Raise an error if a scalar in a file differs from its supported value.

    Args:
        content: `PretrainedFolder` of the model.
        constants: Dict from names in the file to values.
    """
    for name, expected in constants.items():
        value = np.asarray(content[name][...], "float32")
        if not np.allclose(value, expected, rtol=1e-2, atol=0):
            raise InputError(
                f"{content.path}: {name} is {value}, but only {expected} is supported. Use a model "
                "with this value."
            )


class StoredWeights:
    """Reader of a network's weights from a published model's folder.

    Args:
        content: `PretrainedFolder` of the model.
        family: `Family` of the model.
        network: Network of this family, built or not.

    Raises:
        InputError: If tensors are missing, unexpected or have other shapes. The message
            lists them.
    """

    def __init__(self, content: PretrainedFolder, family: Family, network: TokenModel):
        self._content = content
        names = family.stored_names(content.shapes)
        tensors = network_tensors(content.config["model_type"], network)
        unused = names.keys() - {tensor.name for tensor in tensors}
        unused -= set(filter(family.is_optional, unused))
        constants = {x: y for x, y in family.constants(network.arguments).items() if x in names}
        _check_constants(content, {names[name]: value for name, value in constants.items()})
        unused -= constants.keys()
        prefixes = tuple(x.format(**network.arguments) for x in family.files.skipped)
        if skipped := {name for name in unused if name.startswith(prefixes)}:
            problems = f"Skipped {len(skipped)} unused tensors of {', '.join(sorted(prefixes))}"
            warnings.warn(f"{content.path}: {problems}.", stacklevel=3)
        unused -= skipped
        message = [f"missing {x.name}" for x in tensors if x.name not in names]
        message += [f"unexpected {name}" for name in sorted(unused)]
        covered = {weight for tensor in tensors for weight in tensor.weights}
        self._shapes = network.weight_shapes()
        uncovered = self._shapes.keys() - covered
        message += [f"no tensor for {weight}" for weight in sorted(uncovered)]
        for tensor in tensors:
            expected = tensor.shape([self._shapes[weight] for weight in tensor.weights])
            shape = content.shapes.get(names.get(tensor.name))
            if shape not in (None, expected):
                message.append(f"{tensor.name} has shape {list(shape)}, not {list(expected)}")
        if message:
            more = len(message) - _MAX_LISTED
            problems = "; ".join(message[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
            raise InputError(f"{content.path} does not match its config: {problems}.")
        # Keys are the weight's path and the expert's index, or `None` without experts.
        self._sources = {
            (weight, tensor.expert): (tensor, index, names[tensor.name])
            for tensor in tensors
            for index, weight in enumerate(tensor.weights)
        }

    def read(self, path: str, bounds: Bounds, dtype: str) -> np.ndarray:
        """Read a rectangle of a weight.

        Args:
            path: Path of the weight, with the network's name.
            bounds: A (start, stop) tuple for each dimension. Elements beyond the stored tensor
                are 0.
            dtype: Name of the result's data type.

        Returns:
            An array with the shape of `bounds`.

        Raises:
            InputError: If a value is not finite.
        """
        path = path.partition("/")[2]
        if (path, None) in self._sources:
            return self._rectangle(path, None, bounds, dtype)
        experts = range(*bounds[0])
        inner_bounds = bounds[1:]
        return np.stack([self._rectangle(path, expert, inner_bounds, dtype) for expert in experts])

    def dtypes(self) -> dict[str, str]:
        """Return a dict from weight paths to the types of their tensors, except quantized ones."""
        stored = {path: self._content[name] for (path, _), (*_, name) in self._sources.items()}
        return {path: str(x.dtype) for path, x in stored.items() if isinstance(x, np.ndarray)}

    def _rectangle(self, path, expert, bounds, dtype):
        """Read a rectangle of a weight, or of a single expert's part of it."""
        stored, index, name = self._sources[path, expert]
        shapes = [self._shapes[weight] for weight in stored.weights]
        part = slice(None)
        if stored.is_stacked:  # read the needed experts only
            part = slice(*bounds[0])
            bounds = [(0, bounds[0][1] - bounds[0][0]), *bounds[1:]]
            shapes = [(bounds[0][1], *shape[1:]) for shape in shapes]
        weight = stored.extract(self._content[name][part], index, shapes)
        kind = tf.as_dtype(dtype).as_numpy_dtype
        value = convert(
            weight[tuple(slice(*ends) for ends in bounds)], kind, f"{self._content.path}: {name}"
        )
        padding = [(0, stop - start - n) for (start, stop), n in zip(bounds, value.shape)]
        return np.pad(value, padding) if np.any(padding) else value
