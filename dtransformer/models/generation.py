"""Generating sequences with a decoder's cache: greedy, sampled, by beam search.

The model gives `encode`, `init_cache` and `decode_step`; a search says which tokens come
next. Where all is on one device or on one mesh, both are compiled into one function. In a
pipeline the last stage searches, and tells the others what it chose.
"""

import numpy as np
import tensorflow as tf

from dtransformer.parallel import job
from dtransformer.parallel.axis_rules import override_rules
from dtransformer.parallel.dtensor.batch import local_value, put_replicated
from dtransformer.parallel.dtensor.function import MeshFunction
from dtransformer.parallel.dtensor.layouts import relayout
from dtransformer.parallel.pipeline.forward_pass import ForwardPass, from_last
from dtransformer.parallel.shapes import static_or_dynamic_shape
from dtransformer.parallel.zero.gather import unsharding

_NEVER = -1e9


def check_options(beam_size, length_penalty, max_length, temperature, top_k, seed=0):
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


def compiled(model, options):
    """Return a function of source [b, s], max_length and seed: ids, int32 [b, max_length].

    Args:
        model: a `TranslationTransformer`, built.
        options: beam_size, length_penalty, temperature and top_k; see
            `TranslationTransformer.generate`.
    """
    if job.stage()[1] > 1:
        return _in_stages(model, options)
    if job.mesh() is not None:
        return _compiled_on_mesh(model, options)

    # One compiled function for all batch sizes and lengths.
    def run(source, max_length, seed):
        with unsharding("generate", keeps=True) as weights:
            weights.fetch(model.variables)
            return search(model, source, make_search(model, max_length, seed, *options))

    function = tf.function(run).get_concrete_function(
        tf.TensorSpec([None, None], "int32"),
        tf.TensorSpec([], "int32"),
        tf.TensorSpec([2], "int32"),
    )
    return lambda source, max_length, seed: function(
        source, tf.constant(max_length), tf.constant([seed, 0])
    )


def _compiled_on_mesh(model, options):
    """A mesh knows static shapes only: a function for each; and all rows on every device."""
    functions = {}

    def run(source, max_length, seed):
        def on_mesh(source, seed):
            with override_rules({"batch": None}):
                ids = search(model, source, make_search(model, max_length, seed, *options))
            return relayout(ids, (None, None))

        if max_length not in functions:
            functions[max_length] = MeshFunction(on_mesh, model.variables)
        return local_value(
            functions[max_length](
                put_replicated(source), put_replicated(np.array([seed, 0], "int32"))
            )
        )

    return run


def _in_stages(model, options):
    """Every token goes through all stages; the loop is Python."""
    passes = {}  # shape of the source, max_length -> _TokenPass

    def run(source, max_length, seed):
        key = tuple(source.shape), max_length
        if key not in passes:
            passes[key] = _TokenPass(model, *key, options)
        return passes[key](source, seed)

    return run


class _TokenPass:
    """Generation in a pipeline, for sources of one shape."""

    def __init__(self, model, source_shape, max_length, options):
        self._model, self._shape, self._max_length = model, source_shape, max_length
        self._options = options
        self._start = ForwardPass(model, self._encode, "encode")
        self._step = ForwardPass(model, self._decode, "decode")
        self._update = tf.function(self._choose, autograph=False)
        self._devices = self._start.devices

    def _search(self, seed=None):
        return make_search(self._model, self._max_length, seed, *self._options)

    def _encode(self, source, _):
        source = self._devices.numbers(source, self._shape)
        memory, _ = self._model.encode(source)
        memory = self._search().for_beams(memory)
        return [], self._model.init_cache(memory, self._max_length)

    def _decode(self, inputs, cache):
        search, numbers = self._search(), self._devices.numbers
        rows = [self._shape[0] * search.num_beams]
        last, beams = numbers(inputs["last"], rows), numbers(inputs["beams"], rows)
        position = numbers(inputs["position"], [])
        source = numbers(inputs["source"], self._shape)
        mask = search.for_beams(source != self._model.pad_id)
        if cache is None:  # what passes between the stages is found out: it is no cache
            cache = self._model.empty_cache()
        return _next_logits(self._model, last, position, search.pick(cache, beams), mask)

    def _choose(self, state, logits, seed):
        return self._search(seed).update(state, logits)

    def __call__(self, source, seed):
        with override_rules({"batch": None}):
            return self._run(source, tf.constant([seed, 0]))

    def _run(self, source, seed):
        put = self._devices.put_numbers
        search = self._search(seed)
        state, source = search.start(self._shape[0]), put(source)
        _, caches = self._start(source)
        goes_on = True
        while goes_on:
            inputs = {"source": source, "last": put(state["last"]), "beams": put(state["beams"])}
            inputs["position"] = put(state["position"])
            logits, caches = self._step(inputs, caches)
            if self._start.is_last:
                state = self._update(state, logits, seed)
            numbers = [state["position"], tf.cast(search.goes_on(state), "int32")]
            told = from_last(tf.concat([state["last"], state["beams"], numbers], 0), "choice")
            state["last"], state["beams"] = tf.split(told[:-2], 2)
            state["position"], goes_on = told[-2], bool(told[-1])
        return from_last(search.result(state), "ids")


