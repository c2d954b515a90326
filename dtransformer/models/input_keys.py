"""Names of a network's inputs, including the names that `transformers` uses."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from dtransformer.errors import suggest

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
        required: Tuple of the names of required inputs. A network with a single required
            input also accepts it without a dict.
        optional: Tuple of the names of optional inputs.
        aliases: Dict from input names of `transformers` to the names in this library.
        training_only: Tuple of the optional inputs that exported networks do not have.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    aliases: Mapping[str, str]
    training_only: tuple[str, ...] = ()

    def to_dict(self, inputs: Any, owner: str) -> dict[str, Any]:
        """Return the inputs as a dict with this library's names. Drop inputs that are `None`.

        Args:
            inputs: Dict of tensors or of their shapes, or the single required input.
            owner: Class name of the network, for error messages.

        Raises:
            ValueError: If a name is unknown or appears twice, a required input is missing, or
                the shape of a mask differs from the shape of its ids.
        """
        if not isinstance(inputs, Mapping):
            if len(self.required) > 1 or isinstance(inputs, list):
                raise ValueError(
                    f"The inputs of {owner} must be a dict with {_quote_names(self.required)}, got "
                    f"{type(inputs).__name__}."
                )
            return {self.required[0]: inputs}
        result = {}
        for key, value in inputs.items():
            name = self.aliases.get(key, key)
            if name not in (*self.required, *self.optional):
                raise ValueError(self._unknown(key, owner))
            if name in result:
                raise ValueError(
                    f"The inputs of {owner} contain {name!r} twice, the second time as {key!r}. "
                    "Remove one of them."
                )
            if value is not None:
                result[name] = value
        for name in self.required:
            if name not in result:
                also = [alias for alias, target in self.aliases.items() if target == name]
                raise ValueError(
                    f"The inputs of {owner} must contain {' or '.join(map(repr, [name, *also]))}, got "
                    f"{_quote_names(inputs)}."
                )
        for name, ids in zip(_MASKS, (self.required[0], self.required[-1])):
            _check_mask(name, result.get(name), ids, result[ids])
        return result

    def _unknown(self, key, owner):
        known_names = [*self.required, *self.optional, *self.aliases]
        return (
            f"{owner} has no input {key!r}: {_REFUSED.get(key) or suggest(key, known_names, 0.5)}"
        )


def get_mask(inputs: Mapping[str, tf.Tensor], name: str = _MASKS[0]) -> tf.Tensor | None:
    """Return a mask as a bool tensor [b, s], True at tokens, or `None` if it is missing.

    Args:
        inputs: Dict of inputs from `InputKeys.to_dict`.
        name: Name of the mask.
    """
    mask = inputs.get(name)
    return None if mask is None else tf.cast(mask, "bool")


def masked_segments(segments: tf.Tensor | None, mask: tf.Tensor | None) -> tf.Tensor | None:
    """Combine segment ids [b, s] with a bool mask [b, s].

    Positions outside of the mask get segment 0, which is padding. If only one of them is
    given, it is returned. Without both, the result is `None`.
    """
    if segments is None or mask is None:
        return mask if segments is None else segments
    return tf.where(mask, segments, tf.zeros_like(segments))


def _check_mask(name, mask, ids_name, ids_tensor):
    mask_shape, ids_shape = (getattr(x, "shape", None) for x in (mask, ids_tensor))
    # Specs and plain values have no shape to compare.
    if mask_shape is None or ids_shape is None:
        return
    mask_shape = tf.TensorShape(mask_shape)
    ids_shape = tf.TensorShape(ids_shape)
    if mask_shape.rank != 2 or not mask_shape.is_compatible_with(ids_shape):
        raise ValueError(
            f"`{name}` has shape {tuple(mask_shape)}, but {ids_name!r} has shape "
            f"{tuple(ids_shape)}. Use equal shapes, with 1 for tokens and 0 for padding."
        )


def _quote_names(names):
    return ", ".join(map(repr, names))
