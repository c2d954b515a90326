"""Rules that change next-token logits: pure functions of tensors.

Shapes: r texts, V vocabulary entries, t tokens per text. `NO_TOKEN` fills missing
positions. Forbidden tokens get the logit `NEVER`.
"""

from collections.abc import Sequence

import tensorflow as tf

from dtransformer.models.generation.options import GenerationOptions
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

NEVER = -1e9  # logit or log-probability of a forbidden token
NO_TOKEN = -1


def without_ids(logits: tf.Tensor, ids: Sequence[int]) -> tf.Tensor:
    """Return logits [r, V] with the given ids forbidden."""
    if not ids:
        return logits
    return tf.where(is_any(tf.range(logits.shape[-1]), ids), NEVER, logits)


def is_any(tokens: tf.Tensor, ids: Sequence[int]) -> tf.Tensor:
    """Return a bool tensor of the shape of `tokens`, True where the token is in `ids`."""
    result = tf.zeros_like(tokens, "bool")
    for token_id in ids:
        result |= tokens == token_id
    return result


def apply_history_rules(
    logits: tf.Tensor,
    options: GenerationOptions,
    texts: tf.Tensor | None,
    results: tf.Tensor,
    position: tf.Tensor,
) -> tf.Tensor:
    """Apply the rules that depend on previous tokens.

    These are `repetition_penalty` and `no_repeat_ngram_size`.

    Args:
        logits: Float tensor [r, V] of logits or log-probabilities.
        options: `GenerationOptions`.
        texts: Int32 tensor [r, s] of tokens before the results. `None` if no rule needs it.
        results: Int32 tensor [r, max_length] of the results. Entries from `position` on are
            ignored.
        position: Int32 scalar. Number of tokens in the results so far.

    Returns:
        A float tensor [r, V].
    """
    if not options.needs_history:
        return logits
    is_generated = tf.range(static_or_dynamic_shape(results)[1]) < position
    tokens = tf.concat([texts, tf.where(is_generated, results, NO_TOKEN)], axis=1)
    if options.repetition_penalty != 1:
        logits = repetition_penalty(logits, tokens, options.repetition_penalty)
    if options.no_repeat_ngram_size:
        length = static_or_dynamic_shape(texts)[1] + position
        logits = no_repeated_ngrams(logits, tokens, options.no_repeat_ngram_size, length)
    return logits


def apply_position_rules(
    logits: tf.Tensor,
    options: GenerationOptions,
    end_ids: Sequence[int],
    position: tf.Tensor,
    max_length: int | tf.Tensor,
) -> tf.Tensor:
    """Apply the rules for forbidden, first and last tokens and for the minimum length.

    Args:
        logits: Float tensor [r, V] of logits or log-probabilities.
        options: `GenerationOptions`.
        end_ids: Ids that end a text.
        position: Int32 scalar. Index of the next token in the result, from 0.
        max_length: Integer or int scalar. Maximum number of tokens per result.

    Returns:
        A float tensor [r, V].
    """

    def where(condition, changed):
        return tf.where(condition, changed, logits)

    logits = without_ids(logits, options.suppressed_ids)
    if ids := options.suppressed_first_ids:
        logits = where(position == len(options.first_ids[:1]), without_ids(logits, ids))
    if options.min_new_tokens:
        logits = where(position < options.min_new_tokens, without_ids(logits, end_ids))
    for ids, target_position in ((options.first_ids, 0), (options.last_ids, max_length - 1)):
        if ids:
            is_allowed = is_any(tf.range(logits.shape[-1]), ids)
            logits = where(
                position == target_position, tf.where(is_allowed, tf.zeros_like(logits), NEVER)
            )
    return logits


def repetition_penalty(logits: tf.Tensor, texts: tf.Tensor, penalty: float) -> tf.Tensor:
    """Return logits [r, V] with lower values for tokens in the texts [r, t].

    Positive logits are divided by `penalty`, negative ones multiplied, as in `transformers`
    (Keskar et al., 2019, "CTRL", arXiv 1909.05858, §4.1).
    """
    is_present = _token_mask(texts, texts != NO_TOKEN, logits.shape[-1])
    return tf.where(is_present, tf.where(logits < 0, logits * penalty, logits / penalty), logits)


