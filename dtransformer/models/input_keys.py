"""Names of a network's inputs, including the names that `transformers` uses."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dtransformer.errors import nearest

_REFUSED = {
    "labels": "pass labels next to the inputs, as a tuple `(inputs, labels)`.",
    "position_ids": "positions follow from the order of tokens. Use 'segments' for packed texts.",
    "decoder_position_ids": "positions follow from the order of tokens.",
    "inputs_embeds": "pass token ids.",
}
_MASKS = "attention_mask", "decoder_attention_mask"


@dataclasses.dataclass(frozen=True)
class InputKeys:
    """Names of the inputs that a network accepts.

    Args:
        needed: Tuple of the names of required inputs. A network with a single required
            input also accepts it without a dict.
        optional: Tuple of the names of optional inputs.
        theirs: Dict from input names of `transformers` to the names in this library.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    theirs: Mapping[str, str]

    def named(self, inputs: Any, owner: str) -> dict[str, Any]:
        """Return the inputs as a dict with this library's names. Drop inputs that are `None`.

        Args:
            inputs: Dict of tensors or of their shapes, or the single required input.
            owner: Class name of the network, for error messages.

        Raises:
            ValueError: If a name is unknown or appears twice, a required input is missing, or
                the shape of a mask differs from the shape of its ids.
        """
        if not isinstance(inputs, Mapping):
            if len(self.needed) > 1 or isinstance(inputs, list):
                raise ValueError(
                    f"The inputs of {owner} must be a dict with {_listed(self.needed)}, got "
                    f"{type(inputs).__name__}."
                )
            return {self.needed[0]: inputs}
        found = {}
        for key, value in inputs.items():
            name = self.theirs.get(key, key)
            if name not in (*self.needed, *self.optional):
                raise ValueError(self._unknown(key, owner))
            if name in found:
                raise ValueError(
                    f"The inputs of {owner} contain {name!r} twice, the second time as {key!r}. "
                    "Remove one of them."
                )
            if value is not None:
                found[name] = value
        for name in self.needed:
            if name not in found:
                also = [theirs for theirs, own in self.theirs.items() if own == name]
                raise ValueError(
                    f"The inputs of {owner} must contain {' or '.join(map(repr, [name, *also]))}, got "
                    f"{_listed(inputs)}."
                )
        for name, ids in zip(_MASKS, (self.needed[0], self.needed[-1])):
            _check_mask(name, found.get(name), ids, found[ids])
        return found

    def _unknown(self, key, owner):
        known = [*self.needed, *self.optional, *self.theirs]
        return f"{owner} has no input {key!r}: {_REFUSED.get(key) or nearest(key, known, 0.5)}"


def mask_of(inputs: Mapping[str, tf.Tensor], name: str = _MASKS[0]) -> tf.Tensor | None:
    """Return a mask as a bool tensor [b, s], True at tokens, or `None` if it is missing.

    Args:
        inputs: Dict of inputs from `InputKeys.named`.
        name: Name of the mask.
    """
    mask = inputs.get(name)
    return None if mask is None else tf.cast(mask, "bool")


def segments_of(segments: tf.Tensor | None, mask: tf.Tensor | None) -> tf.Tensor | None:
    """Combine segment ids [b, s] with a bool mask [b, s].

    Positions outside of the mask get segment 0, which is padding. If only one of them is
    given, it is returned. Without both, the result is `None`.
    """
    if segments is None or mask is None:
        return mask if segments is None else segments
    return tf.where(mask, segments, tf.zeros_like(segments))


def _check_mask(name, mask, ids, of):
    own, expected = (getattr(x, "shape", None) for x in (mask, of))
    # Specs and plain values have no shape to compare.
    if own is None or expected is None:
        return
    own, expected = tf.TensorShape(own), tf.TensorShape(expected)
    if own.rank != 2 or not own.is_compatible_with(expected):
        raise ValueError(
            f"`{name}` has shape {tuple(own)}, but {ids!r} has shape {tuple(expected)}. Use equal "
            "shapes, with 1 for tokens and 0 for padding."
        )


def _listed(names):
    return ", ".join(map(repr, names))
