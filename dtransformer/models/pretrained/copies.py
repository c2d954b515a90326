"""Stored tensors that are no weights: tied heads, and tables that follow from a formula."""

import warnings
from collections.abc import Mapping

import numpy as np

from dtransformer.errors import InputError
from dtransformer.models.pretrained.families import Family
from dtransformer.models.pretrained.folder import PretrainedFolder

_ROWS = 4096  # rows of a table that are compared in one call


def has_tied_head(content: PretrainedFolder, family: Family, arguments: Mapping) -> bool:
    """Return the argument `tied_head` of the network that computes with a folder's values.

    If the config ties the head and the file has another kernel for it, the head is untied, with a
    warning. `transformers` decides the same way.

    Args:
        content: The folder.
        family: Its family.
        arguments: Arguments of the network, from the folder's config.

    Raises:
        InputError: If the encoder's or decoder's table of embeddings differs from the shared one,
            or a stored table of positions from its formula.
    """
    names, table = family.stored_names(content.shapes), next(iter(family.tables))
    tensor = lambda name: np.atleast_1d(content[names[name]][...])
    for name in names.keys() & {*family.position_tables}:
        if not _is_sinusoidal(tensor(name)):
            raise InputError(
                f"{content.path}: {names[name]} differs from the sinusoidal positions that "
                f"{family.architecture} computes. Other values are not built."
            )
    is_tied = arguments["tied_head"]
    for copy in family.copies if table in names else ():
        if copy not in names or _is_equal(tensor(copy), tensor(table)):
            continue
        if copy.removesuffix(".weight") not in family.top:
            raise InputError(
                f"{content.path}: {names[copy]} differs from {names[table]}, expected one table of "
                "embeddings for encoder and decoder. Two tables are not built."
            )
        if is_tied is True:
            is_tied = False
            warnings.warn(
                f"{content.path}: {names[copy]} differs from {names[table]}, to which config.json "
                "ties it. The head keeps its own values. Set tie_word_embeddings to false in "
                "config.json to silence this warning.",
                stacklevel=2,
            )
    return is_tied


def sinusoids(length: int, size: int) -> np.ndarray:
    """Return sinusoidal positions [length, size] as Pegasus' files have them: sines, then cosines."""
    angles = np.arange(length)[:, None] / 10000 ** (2 * (np.arange(size) // 2) / size)
    halves = [np.sin(angles[:, ::2]), np.cos(angles[:, 1::2])]
    return np.concatenate(halves, axis=1).astype("float32")


def _is_equal(first, second):
    starts = range(0, max(len(first), len(second)), _ROWS)
    parts = [slice(start, start + _ROWS) for start in starts]
    return all(np.array_equal(first[part], second[part]) for part in parts)


def _is_sinusoidal(table):
    """Return whether a table has the formula's values, within rounding to its type."""
    tolerance = 1e-3 if table.itemsize > 2 else 1e-2
    return table.ndim == 2 and np.allclose(table, sinusoids(*table.shape), rtol=0, atol=tolerance)
