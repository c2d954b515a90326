"""Beam search over next tokens."""

import tensorflow as tf

from dtransformer.models.generation import logits_rules
from dtransformer.models.generation.logits_rules import NEVER, is_any
from dtransformer.models.generation.options import GenerationOptions
from dtransformer.models.generation.search import SpecialIds
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def compute_length_penalty(length: int | tf.Tensor, alpha: float) -> tf.Tensor:
    """Return ((5 + length) / 6)^α, the divisor of a hypothesis' log-probability."""
    return tf.pow((5.0 + tf.cast(length, "float32")) / 6.0, alpha)


class BeamSearch:
    """Search that extends the k best hypotheses of each text by one token per step.

    A hypothesis' score is its log-probability divided by a length penalty
    ((5 + length) / 6)^α (Wu et al., 2016, arXiv 1609.08144, §7). A hypothesis finishes if an
    end token puts it among the k best of its text, or at `max_length`. The search of a text
    ends when no unfinished hypothesis can beat its worst finished one, or, with
    `early_stopping`, as soon as k hypotheses have finished.

    Args:
        ids: `SpecialIds` of the vocabulary.
        max_length: Integer or int scalar. Maximum number of tokens per result.
        options: `GenerationOptions`. `beam_size` is the number k of hypotheses.
    """

    def __init__(self, ids: SpecialIds, max_length: int | tf.Tensor, options: GenerationOptions):
        k = options.beam_size
        self.max_length = max_length
        self.num_beams = k
        self.num_results = options.num_return_sequences
        self._ids = ids
        self._options = options
        self._alpha = options.length_penalty
        # With this number, k unfinished hypotheses remain even if all end tokens are candidates.
        num_candidates = (1 + max(1, len(ids.end_ids))) * k
        self._num_candidates_each = min(num_candidates, ids.vocab_size)
        self._num_candidates = min(num_candidates, k * ids.vocab_size)
        self._max_penalty = compute_length_penalty(max_length, self._alpha)

    def start(self, texts: tf.Tensor) -> dict:
        """Return the initial state; see `Sampling.start`."""
        k = self.num_beams
        batch_size = static_or_dynamic_shape(texts)[0]
        empty = tf.fill([batch_size, k, self.max_length], self._ids.pad_id)
        return {
            "position": tf.constant(0),
            "last": tf.repeat(texts[:, -1], k),
            "beams": tf.range(batch_size * k),  # Cache rows that the hypotheses continue.
            "alive": empty,
            # All beams are equal at first: only the first one may produce candidates.
            "alive_log_p": tf.tile([[0.0] + [NEVER] * (k - 1)], [batch_size, 1]),
            "ended": empty,
            "ended_score": tf.fill([batch_size, k], NEVER),
            **({"texts": texts} if self._options.needs_history else {}),
        }

    def start_entries(self, batch_size: int | tf.Tensor, capacity: int | tf.Tensor) -> tf.Tensor:
        """Return the hypothesis that wrote each cache position: int32 [b, k, capacity], zeros."""
        return tf.zeros([batch_size, self.num_beams, capacity], "int32")

    def ended(self, state: dict) -> tf.Tensor:
        """Return a bool tensor [b], True for texts whose search has ended."""
        # Log-probabilities only fall, and no later penalty exceeds the one at `max_length`.
        best = state["alive_log_p"][:, 0] / self._max_penalty
        worst = tf.reduce_min(state["ended_score"], 1)
        ended = worst >= best
        return ended | (worst > NEVER / 2) if self._options.early_stopping else ended

    def next_entries(self, entries: tf.Tensor, state: dict) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the cache entries of the current hypotheses, and the mask to attend to them.

        Args:
            entries: Int32 tensor [b, k, capacity] from `start_entries` or the previous step: the
                hypothesis that wrote each position.
            state: State of the search.

        Returns:
            An `(entries, mask)` tuple: the new entries, and a bool mask [b, k, capacity·k].
        """
        k = self.num_beams
        shape = static_or_dynamic_shape(entries)
        entries = tf.reshape(tf.gather(tf.reshape(entries, [-1, shape[2]]), state["beams"]), shape)
        hypotheses = tf.range(k)
        is_new = tf.range(shape[2]) == state["position"]
        entries = tf.where(is_new, hypotheses[:, None], entries)
        return entries, tf.reshape(entries[..., None] == hypotheses, [*shape[:2], shape[2] * k])

    def update(self, state: dict, logits: tf.Tensor) -> dict:
        """Return the next state.

        Args:
            state: State from `start` or the previous `update`.
            logits: Float tensor [b·k, V] of the tokens that follow `state["last"]`.
        """
        position = state["position"]
        k = self.num_beams
        batch_size = static_or_dynamic_shape(state["alive"])[0]
        log_p, tokens = tf.math.top_k(self._log_p(state, logits), self._num_candidates_each)
        log_p = tf.reshape(log_p, [batch_size, k, -1]) + state["alive_log_p"][:, :, None]
        num_each = tokens.shape[1]
        log_p, index = tf.math.top_k(tf.reshape(log_p, [batch_size, -1]), self._num_candidates)
        beams = index // num_each
        tokens = tf.gather(tf.reshape(tokens, [batch_size, -1]), index, batch_dims=1)
        ids = tf.gather(state["alive"], beams, batch_dims=1)
        ids = tf.where(tf.range(self.max_length) == position, tokens[:, :, None], ids)
        ends = is_any(tokens, self._ids.end_ids) | (position + 1 == self.max_length)

        exists = log_p > NEVER / 2  # excludes candidates of placeholder beams
        score = log_p / compute_length_penalty(position + 1, self._alpha)
        counts = ends & exists & (tf.range(self._num_candidates) < k)
        # The loop continues for other texts: finished texts must not change.
        if self._options.early_stopping:
            counts &= ~self.ended(state)[:, None]
        score = tf.where(counts, score, NEVER)
        ended_score, best = tf.math.top_k(tf.concat([state["ended_score"], score], 1), k)
        ended = tf.gather(tf.concat([state["ended"], ids], 1), best, batch_dims=1)

        alive_log_p, best = tf.math.top_k(tf.where(ends, NEVER, log_p), k)
        beams, tokens = (tf.gather(x, best, batch_dims=1) for x in (beams, tokens))
        return {
            **state,
            "position": position + 1,
            "last": tf.reshape(tokens, [-1]),
            "beams": tf.reshape(tf.range(batch_size)[:, None] * k + beams, [-1]),
            "alive": tf.gather(ids, best, batch_dims=1),
            "alive_log_p": alive_log_p,
            "ended": ended,
            "ended_score": ended_score,
        }

    def result(self, state: dict) -> tf.Tensor:
        """Return the best hypotheses in order of their score: int32 [b, num_results, max_length]."""
        return state["ended"][:, : self.num_results]

    def _log_p(self, state, logits):
        """Return log-probabilities [b·k, V] of the next tokens after all generation rules.

        `SpecialIds.never` is excluded before normalization, the other rules apply after it.
        """
        k = self.num_beams
        texts = state.get("texts")
        texts = None if texts is None else tf.repeat(texts, k, axis=0)
        results = tf.reshape(state["alive"], [-1, self.max_length])
        logits = logits_rules.without_ids(logits, self._ids.never)
        log_p = tf.nn.log_softmax(logits)
        position = state["position"]
        options = self._options
        log_p = logits_rules.apply_history_rules(log_p, options, texts, results, position)
        return logits_rules.apply_position_rules(
            log_p, options, self._ids.end_ids, position, self.max_length
        )