def _next_logits(model, tokens, position, cache, memory_mask):
    """The logits of the next token, which is never padding nor a start token."""
    logits, cache = model.decode_step(tokens, position, cache, memory_mask)
    entries = tf.range(model.vocab_size)
    return tf.where((entries == model.pad_id) | (entries == model.start_id), _NEVER, logits), cache


def search(model, source, by):
    """Generate, with TensorFlow's operations.

    Args:
        model: a `TranslationTransformer`.
        source: int tensor [b, s].
        by: a `Sampling` or a `BeamSearch`.

    Returns:
        What its `result` is.
    """
    memory, memory_mask = (by.for_beams(x) for x in model.encode(source))
    cache = model.init_cache(memory, by.max_length)

    def step(state, cache):
        cache = by.pick(cache, state["beams"])
        logits, cache = _next_logits(model, state["last"], state["position"], cache, memory_mask)
        return by.update(state, logits), cache

    state = by.start(static_or_dynamic_shape(source)[0])
    state, _ = tf.while_loop(lambda state, _: by.goes_on(state), step, (state, cache))
    return by.result(state)


def make_search(model, max_length, seed, beam_size, length_penalty, temperature, top_k):
    """Return the search that options of `TranslationTransformer.generate` ask for."""
    if beam_size == 1:
        return Sampling(model, max_length, seed, temperature, top_k)
    return BeamSearch(model, max_length, beam_size, length_penalty)


class Sampling:
    """Choose one token after the other: the most likely one, or at random.

    Args:
        model: a `TranslationTransformer`.
        max_length: int scalar.
        seed: int tensor [2].
        temperature: 0 for the most likely token.
        top_k: draw from the k most likely tokens only; 0 for all.
    """

    num_beams = 1

    def __init__(self, model, max_length, seed, temperature=0.0, top_k=0):
        self.max_length = max_length
        self._model, self._seed = model, seed
        self._temperature, self._top_k = temperature, top_k

    def start(self, batch_size):
        """Return the state at first, a dict of tensors.

        Args:
            batch_size: number b of sentences.
        """
        return {
            "position": tf.constant(0),
            "last": tf.fill([batch_size], self._model.start_id),
            "beams": tf.range(batch_size),
            "ids": tf.fill([batch_size, self.max_length], self._model.pad_id),
            "finished": tf.zeros([batch_size], "bool"),
        }

    def for_beams(self, x):
        """Return the rows of a tensor, each as often as there are hypotheses of a sentence."""
        return x

    def goes_on(self, state):
        """Return whether another token is wanted, a bool scalar."""
        return (state["position"] < self.max_length) & ~tf.reduce_all(state["finished"])

    def pick(self, cache, beams):
        """Return the cache of the hypotheses that live on."""
        return cache

    def update(self, state, logits):
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

    def result(self, state):
        """Return an int32 tensor [b, max_length], padded after the end tokens."""
        return state["ids"]

    def _choose(self, logits, position):
        if self._temperature == 0:
            return tf.argmax(logits, axis=-1, output_type="int32")
        logits /= self._temperature
        if 0 < self._top_k < self._model.vocab_size:
            smallest = tf.math.top_k(logits, self._top_k).values[:, -1:]
            logits = tf.where(logits < smallest, _NEVER, logits)
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        draw = tf.random.stateless_uniform(
            tf.shape(logits), tf.bitwise.bitwise_xor(self._seed, [0, position]), minval=1e-20
        )
        return tf.argmax(logits - tf.math.log(-tf.math.log(draw)), axis=-1, output_type="int32")


def length_penalty_of(length, alpha):
    """Return ((5 + length) / 6)^α, which a hypothesis' log-probability is divided by."""
    return tf.pow((5.0 + tf.cast(length, "float32")) / 6.0, alpha)


