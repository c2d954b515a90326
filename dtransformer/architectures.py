"""The sizes of published models, as data: a kind of network and its arguments.

`architectures.yaml` has the numbers, which are those of the papers. `dtransformer.models.from_preset`
makes networks of these sizes, and `dtransformer.planner` says what to train them costs.
"""

import dataclasses
import pathlib

from dtransformer.errors import InputError, nearest, shown
from dtransformer.tables import read_table


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The size of a published model.

    Args:
        network: name of the class of the network in `dtransformer.models`.
        arguments: dict of its arguments.
        source: where they are published.
    """

    network: str
    arguments: dict
    source: str


def _all():
    tables = read_table(pathlib.Path(__file__).with_suffix(".yaml"))

    def complete(like=None, **own):
        """Return fields with those of the kind that they are like, which own ones replace."""
        return {**complete(**tables["kinds"][like]), **own} if like else own

    found = {}
    for name, fields in tables["models"].items():
        arguments = complete(**fields)
        network, source = arguments.pop("network"), arguments.pop("source")
        found[name] = Architecture(network, arguments, source)
    return found


ARCHITECTURES = _all()


def architecture_named(name: str) -> tuple[str, Architecture]:
    """Return a published model's key in `ARCHITECTURES`, and its size.

    Args:
        name: the key; "-" may stand for "_".

    Raises:
        InputError: there is no such model; says which is like it, or what exists.
    """
    key = str(name).lower().replace("-", "_")
    if key not in ARCHITECTURES:
        hint = nearest(key, ARCHITECTURES, cutoff=0.4)
        raise InputError(f"there is no model {shown(name)}: {hint}")
    return key, ARCHITECTURES[key]
