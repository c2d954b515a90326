"""The core of attention: queries, keys, values and a mask give the context."""

import functools
import warnings

import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.attention_mask import Segments, allowed
from dtransformer.layers.attention_options import AttentionOptions
from dtransformer.layers.blockwise_attention import ALL_POSITIONS, blockwise_attention
from dtransformer.layers.cudnn_attention import cudnn_attention, is_taken_by_itself, obstacle
from dtransformer.layers.dropout import DropoutMasks
from dtransformer.layers.elementwise import add_to_each, scale, select, soft_capped
from dtransformer.layers.online_softmax import by_heads, context_of, scores_of
from dtransformer.layers.position_bias import PositionBias
from dtransformer.parallel.context_parallel.exchange import LocalExchange, context_exchange
from dtransformer.parallel.mesh.axis_rules import constrain_both
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

IMPLEMENTATIONS = "auto", "reference", "blockwise", "cudnn"
# From so many scores of a head on, "auto" takes blocks.
_MANY_SCORES = 2048 * 1024


def attention(
    q: tf.Tensor,
    keys: list[tf.Tensor],
    values: list[tf.Tensor],
    mask: tf.Tensor | Segments | None = None,
    bias: tf.Tensor | PositionBias | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    dropout: DropoutMasks | None = None,
    softmax_compute_type: str = "float32",
    implementation: str = "auto",
    sinks: tf.Tensor | None = None,
) -> tf.Tensor:
    """Return the context of queries.

    Keys and values may have fewer heads than queries: n / m heads of queries that follow each
    other share one of keys and values (Ainslie et al., 2023, "GQA", arXiv 2305.13245), which is
    not repeated. A position that is masked has a probability of exactly 0, and a query that may
    attend nowhere a context of 0.

    Args:
        q: tensor [b, n, s, d], scaled.
        keys: list of tensors [b, m, t, d], whose positions follow each other, so that a cache
            need not be put together; m divides n.
        values: list of tensors [b, m, t, d], one for each.
        mask: tensor of 0 and 1, or bool: [b, t], [b, s, t], [b, 1, t] or [b, n or 1, s, t], t
            being all positions; 1 where a query may attend. Or `Segments`. None for everywhere.
        bias: what is added to scores: a `PositionBias`; or a tensor [n or 1, s or 1, t], where all
            scores are kept.
        causal: whether a query may attend to no later position, those of queries and keys beginning
            together.
        window: see `is_near`.
        soft_cap: scores x become c·tanh(x / c) before they are masked (Gemma Team, 2024, arXiv
            2408.00118, §2); None for not.
        dropout: the masks of probabilities, one for the rows of each block of queries; see
            `ContextPlan.seen`. None for none.
        softmax_compute_type: type that the softmax is computed in.
        implementation: `"reference"` keeps all scores, `"blockwise"` none, whose backward pass
            computes them again; `"cudnn"` neither, by cuDNN's kernels; what these do not compute
            is computed by blocks, with a warning. `"auto"` takes cuDNN on GPUs, where it can, with a
            warning where it cannot, and blocks where there are many scores.
        sinks: tensor [n], a score that each query of a head has besides those of its keys, which
            takes its share of the probabilities and adds nothing to the context (Xiao et al., 2023,
            "Attention sinks", arXiv 2309.17453, §3.3; as published in gpt-oss' code); None for none.

    Returns:
        A tensor [b, n, s, d].
    """
    options = AttentionOptions(
        mask, bias, causal, window, soft_cap, dropout, softmax_compute_type, sinks
    )
    if len(keys) > 1 or isinstance(bias, tf.Tensor):
        implementation = "reference"
    if implementation != "reference":
        exchange = context_exchange(q, keys[0], options.reach[0], bias is not None)
        if exchange is not None:
            return blockwise_attention(exchange, q, keys[0], values[0], options)
    chosen = implementation_for(implementation, q, keys[0], **vars(options))
    if chosen == "cudnn":
        return cudnn_attention(q, keys[0], values[0], options)
    if chosen == "blockwise":
        exchange = LocalExchange(q.shape[2], keys[0].shape[2])
        return blockwise_attention(exchange, q, keys[0], values[0], options)
    scores = [scores_of(q, k) for k in keys]
    scores = _joined(scores, axis=-1)
    scores = constrain_both(scores, ("batch", "heads", None, "memory_length"))
    scores = tf.cast(scores, softmax_compute_type)
    if soft_cap is not None:
        scores = soft_capped(scores, soft_cap)
    s, t = static_or_dynamic_shape(scores)[2:]
    if bias is not None:
        if isinstance(bias, PositionBias):
            bias = tf.cast(bias.block(bias.tensors, 0, s, 0, t), scores.dtype)
            scores = add_to_each(scores, bias)
        else:
            scores += tf.cast(bias, scores.dtype)
    seen = allowed(mask, options.near(tf.range(s), tf.range(t)))
    any_seen = None
    if seen is not None:
        scores = select(seen, scores, scores.dtype.min)
    if mask is not None:
        any_seen = tf.reduce_any(seen, axis=-1, keepdims=True)
    probabilities = tf.cast(tf.nn.softmax(scores), values[0].dtype)
    if dropout is not None:
        probabilities = _dropped_by_rows(dropout, probabilities, *options.reach)
    probabilities = [probabilities]
    if len(values) > 1:
        sizes = [static_or_dynamic_shape(v)[2] for v in values]
        probabilities = tf.split(probabilities[0], sizes, axis=-1)
    parts = [context_of(p, v) for p, v in zip(probabilities, values)]
    context = parts[0] if len(parts) == 1 else tf.add_n(parts)
    if sinks is not None:
        sums = tf.reduce_logsumexp(scores, axis=-1, keepdims=True)
        kept = tf.sigmoid(sums - tf.cast(by_heads(sinks), sums.dtype))
        context *= tf.cast(kept, context.dtype)
    if any_seen is not None:
        context = scale(context, tf.cast(any_seen, context.dtype))
    return constrain_both(context, ("batch", "heads", None, "head_dim"))