class BeamSearch:
    """Keep the best hypotheses, one token longer at each step.

    Hypotheses are scored by their log-probability divided by a length penalty
    ((5 + length) / 6)^α (Wu et al., 2016, arXiv 1609.08144, §7). The search of a
    sentence ends when no living hypothesis can beat its worst finished one.

    Args:
        model: a `TranslationTransformer`.
        max_length: int scalar.
        beam_size: number k of hypotheses.
        alpha: exponent of the length penalty.
    """

    def __init__(self, model, max_length, beam_size, alpha=0.6):
        self.max_length, self.num_beams = max_length, beam_size
        self._model, self._alpha = model, alpha
        self._num_candidates = min(2 * beam_size, beam_size * model.vocab_size)
        self._at_most = length_penalty_of(max_length, alpha)

    def start(self, batch_size):
        """Return the state at first, a dict of tensors; as `Sampling.start`."""
        k, model = self.num_beams, self._model
        empty = tf.fill([batch_size, k, self.max_length], model.pad_id)
        return {
            "position": tf.constant(0),
            "last": tf.fill([batch_size * k], model.start_id),
            "beams": tf.range(batch_size * k),  # rows that the hypotheses continue
            "alive": empty,
            # At first all beams are the same: let only one of them live.
            "alive_log_p": tf.tile([[0.0] + [_NEVER] * (k - 1)], [batch_size, 1]),
            "ended": empty,
            "ended_score": tf.fill([batch_size, k], _NEVER),
        }

    def for_beams(self, x):
        """Return the rows of a tensor, each as often as there are hypotheses of a sentence."""
        return tf.repeat(x, self.num_beams, 0)

    def goes_on(self, state):
        """Return whether another token is wanted, a bool scalar."""
        # Log-probabilities only fall, and no penalty divides by more than the longest's.
        best = state["alive_log_p"][:, 0] / self._at_most
        hopeless = tf.reduce_min(state["ended_score"], 1) >= best
        return (state["position"] < self.max_length) & ~tf.reduce_all(hopeless)

    def pick(self, cache, beams):
        """Return the cache of the hypotheses that live on."""
        take = lambda name, x: tf.gather(x, beams) if name in ("key", "value") else x
        return [  # the memory's keys are the same for every beam
            {**block, "self": {name: take(name, x) for name, x in block["self"].items()}}
            if block
            else block
            for block in cache
        ]

    def update(self, state, logits):
        """Return the next state, from the logits [b·k, V] of the tokens after `state["last"]`."""
        position, k, vocab_size = state["position"], self.num_beams, self._model.vocab_size
        batch_size = static_or_dynamic_shape(state["alive"])[0]
        log_p = tf.reshape(tf.nn.log_softmax(logits), [batch_size, k, vocab_size])
        log_p = tf.reshape(log_p + state["alive_log_p"][:, :, None], [batch_size, -1])
        # Twice as many as beams: at most half of them end here.
        log_p, index = tf.math.top_k(log_p, self._num_candidates)
        beams, tokens = index // vocab_size, index % vocab_size
        ids = tf.gather(state["alive"], beams, batch_dims=1)
        ids = tf.where(tf.range(self.max_length) == position, tokens[:, :, None], ids)
        ends = tokens == self._model.end_id

        exists = log_p > _NEVER / 2  # not of a beam that stands for nothing
        score = log_p / length_penalty_of(position + 1, self._alpha)
        score = tf.where(ends & exists, score, _NEVER)
        ended_score, best = tf.math.top_k(tf.concat([state["ended_score"], score], 1), k)
        ended = tf.gather(tf.concat([state["ended"], ids], 1), best, batch_dims=1)

        alive_log_p, best = tf.math.top_k(tf.where(ends, _NEVER, log_p), k)
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

    def hypotheses(self, state):
        """Return all hypotheses, best first.

        Returns:
            ids, an int32 tensor [b, k, max_length], padded after the end tokens; and their
            scores, float32 [b, k]. A hypothesis that has not ended within max_length is in
            it where fewer than k have ended.
        """
        batch_size, k = static_or_dynamic_shape(state["alive"])[0], self.num_beams
        # Those cut off at max_length, best first, come after those that have ended.
        cut_off = tf.tile([[_NEVER / 2] * k], [batch_size, 1])
        _, best = tf.math.top_k(tf.concat([state["ended_score"], cut_off], 1), k)
        score = tf.concat([state["ended_score"], state["alive_log_p"] / self._at_most], 1)
        ids = tf.concat([state["ended"], state["alive"]], 1)
        return tf.gather(ids, best, batch_dims=1), tf.gather(score, best, batch_dims=1)

    def result(self, state):
        """Return the best hypotheses, an int32 tensor [b, max_length]."""
        return self.hypotheses(state)[0][:, 0]
