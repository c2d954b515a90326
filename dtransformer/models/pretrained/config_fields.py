"""Fields of published configs that no network is made of: what says nothing, and what does."""

import os
import warnings

from dtransformer.errors import InputError, shown
from dtransformer.models.generation import rules as generation_rules
from dtransformer.models.pretrained.quantized import form_of
from dtransformer.models.published_fields import FIELDS

SILENT, _TRAINING, _REFUSED = (set(FIELDS["config"][x]) for x in ("silent", "training", "refused"))
_GENERATION = generation_rules.TAKEN | generation_rules.NAMED | generation_rules.SILENT
KNOWN = SILENT | _TRAINING | _REFUSED | _GENERATION


class ReadFields(dict):
    """The fields of a config, which remembers those that were asked for.

    Attributes:
        read: their names, the last one at the end, keys of a dict.
    """

    def __init__(self, fields: dict):
        super().__init__(fields)
        self.read = {}

    def __getitem__(self, name):
        self.read[name] = None
        return super().__getitem__(name)

    def get(self, name, default=None):
        """Return a field, or a default where it lacks."""
        self.read[name] = None
        return super().get(name, default)


def check_others(config: ReadFields, path: os.PathLike) -> None:
    """Refuse, or name in a warning, what a network was not made of and may have to be.

    Args:
        config: the fields, after the network's arguments were read.
        path: of the file, for messages.

    Raises:
        InputError: there is a field by which weights are others.
    """
    known = {"quantization_config"} if form_of(dict(config)) else set()
    left = {x: y for x, y in config.items() if x not in config.read.keys() | known and y}
    for name in sorted(left.keys() & _REFUSED):
        raise InputError(f"{name}={shown(left[name])} is not built: give the weights as they were")
    if training := sorted(left.keys() & _TRAINING):
        message = ", ".join(f"{name}={shown(left[name])}" for name in training)
        warnings.warn(f"{path}: {message}: not applied where the network is trained", stacklevel=3)
    if others := sorted(left.keys() - KNOWN):
        message = ", ".join(f"{name}={shown(left[name])}" for name in others)
        warnings.warn(
            f"{path}: fields that are not known here, and ignored: {message}", stacklevel=3
        )