def implementation_for(implementation: str, q: tf.Tensor, k: tf.Tensor, **options) -> str:
    """Return how attention of tensors is computed: what `chosen_implementation` does.

    Args:
        implementation: what was asked for.
        q, k: tensors [b, n, s, d] and [b, m, t, d], or their specs.
        **options: fields of `AttentionOptions`.
    """
    reason = None
    if implementation == "cudnn" or (implementation == "auto" and is_taken_by_itself()):
        reason = obstacle(q.shape, k.shape, q.dtype.name, AttentionOptions(**options))
        if reason is None:
            return "cudnn"
    return chosen_implementation(implementation, q.shape[2], k.shape[2], reason)


def chosen_implementation(
    implementation: str, num_queries: int | None, num_keys: int | None, obstacle: str | None = None
) -> str:
    """Return how attention is computed: `"reference"`, `"blockwise"` or `"cudnn"`.

    Args:
        implementation: what was asked for; see `attention`.
        num_queries, num_keys: numbers s and t; None where they are not known.
        obstacle: why cuDNN does not compute it; None where it does if it is asked for.

    Raises:
        ValueError: "blockwise" is asked for where they are not known.
    """
    is_known = num_queries is not None and num_keys is not None
    if obstacle is not None:
        if not _compat.in_symbolic_scope():  # where a network is built, of no shapes yet
            _warn_once(obstacle)
        if implementation == "cudnn":
            implementation = "blockwise" if is_known else "reference"
    if implementation == "blockwise" and not is_known:
        raise ValueError(
            "attention by blocks needs lengths that are known when it is traced: give batches of "
            'fixed lengths, or implementation="auto"'
        )
    if implementation == "auto":
        is_long = is_known and num_queries * num_keys >= _MANY_SCORES
        return "blockwise" if is_long else "reference"
    return implementation


@functools.cache
def _warn_once(obstacle):
    warnings.warn(f"attention is computed without cuDNN: {obstacle}", stacklevel=2)


def _dropped_by_rows(dropout, probabilities, causal, window):
    """Drop out of all probabilities what would be dropped out of those of each block's rows."""
    s, t = probabilities.shape[2:]
    spans = []
    if s is not None and t is not None:
        plan = LocalExchange(s, t).plan
        rows, columns = plan.rows(ALL_POSITIONS[0]), plan.seen(causal, window, ALL_POSITIONS)[0]
        spans = [(row, own[0].start, own[-1].end) for row, own in zip(rows, columns)]
    if len(spans) < 2 and all(span[1:] == (0, t) for span in spans):  # no slices of all there is
        return dropout.drop(probabilities, dropout.kept(probabilities))
    rows = []
    for number, ((first, last), start, end) in enumerate(spans):
        row = probabilities[:, :, first:last]
        seen = row[..., start:end]
        seen = dropout.drop(seen, dropout.kept(seen, number))
        rows.append(_joined([x for x in (row[..., :start], seen, row[..., end:]) if x.shape[3]], 3))
    return _joined(rows, axis=2)


def _joined(parts, axis):
    """Return tensors, or the only one, as one along an axis."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=axis)
