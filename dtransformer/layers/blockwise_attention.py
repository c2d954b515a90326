"""Attention by blocks, with memory linear in the sequence length.

Scores are computed for one block of queries and keys at a time with an online softmax. Blocks
without a visible key are skipped. The backward pass stores queries, keys, values, the context and
one float per query, and computes scores again.

With sharded sequences each device has the queries of its shard, and keys and values arrive in one
or more rounds.

Letters in shapes: c shards, one per device; s queries of a shard.

References:

- [Rabe and Staats, 2021](https://arxiv.org/abs/2112.05682)
- [Dao et al., 2022](https://arxiv.org/abs/2205.14135) (FlashAttention)
- [Liu et al., 2023](https://arxiv.org/abs/2310.01889) (Ring attention), section 3
"""

import dataclasses

import tensorflow as tf

from dtransformer.layers.attention_dropout import AttentionDropout
from dtransformer.layers.attention_mask import Segments, expand_mask, same_segment
from dtransformer.layers.attention_options import AttentionOptions
from dtransformer.layers.online_softmax import (
    OnlineSoftmax,
    block_gradients,
    mask_scores,
    pad_positions,
    sink_gradients,
)
from dtransformer.parallel.context_parallel.exchange import ContextExchange
from dtransformer.parallel.context_parallel.plan import Columns, Range
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

# Maximum numbers of queries and keys per block, if a device has all positions and if it has a
# shard.
ALL_POSITIONS = (512, 2048)
SOME_POSITIONS = (256, 1024)
_AXES = "length_shards", "batch", "heads", None, None


def blockwise_attention(
    exchange: ContextExchange,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    options: AttentionOptions,
) -> tf.Tensor:
    """Return the attention outputs of queries, computed by blocks. See `attention`.

    Sums over blocks are at least float32.

    Args:
        exchange: Result of `context_exchange`, or a `LocalExchange` if sequences are not sharded.
        q: Tensor of shape `[b, n, s, d]`, which may be sharded along s.
        k, v: Tensors of shape `[b, m, t, d]`, which may be sharded along t.
        options: An `AttentionOptions`.

    Returns:
        A tensor of shape `[b, n, s, d]`.
    """
    sinks, tensors = options.differentiated
    blocks = _Blocks(exchange, _shard_mask(exchange, options.mask), options)
    sinks = [blocks.shard_sinks(sink) for sink in sinks]

    @custom_gradient
    def attend(q, k, v, *rest):
        sinks = rest[:num_sinks]
        tensors = rest[num_sinks:]
        context, log_sums = _forward(blocks, q, k, v, sinks, tensors)

        def gradient(dy):
            dy = constrain(dy, _AXES)
            return _backward(blocks, q, k, v, sinks, tensors, context, log_sums, dy)

        return context, gradient

    num_sinks = len(sinks)
    q = exchange.queries(q)
    k = exchange.memory(k)
    v = exchange.memory(v)
    return exchange.context(attend(q, k, v, *sinks, *tensors))


def _forward(blocks, q, k, v, sinks, tensors):
    """Return the context `[c, b, n, s, d]` and the log-sum-exp of the scores `[c, b, n, s, 1]`."""
    softmaxes = [OnlineSoftmax(*sinks) for _ in blocks.rows]
    done = None
    for round_id, part in enumerate(blocks.plan.round_parts):
        # Serialize rounds and blocks; otherwise TensorFlow may keep all of them in memory.
        round_k, round_v = blocks.exchange.gather(blocks.depend_on(k, done), v, part)
        for row, (softmax, columns) in enumerate(zip(softmaxes, blocks.columns[round_id])):
            block_q = blocks.depend_on(_take_rows(q, blocks.rows[row]), done) if columns else None
            dropout_masks = blocks.draw_masks(block_q, round_id, row)
            for column, block_mask in zip(columns, dropout_masks, strict=True):
                block_k, block_v = (
                    x[..., column.start : column.end, :] for x in (round_k, round_v)
                )
                softmax.add(
                    blocks.scores(block_q, block_k, tensors, row, column),
                    lambda p, v=block_v, dropout_mask=block_mask: blocks.context(
                        p, v, dropout_mask
                    ),
                )
                done = softmax.context
    results = [softmax.results() for softmax in softmaxes]
    contexts, log_sums = (tf.concat(parts, axis=-2) for parts in zip(*results))
    return constrain(tf.cast(contexts, q.dtype), _AXES), log_sums


