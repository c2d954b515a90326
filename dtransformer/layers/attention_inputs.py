"""Shape and type checks of attention inputs, which would otherwise broadcast or fail later."""

import tensorflow as tf

from dtransformer.layers.arguments import check_floating
from dtransformer.layers.attention_mask import Segments
from dtransformer.layers.base import check_divisible
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.context_parallel.plan import count_head_parts


def check_layout(hidden_size: int, num_heads: int, num_kv_heads: int, implementation: str) -> None:
    """Check that the parallel config can shard an attention layer.

    Raises:
        ValueError: If `model_parallel` or the context-parallel mode does not divide the sizes, or
            `implementation` is `"reference"` under context parallelism.
    """
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "hidden_size": hidden_size}
    check_divisible(**sizes)
    config = get_parallel_config()
    shards = config.context_parallel
    local_heads = num_heads // config.model_parallel
    if shards > 1 and implementation == "reference":
        raise ValueError(
            "`implementation='reference'` does not support sharded sequences "
            f"(`context_parallel={shards}`). Use `implementation='auto'`."
        )
    local_kv_heads = num_kv_heads // config.model_parallel
    count_head_parts(
        config.context_parallel_mode, shards, local_heads, local_kv_heads, config.ulysses_shards
    )


def check_inputs(
    hidden_size: int,
    query: tf.Tensor,
    key: tf.Tensor | None,
    value: tf.Tensor | None,
    length: int | None = None,
) -> None:
    """Check the types and shapes of queries, keys and values.

    Args:
        hidden_size: Integer. Size h of the last dimension.
        query: Tensor of shape `[b, s, h]`.
        key, value: Tensors of shape `[b, t, h]`, or `None`.
        length: Integer. Required sequence length of all inputs. Defaults to `None`: any length, but
            keys and values must have the same.

    Raises:
        TypeError: If an input is not floating-point.
        ValueError: If an input has another shape.
    """
    batch = query.shape[:1]
    for name, x in {"query": query, "key": key, "value": value}.items():
        if x is None:
            continue
        expected = [*batch, length, hidden_size]
        if x.shape.rank != 3 or not x.shape.is_compatible_with(expected):
            raise ValueError(
                f"`{name}` has shape {list(x.shape)}, expected {expected}: batch, length and "
                f"`hidden_size={hidden_size}`."
            )
        check_floating(name, x)
        if name == "key":
            length = x.shape[1]


def check_mask(
    mask: tf.Tensor | Segments | None, query: tf.Tensor, length: int | None, num_heads: int
) -> None:
    """Check the shape of an attention mask.

    Args:
        mask: Tensor or `Segments`, see `attention`, or `None`.
        query: Tensor of shape `[b, s, h]`.
        length: Number t of keys.
        num_heads: Number n of heads.

    Raises:
        ValueError: If the shape does not match. A mask is never broadcast over the batch.
    """
    if mask is None:
        return
    batch, num_queries = query.shape[:2]
    if isinstance(mask, Segments):
        fits = mask.queries.shape.is_compatible_with([batch, num_queries])
        if fits and mask.keys.shape.is_compatible_with([batch, length]):
            return
        raise ValueError(
            f"`Segments` has shapes {list(mask.queries.shape)} and {list(mask.keys.shape)}, "
            f"expected [{batch}, {num_queries}] for queries and [{batch}, {length}] for keys."
        )
    forms = {2: [[batch, length]], 3: [[batch, s, length] for s in (1, num_queries)]}
    forms[4] = [[batch, n, *form[1:]] for n in (1, num_heads) for form in forms[3]]
    allowed = forms.get(mask.shape.rank, ())
    if not any(mask.shape.is_compatible_with(form) for form in allowed):
        raise ValueError(
            f"The attention mask has shape {list(mask.shape)}, expected "
            f"[{batch}, {length}], [{batch}, {num_queries}, {length}] or [{batch}, {num_heads}, "
            f"{num_queries}, {length}] for queries of shape {list(query.shape)}."
        )
