"""Inputs [b·s, h]: sequences one after the other, of which a mask tells how many there are."""

import tensorflow as tf

from dtransformer.parallel.shapes import static_or_dynamic_shape


def as_sequences(name: str, x: tf.Tensor | None, *masks: tf.Tensor | None) -> tf.Tensor | None:
    """Return inputs with their sequences apart; what is no [b·s, h] stays as it is.

    Args:
        name: of the argument, for the error.
        x: tensor [b·s, h] or [b, s, h], or None.
        *masks: tensors [b, ...], `Segments`, or None: the first that is there tells b.

    Returns:
        A tensor [b, s, h], or None.

    Raises:
        ValueError: no mask tells b, or b does not divide b·s.
    """
    if x is None or x.shape.rank != 2:
        return x
    mask = next((tf.nest.flatten(mask)[0] for mask in masks if mask is not None), None)
    if mask is None:
        raise ValueError(
            f"{name} has the shape {list(x.shape)}: give an attention mask, which tells how many "
            "sequences these are, or inputs [b, s, h]"
        )
    rows, features = static_or_dynamic_shape(x)
    batch = static_or_dynamic_shape(mask)[0]
    if isinstance(rows, int) and isinstance(batch, int) and rows % batch:
        raise ValueError(
            f"{name} has the shape {list(x.shape)}, expected a multiple of {batch} rows: the "
            f"attention mask has the shape {list(mask.shape)}"
        )
    return tf.reshape(x, [batch, rows // batch, features])


def in_form_of(output: tf.Tensor, inputs: tf.Tensor) -> tf.Tensor:
    """Return an output [b, s, h] as inputs have it: [b·s, h] where they do."""
    return tf.reshape(output, [-1, output.shape[-1]]) if inputs.shape.rank == 2 else output
