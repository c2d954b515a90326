"""Inputs of attention: what is refused, as it would be broadcast or fail later."""

import tensorflow as tf

from dtransformer.layers.arguments import check_floating
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import check_divisible
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.context_parallel.plan import check_heads


def check_layout(hidden_size: int, num_heads: int, num_kv_heads: int, implementation: str) -> None:
    """Check that the config can divide an attention.

    Raises:
        ValueError: it cannot; names all the numbers.
    """
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "hidden_size": hidden_size}
    check_divisible(**sizes)
    config = get_parallel_config()
    shards, own = config.context_parallel, num_heads // config.model_parallel
    if shards > 1 and implementation == "reference":
        raise ValueError(
            f"implementation='reference' does not work with context_parallel={shards}, under which "
            "attention is computed by blocks: set implementation='auto'"
        )
    if config.context_parallel_mode == "ulysses":
        check_heads(own, num_kv_heads // config.model_parallel, shards)


def check_inputs(
    hidden_size: int,
    query: tf.Tensor,
    key: tf.Tensor | None,
    value: tf.Tensor | None,
    length: int | None = None,
) -> None:
    """Check the inputs of attention, which may all have to be of one length.

    Raises:
        TypeError: one is not of a floating type.
        ValueError: one is not [b, s, h]; names it.
    """
    batch = query.shape[:1]
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x is None:
            continue
        expected = [*batch, length, hidden_size]
        if x.shape.rank != 3 or not x.shape.is_compatible_with(expected):
            raise ValueError(
                f"{name} has the shape {list(x.shape)}, expected {expected}: a batch, a length "
                f"and hidden_size={hidden_size}"
            )
        check_floating(name, x)
        if name == "key":
            length = x.shape[1]


def check_mask(
    mask: tf.Tensor | Segments | None, query: tf.Tensor, length: int | None, num_heads: int
) -> None:
    """Check a mask of attention.

    Args:
        mask: the mask.
        query: tensor [b, s, h].
        length: number t of keys.
        num_heads: number n of heads.

    Raises:
        ValueError: it would be broadcast over other sequences.
    """
    if mask is None:
        return
    batch, own = query.shape[:2]
    if isinstance(mask, Segments):
        fits = mask.queries.shape.is_compatible_with([batch, own])
        if fits and mask.keys.shape.is_compatible_with([batch, length]):
            return
        raise ValueError(
            f"the segments have the shapes {list(mask.queries.shape)} and {list(mask.keys.shape)}, "
            f"expected [{batch}, {own}] of queries and [{batch}, {length}] of keys"
        )
    forms = {2: [[batch, length]], 3: [[batch, s, length] for s in (1, own)]}
    forms[4] = [[batch, n, *form[1:]] for n in (1, num_heads) for form in forms[3]]
    allowed = forms.get(mask.shape.rank, ())
    if not any(mask.shape.is_compatible_with(form) for form in allowed):
        raise ValueError(
            f"the attention mask has the shape {list(mask.shape)}, expected "
            f"[{batch}, {length}], [{batch}, {own}, {length}] or [{batch}, {num_heads}, "
            f"{own}, {length}] for queries of the shape {list(query.shape)}"
        )
