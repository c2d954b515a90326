"""Which tokens come next: greedy search, sampling and beam search.

Each is a `parallel.decoding.Search`; their states are dicts of tensors.
"""

import tensorflow as tf

from dtransformer.parallel.largest import largest
from dtransformer.parallel.shapes import static_or_dynamic_shape

NEVER = -1e9  # the logit, or log-probability, of what is not chosen


def check_options(
    beam_size: int,
    length_penalty: float,
    max_length: int | None,
    temperature: float,
    top_k: int,
    seed: int = 0,
):
    """Check the options of `generate`; raise a ValueError that names the wrong one."""
    for name, value, least in (
        ("beam_size", beam_size, 1),
        ("max_length", 1 if max_length is None else max_length, 1),
        ("top_k", top_k, 0),
        ("seed", seed, -(2**31)),
    ):
        if type(value) is not int or not least <= value < 2**31:
            raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    for name, value in (("length_penalty", length_penalty), ("temperature", temperature)):
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    if beam_size > 1 and temperature > 0:
        raise ValueError(
            f"beam_size={beam_size} searches and temperature={temperature} samples: set beam_size=1 "
            "or temperature=0"
        )


def make_search(
    model,
    max_length: int | tf.Tensor,
    seed: tf.Tensor | None,
    beam_size: int,
    length_penalty: float,
    temperature: float,
    top_k: int,
):
    """Return the search that the options of `generate` ask for.

    Args:
        model: what has the numbers `vocab_size`, `pad_id` and `end_id`: a model, or else.
        max_length: most tokens of a result.
        seed: int tensor [2], for drawing.
        beam_size, length_penalty, temperature, top_k: the options.
    """
    if beam_size == 1:
        return Sampling(model, max_length, seed, temperature, top_k)
    return BeamSearch(model, max_length, beam_size, length_penalty)


class Sampling:
    """Choose one token after the other: the most likely one, or at random.

    Args:
        model: as of `make_search`.
        max_length: int scalar.
        seed: int tensor [2].
        temperature: 0 for the most likely token.
        top_k: draw from the k most likely tokens only; 0 for all.
    """

    num_beams = 1

    def __init__(
        self,
        model,
        max_length: int | tf.Tensor,
        seed: tf.Tensor | None,
        temperature: float = 0.0,
        top_k: int = 0,
    ):
        self.max_length = max_length
        self._model, self._seed = model, seed
        self._temperature, self._top_k = temperature, top_k

    def start(self, first: tf.Tensor) -> dict:
        """Return the state at first, a dict of tensors.

        Args:
            first: int32 tensor [b], the tokens that are known already.
        """
        (batch_size,) = static_or_dynamic_shape(first)
        return {
            "position": tf.constant(0),
            "last": first,
            "beams": tf.range(batch_size),
            "ids": tf.fill([batch_size, self.max_length], self._model.pad_id),
            "finished": tf.zeros([batch_size], "bool"),
        }

    def start_entries(self, batch_size: int | tf.Tensor, capacity: int | tf.Tensor) -> tuple:
        """Return what tells whose entries of the cache are whose: here there is one of each."""
        return ()

    def ended(self, state: dict) -> tf.Tensor:
        """Return which sentences want no other token, bool [b]."""
        finished = state["finished"]
        if self._temperature == 0:
            return finished
        # All draw until the last one ends: what one draws does not depend on who is left.
        return tf.fill(tf.shape(finished), tf.reduce_all(finished))

    def take(self, state: dict, sources: tf.Tensor) -> dict:
        """Return the state of some of the sources only, by their numbers, int32 [m]."""
        names = ("last", "ids", "finished")
        taken = {name: tf.gather(state[name], sources) for name in names}
        return {**state, **taken, "beams": tf.range(tf.size(sources))}

    def next_entries(self, entries: tuple, state: dict) -> tuple[tuple, None]:
        """As `BeamSearch.next_entries`."""
        return entries, None

    def update(self, state: dict, logits: tf.Tensor) -> dict:
        """Return the next state, from the logits [b, V] of the tokens after `state["last"]`."""
        position, finished = state["position"], state["finished"]
        tokens = tf.where(finished, self._model.pad_id, self._choose(logits, position))
        at = tf.range(self.max_length) == position
        return {
            "position": position + 1,
            "last": tokens,
            "beams": state["beams"],
            "ids": tf.where(at, tokens[:, None], state["ids"]),
            "finished": finished | (tokens == self._model.end_id),
        }

    def result(self, state: dict) -> tf.Tensor:
        """Return an int32 tensor [b, max_length], padded after the end tokens."""
        return state["ids"]

    def _choose(self, logits, position):
        if self._temperature == 0:
            return tf.argmax(logits, axis=-1, output_type="int32")
        logits /= self._temperature
        if 0 < self._top_k < self._model.vocab_size:
            smallest = tf.math.top_k(logits, self._top_k).values[:, -1:]
            logits = tf.where(logits < smallest, NEVER, logits)
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        draw = tf.random.stateless_uniform(
            tf.shape(logits), tf.bitwise.bitwise_xor(self._seed, [0, position]), minval=1e-20
        )
        return tf.argmax(logits - tf.math.log(-tf.math.log(draw)), axis=-1, output_type="int32")


