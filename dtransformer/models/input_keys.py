"""The names of a network's inputs: its own, and those that `transformers` has for them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dtransformer.errors import nearest

_REFUSED = {
    "labels": "give labels beside the inputs, as a tuple (inputs, labels)",
    "position_ids": "positions follow from the places of tokens: 'segments' number the texts of a row",
    "decoder_position_ids": "positions follow from the places of tokens",
    "inputs_embeds": "give ids",
}
_MASKS = "attention_mask", "decoder_attention_mask"


@dataclasses.dataclass(frozen=True)
class InputKeys:
    """Which inputs a network takes.

    Args:
        needed: names of those without which it computes nothing; where there is one, inputs may be
            that one alone.
        optional: names of others.
        theirs: dict of what `transformers` calls some of them, and their names here.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    theirs: Mapping[str, str]

    def named(self, inputs: Any, owner: str) -> dict[str, Any]:
        """Return a dict of the inputs by this library's names; those that are None are left out.

        Args:
            inputs: tensors, or their shapes: a dict, or the one that is needed.
            owner: the network's class, for errors.

        Raises:
            ValueError: there is a name that is not known, one lacks, or a mask has not its ids' shape.
        """
        if not isinstance(inputs, Mapping):
            if len(self.needed) > 1 or isinstance(inputs, list):
                raise ValueError(
                    f"{owner} takes a dict of {_listed(self.needed)}, got {type(inputs).__name__}"
                )
            return {self.needed[0]: inputs}
        found = {}
        for key, value in inputs.items():
            name = self.theirs.get(key, key)
            if name not in (*self.needed, *self.optional):
                raise ValueError(self._unknown(key, owner))
            if name in found:
                raise ValueError(f"the inputs of {owner} have {name!r} twice, as {key!r}, too")
            if value is not None:
                found[name] = value
        for name in self.needed:
            if name not in found:
                also = [theirs for theirs, own in self.theirs.items() if own == name]
                raise ValueError(
                    f"the inputs of {owner} lack {' or '.join(map(repr, [name, *also]))}; they have "
                    f"{_listed(inputs)}"
                )
        for name, ids in zip(_MASKS, (self.needed[0], self.needed[-1])):
            _check_mask(name, found.get(name), ids, found[ids])
        return found

    def _unknown(self, key, owner):
        known = [*self.needed, *self.optional, *self.theirs]
        return f"{owner} has no input {key!r}: {_REFUSED.get(key) or nearest(key, known, 0.5)}"


def mask_of(inputs: Mapping[str, tf.Tensor], name: str = _MASKS[0]) -> tf.Tensor | None:
    """Return a mask of named inputs, bool [b, s]: where there is a token; None where it lacks.

    Args:
        inputs: as of `InputKeys.named`.
        name: the mask's name.
    """
    mask = inputs.get(name)
    return None if mask is None else tf.cast(mask, "bool")


def segments_of(segments: tf.Tensor | None, mask: tf.Tensor | None) -> tf.Tensor | None:
    """Return what positions may attend to each other: segments [b, s], of which a mask takes some.

    None where neither is given.
    """
    if segments is None or mask is None:
        return mask if segments is None else segments
    return tf.where(mask, segments, tf.zeros_like(segments))


def _check_mask(name, mask, ids, of):
    own, expected = (getattr(x, "shape", None) for x in (mask, of))
    if own is None or expected is None:  # of shapes, or without any
        return
    own, expected = tf.TensorShape(own), tf.TensorShape(expected)
    if own.rank != 2 or not own.is_compatible_with(expected):
        raise ValueError(
            f"{name} has the shape {tuple(own)}, expected that of {ids!r}, {tuple(expected)}: 1 where "
            "there is a token, 0 for padding"
        )


def _listed(names):
    return ", ".join(map(repr, names))