def _backward(blocks, q, k, v, sinks, tensors, context, log_sums, dy):
    """Return the gradients of q, k, v, the sinks and the bias tensors, as one tuple."""
    means = tf.reduce_sum(tf.cast(dy * context, blocks.compute_type), axis=-1, keepdims=True)
    dq_blocks = [None] * len(blocks.rows)
    tensor_sums = []
    memory_sums = []
    # Do not gather in the forward pass; it would keep the gathered keys and values until now.
    done = means
    for round_id, part in enumerate(blocks.plan.round_parts):
        round_k, round_v = blocks.exchange.gather(blocks.depend_on(k, done), v, part)
        dk_sum, dv_sum = (tf.zeros_like(x, blocks.compute_type) for x in (round_k, round_v))
        for row, columns in enumerate(blocks.columns[round_id]):
            if not columns:
                continue
            block_inputs = [_take_rows(x, blocks.rows[row]) for x in (q, dy, log_sums, means)]
            block_q, block_dy, block_log_sums, block_means = block_inputs
            # Without this dependency TensorFlow would keep every summand.
            block_q = blocks.depend_on(block_q, dk_sum)
            block_dy = blocks.depend_on(block_dy, dv_sum)
            for column, block_mask in zip(
                columns, blocks.draw_masks(block_q, round_id, row), strict=True
            ):
                start = column.start
                end = column.end
                (dq, dk, *dtensors), dv = block_gradients(
                    lambda q, k, *rest, at=(row, column): blocks.scores(q, k, rest, *at),
                    lambda p, v, dropout_mask=block_mask: blocks.context(p, v, dropout_mask),
                    [block_q, round_k[..., start:end, :], *tensors],
                    round_v[..., start:end, :],
                    block_dy,
                    block_log_sums,
                    block_means,
                )
                dq, dk, dv = (tf.cast(x, blocks.compute_type) for x in (dq, dk, dv))
                dq_blocks[row] = dq if dq_blocks[row] is None else dq_blocks[row] + dq
                dk_sum += pad_positions(dk_sum.shape[3], dk, start, end)
                dv_sum += pad_positions(dv_sum.shape[3], dv, start, end)
                tensor_sums = [x + y for x, y in zip(tensor_sums, dtensors)] or dtensors
        memory_sums.append(blocks.exchange.scatter_sum(dk_sum, dv_sum))
        done = memory_sums[-1][0]
    dk_sum, dv_sum = (tf.cast(tf.concat(parts, axis=-2), k.dtype) for parts in zip(*memory_sums))
    dq_blocks = [
        tf.zeros_like(_take_rows(q, row), blocks.compute_type) if dq is None else dq
        for row, dq in zip(blocks.rows, dq_blocks)
    ]
    dq_blocks = tf.cast(tf.concat(dq_blocks, axis=-2), q.dtype)
    dsinks = sink_gradients(sinks, log_sums, means)
    return *(constrain(x, _AXES) for x in (dq_blocks, dk_sum, dv_sum)), *dsinks, *tensor_sums


@dataclasses.dataclass(frozen=True)
class _Mask:
    """Attention mask in the layout of the shards, expanded block by block.

    Args:
        pairs: Bool tensor of shape `[c or 1, b, n or 1, s or 1, t]`, or `None`.
        queries: Tensor of shape `[c or 1, b, 1, s]`, the segment ids of queries, or `None`.
        keys: Tensor of shape `[b, 1, t]`, the segment ids of keys, or `None`.
        prefix: Bool tensor of shape `[b, 1, 1, t]`, keys that are always in reach, or `None`.
    """

    pairs: tf.Tensor | None = None
    queries: tf.Tensor | None = None
    keys: tf.Tensor | None = None
    prefix: tf.Tensor | None = None

    def block(self, row, position, size):
        """Return the mask of a block, bool `[c or 1, b, n or 1, s or 1, size]`.

        Args:
            row: Range of the queries in their shard.
            position: Position of the first key.
            size: Number of keys.
        """
        keys = slice(position, position + size)
        if self.pairs is None:
            return same_segment(self.queries[..., row[0] : row[1]], self.keys[..., keys])
        pairs = self.pairs if self.pairs.shape[3] == 1 else _take_rows(self.pairs, row)
        return pairs[..., keys]

    def with_prefix(self, near, position, size):
        """Return the keys in reach of a block, bool, plus the prefix."""
        return near if self.prefix is None else near | self.prefix[..., position : position + size]


def _shard_mask(exchange, mask):
    if mask is None:
        return None
    if isinstance(mask, Segments):
        queries, keys = (constrain(x, ("batch", None)) for x in (mask.queries, mask.keys))
        queries = exchange.rows(tf.expand_dims(tf.expand_dims(queries, 1), -1))
        prefix = mask.prefix
        if prefix is not None:
            prefix = tf.expand_dims(tf.expand_dims(constrain(prefix, ("batch", None)), 1), 1)
        return _Mask(None, tf.squeeze(queries, -1), tf.expand_dims(keys, 1), prefix)
    return _Mask(pairs=exchange.rows(expand_mask(mask)))


