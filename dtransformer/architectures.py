"""Sizes of published models: the class of the network and its arguments.

`architectures.yaml` contains the sizes from the papers. `dtransformer.models.from_preset` builds
networks of these sizes, and `dtransformer.planner` estimates their training cost.
"""

import dataclasses
import pathlib

from dtransformer.errors import InputError, short_repr, suggest
from dtransformer.tables import read_table


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Size of a published model.

    Args:
        network: Name of a network class in `dtransformer.models`.
        arguments: Dict of its constructor arguments.
        source: Publication of the sizes.
    """

    network: str
    arguments: dict
    source: str


def _read_architectures():
    tables = read_table(pathlib.Path(__file__).with_suffix(".yaml"))

    def complete(like=None, **fields):
        """Return the fields of the parent kind `like`, updated with the remaining arguments."""
        return {**complete(**tables["kinds"][like]), **fields} if like else fields

    architectures = {}
    for name, fields in tables["models"].items():
        arguments = complete(**fields)
        network = arguments.pop("network")
        source = arguments.pop("source")
        architectures[name] = Architecture(network, arguments, source)
    return architectures


ARCHITECTURES = _read_architectures()


def get_architecture(name: str) -> tuple[str, Architecture]:
    """Return a published model's key in `ARCHITECTURES` and its `Architecture`.

    Args:
        name: The key. Case does not matter, and "-" is read as "_".

    Raises:
        InputError: If no such model exists. The message suggests a similar name or lists all.
    """
    key = str(name).lower().replace("-", "_")
    if key not in ARCHITECTURES:
        hint = suggest(key, ARCHITECTURES, cutoff=0.4)
        raise InputError(f"Unknown model {short_repr(name)}: {hint}")
    return key, ARCHITECTURES[key]
