"""Rules that change the logits of the next tokens: pure functions of tensors.

Shapes: r texts, V entries of the vocabulary, t tokens of a text, of which those that are not there
are `NO_TOKEN`. What a rule forbids has the logit `NEVER`.
"""

from collections.abc import Sequence

import tensorflow as tf

from dtransformer.models.generation.options import GenerationOptions
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

NEVER = -1e9  # the logit, or log-probability, of what is not chosen
NO_TOKEN = -1


def without_ids(logits: tf.Tensor, ids: Sequence[int]) -> tf.Tensor:
    """Return logits [r, V] by which some ids are never next."""
    if not ids:
        return logits
    return tf.where(is_one_of(tf.range(logits.shape[-1]), ids), NEVER, logits)


def is_one_of(tokens: tf.Tensor, ids: Sequence[int]) -> tf.Tensor:
    """Return which of tokens [...] are some ids: bool [...]."""
    found = tf.zeros_like(tokens, "bool")
    for one in ids:
        found |= tokens == one
    return found


def looking_back(
    logits: tf.Tensor,
    options: GenerationOptions,
    texts: tf.Tensor | None,
    found: tf.Tensor,
    position: tf.Tensor,
) -> tf.Tensor:
    """Return logits, or log-probabilities, [r, V] by the rules that depend on the texts so far.

    Args:
        logits: float tensor [r, V] of the tokens at a position.
        options: which rules.
        texts: int32 tensor [r, s] that results come after; None where no rule looks back.
        found: int32 tensor [r, max_length], the results up to the position.
        position: int32 scalar.
    """
    if not options.looks_back:
        return logits
    is_found = tf.range(static_or_dynamic_shape(found)[1]) < position
    whole = tf.concat([texts, tf.where(is_found, found, NO_TOKEN)], axis=1)
    if options.repetition_penalty != 1:
        logits = repetition_penalty(logits, whole, options.repetition_penalty)
    if options.no_repeat_ngram_size:
        length = static_or_dynamic_shape(texts)[1] + position
        logits = no_repeated_ngrams(logits, whole, options.no_repeat_ngram_size, length)
    return logits


def by_position(
    logits: tf.Tensor,
    options: GenerationOptions,
    end_ids: Sequence[int],
    position: tf.Tensor,
    max_length: int | tf.Tensor,
) -> tf.Tensor:
    """Return logits, or log-probabilities, [r, V] by the rules of what comes first, last and never.

    Args:
        logits: float tensor [r, V] of the tokens at a position.
        options: which rules.
        end_ids: ids that end texts.
        position: int32 scalar, from 0.
        max_length: most tokens of a result.
    """

    def where(is_so, changed):
        return tf.where(is_so, changed, logits)

    logits = without_ids(logits, options.suppressed_ids)
    if ids := options.suppressed_first_ids:
        logits = where(position == len(options.first_ids[:1]), without_ids(logits, ids))
    if options.min_new_tokens:
        logits = where(position < options.min_new_tokens, without_ids(logits, end_ids))
    for ids, place in ((options.first_ids, 0), (options.last_ids, max_length - 1)):
        if ids:
            is_one = is_one_of(tf.range(logits.shape[-1]), ids)
            logits = where(position == place, tf.where(is_one, tf.zeros_like(logits), NEVER))
    return logits


def repetition_penalty(logits: tf.Tensor, texts: tf.Tensor, penalty: float) -> tf.Tensor:
    """Return logits [r, V] by which the tokens of the texts [r, t] are less likely.

    Reference: Keskar et al., 2019, "CTRL", arXiv 1909.05858, §4.1; as `transformers` has it, so
    that it is a penalty for negative logits, too.
    """
    is_there = _marked(texts, texts != NO_TOKEN, logits.shape[-1])
    return tf.where(is_there, tf.where(logits < 0, logits * penalty, logits / penalty), logits)


def no_repeated_ngrams(
    logits: tf.Tensor, texts: tf.Tensor, size: int, length: int | tf.Tensor
) -> tf.Tensor:
    """Return logits [r, V] by which no `size` tokens follow each other twice in a text.

    Reference: Paulus et al., 2017, arXiv 1705.04304, §2.5.

    Args:
        logits: float tensor [r, V].
        texts: int32 tensor [r, t]; the next token is to come at the column `length`.
        size: number n of tokens, at least 1.
        length: int scalar.
    """
    num_texts, num_columns = static_or_dynamic_shape(texts)
    padded = tf.pad(texts, [[0, 0], [size - 1, size - 1]], constant_values=NO_TOKEN)
    # Of the n-grams that begin in each column: whether the last n - 1 tokens begin it, too.
    begun = tf.ones([num_texts, num_columns], "bool")
    for place in range(size - 1):
        last = padded[:, length + place][:, None]
        own = padded[:, size - 1 + place : size - 1 + place + num_columns]
        begun &= (own == last) & (last != NO_TOKEN)
    next_tokens = padded[:, 2 * (size - 1) : 2 * (size - 1) + num_columns]
    repeated = _marked(next_tokens, begun & (next_tokens != NO_TOKEN), logits.shape[-1])
    return tf.where(repeated, NEVER, logits)


def top_k(logits: tf.Tensor, number: int) -> tf.Tensor:
    """Return logits [r, V] of the k largest only, and of those that equal the k-th."""
    if not 0 < number < logits.shape[-1]:
        return logits
    smallest = tf.math.top_k(logits, number).values[:, -1:]
    return tf.where(logits < smallest, NEVER, logits)


def top_p(logits: tf.Tensor, share: float) -> tf.Tensor:
    """Return logits [r, V] of the fewest tokens that together have a share of the probability.

    The most likely one is always among them. Reference: Holtzman et al., 2019, "The curious case
    of neural text degeneration", arXiv 1904.09751, §3.1.
    """
    if share >= 1:
        return logits
    falling = tf.sort(logits, axis=-1, direction="DESCENDING")
    before = tf.cumsum(tf.nn.softmax(falling), axis=-1, exclusive=True)
    number = tf.maximum(tf.math.count_nonzero(before < share, axis=-1, dtype="int32"), 1)
    smallest = tf.gather(falling, number - 1, batch_dims=1)
    return tf.where(logits < smallest[:, None], NEVER, logits)


def min_p(logits: tf.Tensor, share: float) -> tf.Tensor:
    """Return logits [r, V] of tokens at least as likely as a share of the most likely one.

    Reference: Nguyen et al., 2024, "Turning up the heat: min-p sampling", arXiv 2407.01082, §3.
    """
    if share == 0:
        return logits
    probabilities = tf.nn.softmax(logits)
    least = share * tf.reduce_max(probabilities, axis=-1, keepdims=True)
    return tf.where(probabilities < least, NEVER, logits)


def _marked(tokens, counts, vocab_size):
    """Return which ids are among the tokens [r, t] that count: bool [r, V]."""
    num_texts, num_columns = static_or_dynamic_shape(tokens)
    rows = tf.repeat(tf.range(num_texts), num_columns)
    columns = tf.reshape(tf.where(counts, tokens, vocab_size), [-1])
    at = tf.stack([rows, columns], axis=1)
    marked = tf.scatter_nd(at, tf.ones_like(rows), [num_texts, vocab_size + 1])
    return marked[:, :vocab_size] > 0