class _Blocks:
    """Scores and outputs of one block of queries and keys."""

    def __init__(self, exchange, mask, options):
        self.exchange = exchange
        self.plan = exchange.plan
        self._mask = mask
        self._options = options
        self.compute_type = options.compute_type
        self.context = options.context
        sizes = ALL_POSITIONS if self.plan.has_all_positions else SOME_POSITIONS
        self.rows = self.plan.rows(sizes[0])
        by_position = not (options.bias is None and mask is None and options.dropout is None)
        # Indexed by round, then by block of queries.
        self.columns = self.plan.visible_columns(*options.reach, sizes, by_position)

    def depend_on(self, x, done):
        """Return x with a dependency on `done`, unless `done` is `None`."""
        return x if done is None else self.exchange.depend_on(x, done)

    def shard_sinks(self, sinks):
        """Convert sinks `[1, n, 1, 1]` to the layout of the shards, `[c or 1, 1, n, 1, 1]`."""
        return self._spread(tf.expand_dims(sinks, 0))

    def scores(self, q, k, tensors, row: int, column: Columns):
        """Return the scores `[c, b, n, s, t]` of a block, -inf for masked keys."""
        scores = self._options.scores(q, k)
        options = self._options
        visible = None
        rows = self.rows[row]
        size = column.end - column.start
        if options.bias is not None:
            scores += tf.cast(self._bias_of(tensors, rows, column.position, size), scores.dtype)
        if self._mask is not None:
            visible = self._mask.block(rows, column.position, size)
        if not self.plan.are_all_near(rows, column, options.causal, options.window):
            near = self._in_reach(rows, column.position, size)
            if self._mask is not None:
                near = self._mask.with_prefix(near, column.position, size)
            visible = near if visible is None else visible & near
        return mask_scores(scores, visible)

    def _in_reach(self, row: Range, position: int, size: int):
        """Return the keys in reach of a block's queries, bool `[c, 1, 1, s, t]`."""
        firsts = [self.plan.positions(shard)[row[0]] for shard in range(self.plan.shards)]
        firsts = tf.reshape(tf.constant(firsts, INDEX_TYPE), [-1, 1, 1, 1])
        firsts = constrain(firsts, ("length_shards", None, None, None))
        queries = firsts + self.plan.stride * tf.range(row[1] - row[0], dtype=INDEX_TYPE)
        return self._options.near(queries, position + tf.range(size))

    def _bias_of(self, tensors, row, position, size):
        """Return the bias of a block, `[c, 1, n, s, t]`."""
        num_queries = row[1] - row[0]
        bias = self._options.bias
        plan = self.plan
        firsts = [plan.positions(shard)[row[0]] for shard in range(0, plan.shards, plan.head_parts)]
        values = [
            bias.block(tensors, first, num_queries, position, size, plan.stride) for first in firsts
        ]
        return self._spread(tf.stack([tf.expand_dims(x, 0) for x in values]))

    def _spread(self, x):
        """Convert values `[p or 1, 1, n, s, t]` for p parts of the positions, see `spread`."""
        # The constraint replicates the gradient. DTensor cannot concatenate gradients of single
        # shards.
        return self.exchange.spread(constrain(x, (None, None, "heads", None, None)))

    def draw_masks(self, queries, round_id, row):
        """Return the dropout mask of each block of keys, for a round and a block of queries.

        Without dropout the masks are `None`. They are drawn after the tensor `queries`.
        """
        columns = self.columns[round_id][row]
        dropout = self._options.dropout
        if dropout is None or not columns:
            return [None] * len(columns)
        _, b, n, *_ = static_or_dynamic_shape(queries)
        shape = [b, n * self.plan.head_parts, self.plan.num_queries, self.plan.num_keys]
        masks = AttentionDropout(dropout.after(queries), shape)
        return [self._dropout_mask(masks, self.rows[row], column) for column in columns]

    def _dropout_mask(self, masks, row, column):
        """Return the mask `[c, b, n, s, t]` of a block of queries and keys."""
        plan = self.plan
        parts = plan.position_parts
        start, end = row
        keys = (column.position, column.position + column.end - column.start)
        if plan.is_striped:
            mask = masks.block((start * parts, end * parts), keys)
            split = [end - start, parts]
            order = [3, 0, 1, 2, 4]
        else:
            firsts = [part * plan.num_local_queries for part in range(parts)]
            blocks = [masks.block((first + start, first + end), keys) for first in firsts]
            mask = tf.concat(blocks, axis=2)
            split = [parts, end - start]
            order = [2, 0, 1, 3, 4]
        b, n, _, t = static_or_dynamic_shape(mask)
        mask = tf.transpose(tf.reshape(mask, [b, n, *split, t]), order)
        return self.exchange.spread(constrain(mask, (None, "batch", None, None, None)))


def _take_rows(x, row):
    return x[..., row[0] : row[1], :]
