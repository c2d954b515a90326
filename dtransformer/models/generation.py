"""Generating sequences with a decoder's cache: greedy, sampled, by beam search.

The model gives `encode`, `init_cache` and `decode_step`; everything here is
TensorFlow operations, to be compiled into one `tf.function`.
"""

import numpy as np
import tensorflow as tf

from dtransformer.parallel import gathered, layout
from dtransformer.parallel.computation import MeshFunction, put_whole, whole
from dtransformer.parallel.products import static_or_dynamic_shape

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


def generate(model, source, max_length, seed, beam_size, length_penalty, temperature, top_k):
    """Translate a batch; see `TranslationTransformer.generate`.

    Returns:
        An int32 tensor [b, max_length], padded after the end tokens.
    """
    if beam_size == 1:
        return sample(model, source, max_length, seed, temperature, top_k)
    ids, _ = beam_search(model, source, max_length, beam_size, length_penalty)
    return ids[:, 0]


def compiled(model, options):
    """Return a compiled function of source [b, s], max_length and seed, as `generate`.

    Args:
        model: a `TranslationTransformer`, built.
        options: beam_size, length_penalty, temperature and top_k.
    """
    if layout.get_mesh() is not None:
        return _compiled_on_mesh(model, options)

    # One compiled function for all batch sizes and lengths.
    def run(source, max_length, seed):
        with gathered.reading("generate", keeps=True) as weights:
            weights.fetch(model.variables)
            return generate(model, source, max_length, seed, *options)

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
            with layout.override_rules({"batch": None}):
                ids = generate(model, source, max_length, seed, *options)
            return layout.pin(ids, (None, None))

        if max_length not in functions:
            functions[max_length] = MeshFunction(on_mesh, model.variables)
        return whole(
            functions[max_length](put_whole(source), put_whole(np.array([seed, 0], "int32")))
        )

    return run


def _next_logits(model, tokens, position, cache, memory_mask):
    """The logits of the next token, which is never padding nor a start token."""
    logits, cache = model.decode_step(tokens, position, cache, memory_mask)
    entries = tf.range(model.vocab_size)
    return tf.where((entries == model.pad_id) | (entries == model.start_id), _NEVER, logits), cache


def sample(model, source, max_length, seed, temperature=0.0, top_k=0):
    """Choose one token after the other: the most likely one, or at random.

    Args:
        model: a `TranslationTransformer`.
        source: int tensor [b, s].
        max_length: int scalar.
        seed: int tensor [2].
        temperature: 0 for the most likely token.
        top_k: draw from the k most likely tokens only; 0 for all.

    Returns:
        An int32 tensor [b, max_length], padded after the end tokens.
    """
    batch_size = static_or_dynamic_shape(source)[0]
    memory, memory_mask = model.encode(source)
    cache = model.init_cache(memory, max_length)

    def choose(logits, position):
        if temperature == 0:
            return tf.argmax(logits, axis=-1, output_type="int32")
        logits /= temperature
        if 0 < top_k < model.vocab_size:
            smallest = tf.math.top_k(logits, top_k).values[:, -1:]
            logits = tf.where(logits < smallest, _NEVER, logits)
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        draw = tf.random.stateless_uniform(
            tf.shape(logits), tf.bitwise.bitwise_xor(seed, [0, position]), minval=1e-20
        )
        return tf.argmax(logits - tf.math.log(-tf.math.log(draw)), axis=-1, output_type="int32")

    def unfinished(position, ids, tokens, finished, cache):
        return (position < max_length) & ~tf.reduce_all(finished)

    def step(position, ids, tokens, finished, cache):
        logits, cache = _next_logits(model, tokens, position, cache, memory_mask)
        tokens = tf.where(finished, model.pad_id, choose(logits, position))
        ids = tf.where(tf.range(max_length) == position, tokens[:, None], ids)
        return position + 1, ids, tokens, finished | (tokens == model.end_id), cache

    ids = tf.fill([batch_size, max_length], model.pad_id)
    start, finished = tf.fill([batch_size], model.start_id), tf.zeros([batch_size], "bool")
    return tf.while_loop(unfinished, step, (0, ids, start, finished, cache))[1]


def length_penalty_of(length, alpha):
    """Return ((5 + length) / 6)^α, which a hypothesis' log-probability is divided by."""
    return tf.pow((5.0 + tf.cast(length, "float32")) / 6.0, alpha)