def no_repeated_ngrams(
    logits: tf.Tensor, texts: tf.Tensor, size: int, length: int | tf.Tensor
) -> tf.Tensor:
    """Forbid every token that would repeat an n-gram of its text.

    Reference:
        [Paulus et al., 2017, §2.5](https://arxiv.org/abs/1705.04304)

    Args:
        logits: Float tensor [r, V].
        texts: Int32 tensor [r, t]. Columns from `length` on are `NO_TOKEN`.
        size: Integer of at least 1. Number n of tokens.
        length: Int scalar. Column of the next token.

    Returns:
        A float tensor [r, V].
    """
    num_texts, num_columns = static_or_dynamic_shape(texts)
    padded = tf.pad(texts, [[0, 0], [size - 1, size - 1]], constant_values=NO_TOKEN)
    # `begun` is True in the columns where an n-gram starts with the text's last n - 1 tokens.
    is_match = tf.ones([num_texts, num_columns], "bool")
    for offset in range(size - 1):
        last = padded[:, length + offset][:, None]
        candidates = padded[:, size - 1 + offset : size - 1 + offset + num_columns]
        is_match &= (candidates == last) & (last != NO_TOKEN)
    next_tokens = padded[:, 2 * (size - 1) : 2 * (size - 1) + num_columns]
    repeated = _token_mask(next_tokens, is_match & (next_tokens != NO_TOKEN), logits.shape[-1])
    return tf.where(repeated, NEVER, logits)


def top_k(logits: tf.Tensor, k: int) -> tf.Tensor:
    """Keep the `k` largest logits of each row, and those equal to the smallest of them.

    A `k` of 0 keeps all.
    """
    if not 0 < k < logits.shape[-1]:
        return logits
    smallest = tf.math.top_k(logits, k).values[:, -1:]
    return tf.where(logits < smallest, NEVER, logits)


def top_p(logits: tf.Tensor, p: float) -> tf.Tensor:
    """Keep the fewest tokens whose probabilities sum to at least `p` (nucleus sampling).

    At least the most likely token remains. A `p` of 1 keeps all.

    Reference:
        [Holtzman et al., 2019, §3.1](https://arxiv.org/abs/1904.09751)
    """
    if p >= 1:
        return logits
    sorted_logits = tf.sort(logits, axis=-1, direction="DESCENDING")
    mass_before = tf.cumsum(tf.nn.softmax(sorted_logits), axis=-1, exclusive=True)
    num_tokens = tf.maximum(tf.math.count_nonzero(mass_before < p, axis=-1, dtype="int32"), 1)
    smallest = tf.gather(sorted_logits, num_tokens - 1, batch_dims=1)
    return tf.where(logits < smallest[:, None], NEVER, logits)


def min_p(logits: tf.Tensor, p: float) -> tf.Tensor:
    """Keep the tokens with at least `p` times the probability of the most likely token.

    Reference:
        [Nguyen et al., 2024, §3](https://arxiv.org/abs/2407.01082)
    """
    if p == 0:
        return logits
    probabilities = tf.nn.softmax(logits)
    min_probability = p * tf.reduce_max(probabilities, axis=-1, keepdims=True)
    return tf.where(probabilities < min_probability, NEVER, logits)


def _token_mask(tokens, counts, vocab_size):
    """Return a bool tensor [r, V], True for ids among the `tokens` [r, t] where `counts`."""
    num_texts, num_columns = static_or_dynamic_shape(tokens)
    rows = tf.repeat(tf.range(num_texts), num_columns)
    columns = tf.reshape(tf.where(counts, tokens, vocab_size), [-1])
    indices = tf.stack([rows, columns], axis=1)
    marked = tf.scatter_nd(indices, tf.ones_like(rows), [num_texts, vocab_size + 1])
    return marked[:, :vocab_size] > 0