def length_penalty_of(length: int | tf.Tensor, alpha: float) -> tf.Tensor:
    """Return ((5 + length) / 6)^α, which a hypothesis' log-probability is divided by."""
    return tf.pow((5.0 + tf.cast(length, "float32")) / 6.0, alpha)


class BeamSearch:
    """Keep the best hypotheses, one token longer at each step.

    Hypotheses are scored by their log-probability divided by a length penalty
    ((5 + length) / 6)^α (Wu et al., 2016, arXiv 1609.08144, §7). The search of a
    sentence ends when no living hypothesis can beat its worst finished one.

    Args:
        model: as of `make_search`.
        max_length: int scalar.
        beam_size: number k of hypotheses.
        alpha: exponent of the length penalty.
    """

    def __init__(self, model, max_length: int | tf.Tensor, beam_size: int, alpha: float = 0.6):
        self.max_length, self.num_beams = max_length, beam_size
        self._model, self._alpha = model, alpha
        self._num_candidates = min(2 * beam_size, beam_size * model.vocab_size)
        self._at_most = length_penalty_of(max_length, alpha)

    def start(self, first: tf.Tensor) -> dict:
        """Return the state at first, a dict of tensors; as `Sampling.start`."""
        k, model = self.num_beams, self._model
        (batch_size,) = static_or_dynamic_shape(first)
        empty = tf.fill([batch_size, k, self.max_length], model.pad_id)
        return {
            "position": tf.constant(0),
            "last": tf.repeat(first, k),
            "beams": tf.range(batch_size * k),  # rows that the hypotheses continue
            "alive": empty,
            # At first all beams are the same: let only one of them live.
            "alive_log_p": tf.tile([[0.0] + [NEVER] * (k - 1)], [batch_size, 1]),
            "ended": empty,
            "ended_score": tf.fill([batch_size, k], NEVER),
        }

    def start_entries(self, batch_size: int | tf.Tensor, capacity: int | tf.Tensor) -> tf.Tensor:
        """Return which hypothesis made each position of each: int32 [b, k, capacity]."""
        return tf.zeros([batch_size, self.num_beams, capacity], "int32")

    def ended(self, state: dict) -> tf.Tensor:
        """Return which sentences want no other token, bool [b]."""
        # Log-probabilities only fall, and no penalty divides by more than the longest's.
        best = state["alive_log_p"][:, 0] / self._at_most
        return tf.reduce_min(state["ended_score"], 1) >= best

    def take(self, state: dict, sources: tf.Tensor) -> dict:
        """Return the state of some of the sources only, by their numbers, int32 [m]."""
        k = self.num_beams
        names = ("alive", "alive_log_p", "ended", "ended_score")
        taken = {name: tf.gather(state[name], sources) for name in names}
        last = tf.gather(tf.reshape(state["last"], [-1, k]), sources)
        beams = tf.gather(tf.reshape(state["beams"], [-1, k]), sources) % k
        taken["last"] = tf.reshape(last, [-1])
        taken["beams"] = tf.reshape(tf.range(tf.size(sources))[:, None] * k + beams, [-1])
        return {**state, **taken}

    def next_entries(self, entries: tf.Tensor, state: dict) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the entries of the hypotheses that live on, and what these attend to.

        Args:
            entries: int32 tensor [b, k, capacity], from `start_entries` or the step before.
            state: the search's.

        Returns:
            The entries, and a mask, bool [b, k, capacity·k].
        """
        k, shape = self.num_beams, static_or_dynamic_shape(entries)
        entries = tf.reshape(tf.gather(tf.reshape(entries, [-1, shape[2]]), state["beams"]), shape)
        own = tf.range(k)
        is_new = tf.range(shape[2]) == state["position"]
        entries = tf.where(is_new, own[:, None], entries)
        return entries, tf.reshape(entries[..., None] == own, [*shape[:2], shape[2] * k])

    def update(self, state: dict, logits: tf.Tensor) -> dict:
        """Return the next state, from the logits [b·k, V] of the tokens after `state["last"]`."""
        position, k, vocab_size = state["position"], self.num_beams, self._model.vocab_size
        batch_size = static_or_dynamic_shape(state["alive"])[0]
        # Twice as many as beams: at most half of them end here.
        log_p, tokens = largest(tf.nn.log_softmax(logits), min(2 * k, vocab_size))
        log_p = tf.reshape(log_p, [batch_size, k, -1]) + state["alive_log_p"][:, :, None]
        num_each = tokens.shape[1]
        log_p, index = tf.math.top_k(tf.reshape(log_p, [batch_size, -1]), self._num_candidates)
        beams = index // num_each
        tokens = tf.gather(tf.reshape(tokens, [batch_size, -1]), index, batch_dims=1)
        ids = tf.gather(state["alive"], beams, batch_dims=1)
        ids = tf.where(tf.range(self.max_length) == position, tokens[:, :, None], ids)
        ends = tokens == self._model.end_id

        exists = log_p > NEVER / 2  # not of a beam that stands for nothing
        score = log_p / length_penalty_of(position + 1, self._alpha)
        score = tf.where(ends & exists, score, NEVER)
        ended_score, best = tf.math.top_k(tf.concat([state["ended_score"], score], 1), k)
        ended = tf.gather(tf.concat([state["ended"], ids], 1), best, batch_dims=1)

        alive_log_p, best = tf.math.top_k(tf.where(ends, NEVER, log_p), k)
        beams, tokens = (tf.gather(x, best, batch_dims=1) for x in (beams, tokens))
        return {
            "position": position + 1,
            "last": tf.reshape(tokens, [-1]),
            "beams": tf.reshape(tf.range(batch_size)[:, None] * k + beams, [-1]),
            "alive": tf.gather(ids, best, batch_dims=1),
            "alive_log_p": alive_log_p,
            "ended": ended,
            "ended_score": ended_score,
        }

    def hypotheses(self, state: dict) -> tuple[tf.Tensor, tf.Tensor]:
        """Return all hypotheses, best first.

        Returns:
            ids, an int32 tensor [b, k, max_length], padded after the end tokens; and their
            scores, float32 [b, k]. A hypothesis that has not ended within max_length is in
            it where fewer than k have ended.
        """
        batch_size, k = static_or_dynamic_shape(state["alive"])[0], self.num_beams
        # Those cut off at max_length, best first, come after those that have ended.
        cut_off = tf.tile([[NEVER / 2] * k], [batch_size, 1])
        _, best = tf.math.top_k(tf.concat([state["ended_score"], cut_off], 1), k)
        score = tf.concat([state["ended_score"], state["alive_log_p"] / self._at_most], 1)
        ids = tf.concat([state["ended"], state["alive"]], 1)
        return tf.gather(ids, best, batch_dims=1), tf.gather(score, best, batch_dims=1)

    def result(self, state: dict) -> tf.Tensor:
        """Return the best hypotheses, an int32 tensor [b, max_length]."""
        return self.hypotheses(state)[0][:, 0]