def beam_search(model, source, max_length, beam_size, alpha=0.6):
    """Keep the best hypotheses, one token longer at each step.

    Hypotheses are scored by their log-probability divided by a length penalty
    ((5 + length) / 6)^α (Wu et al., 2016, arXiv 1609.08144, §7). The search of a
    sentence ends when no living hypothesis can beat its worst finished one.

    Args:
        model: a `TranslationTransformer`.
        source: int tensor [b, s].
        max_length: int scalar.
        beam_size: number k of hypotheses.
        alpha: exponent of the length penalty.

    Returns:
        ids, an int32 tensor [b, k, max_length] of the hypotheses, best first, padded
        after the end tokens; and their scores, float32 [b, k]. A hypothesis that has
        not ended within max_length is in it where fewer than k have ended.
    """
    batch_size, vocab_size = static_or_dynamic_shape(source)[0], model.vocab_size
    num_candidates = min(2 * beam_size, beam_size * vocab_size)
    memory, memory_mask = model.encode(source)
    memory, memory_mask = tf.repeat(memory, beam_size, 0), tf.repeat(memory_mask, beam_size, 0)
    cache = model.init_cache(memory, max_length)
    rows = tf.range(batch_size)[:, None] * beam_size
    at_most = length_penalty_of(max_length, alpha)

    def pick(x, beams):
        """Take hypotheses out of a tensor [b·k, ...]."""
        return tf.gather(x, tf.reshape(rows + beams, [-1]))

    def searching(position, last, alive, alive_log_p, ended, ended_score, cache):
        # Log-probabilities only fall, and no penalty divides by more than the longest's.
        hopeless = tf.reduce_min(ended_score, 1) >= alive_log_p[:, 0] / at_most
        return (position < max_length) & ~tf.reduce_all(hopeless)

    def step(position, last, alive, alive_log_p, ended, ended_score, cache):
        logits, cache = _next_logits(model, tf.reshape(last, [-1]), position, cache, memory_mask)
        log_p = tf.reshape(tf.nn.log_softmax(logits), [batch_size, beam_size, vocab_size])
        log_p = tf.reshape(log_p + alive_log_p[:, :, None], [batch_size, -1])
        # Twice as many as beams: at most half of them end here.
        log_p, index = tf.math.top_k(log_p, num_candidates)
        beams, tokens = index // vocab_size, index % vocab_size
        ids = tf.gather(alive, beams, batch_dims=1)
        ids = tf.where(tf.range(max_length) == position, tokens[:, :, None], ids)
        ends = tokens == model.end_id

        exists = log_p > _NEVER / 2  # not of a beam that stands for nothing
        score = tf.where(ends & exists, log_p / length_penalty_of(position + 1, alpha), _NEVER)
        ended_score, best = tf.math.top_k(tf.concat([ended_score, score], 1), beam_size)
        ended = tf.gather(tf.concat([ended, ids], 1), best, batch_dims=1)

        alive_log_p, best = tf.math.top_k(tf.where(ends, _NEVER, log_p), beam_size)
        alive = tf.gather(ids, best, batch_dims=1)
        beams, last = (tf.gather(x, best, batch_dims=1) for x in (beams, tokens))
        for block in cache:  # the memory's keys are the same for every beam
            for part in ("key", "value"):
                block["self"][part] = pick(block["self"][part], beams)
        return position + 1, last, alive, alive_log_p, ended, ended_score, cache

    empty = tf.fill([batch_size, beam_size, max_length], model.pad_id)
    # At first all beams are the same: let only one of them live.
    alive_log_p = tf.tile([[0.0] + [_NEVER] * (beam_size - 1)], [batch_size, 1])
    ended_score = tf.fill([batch_size, beam_size], _NEVER)
    last = tf.fill([batch_size, beam_size], model.start_id)
    state = (0, last, empty, alive_log_p, empty, ended_score, cache)
    _, _, alive, alive_log_p, ended, ended_score, _ = tf.while_loop(searching, step, state)

    # Those cut off at max_length, best first, come after those that have ended.
    cut_off = tf.tile([[_NEVER / 2] * beam_size], [batch_size, 1])
    _, best = tf.math.top_k(tf.concat([ended_score, cut_off], 1), beam_size)
    score = tf.concat([ended_score, alive_log_p / at_most], 1)
    ids = tf.concat([ended, alive], 1)
    return tf.gather(ids, best, batch_dims=1), tf.gather(score, best, batch_dims=1)
