"""Greedy search, beam search and sampling match full forward passes without a cache."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.models import TextGenerator, TranslationTransformer
from dtransformer.models.generation.beam_search import BeamSearch
from dtransformer.models.generation.continuation import Generation
from dtransformer.models.generation.options import GenerationOptions
from dtransformer.models.generation.search import SpecialIds
from dtransformer.parallel.decoding.loops import decode
from tests.layers.reference_compare import dtype_policy
from tests.tolerances import BLOCKS

PAD, START, END = 0, 2, 3
IDS = tf.TensorSpec([None, None], "int32")


def make_model(vocab_size=23, **options):
    sizes = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1}
    model = TranslationTransformer(vocab_size, **{**sizes, "head_bias": True, **options})
    model.build()
    return model


def randomize(model, seed=0, end_bias=3.0):
    """Set random weights so that translations differ between sources and in length.

    Args:
        end_bias: Float. Added to the logit of the end token.
    """
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        spread = 0.06 if len(variable.shape) == 1 else 0.6
        variable.assign(rng.normal(0, spread, variable.shape) + ("gamma" in variable.path))
    model.head.bias.assign_add(end_bias * np.eye(model.vocab_size)[END])
    return model


def sources(model, batch=6, length=7):
    """Return padded sentences of different lengths."""
    ids = np.random.default_rng(0).integers(4, model.vocab_size, (batch, length), "int32")
    for row in range(batch):
        ids[row, max(length - row, 2) :] = PAD
    return ids


_forward_functions = {}


def log_probabilities(model, source, prefixes):
    """Return log-probabilities of the next token after prefixes of equal length.

    A full forward pass computes them. Padding and start tokens have probability 0.

    Args:
        source: Int array [b, s], or [s] to use the same sentence with all prefixes.
        prefixes: List of b lists of t tokens.

    Returns:
        Float64 array [b, V].
    """
    if model not in _forward_functions:
        spec = [{"source": IDS, "target": IDS}]
        _forward_functions[model] = tf.function(model, input_signature=spec, autograph=False)
    target = np.array([[START, *prefix] for prefix in prefixes], "int32")
    source = np.broadcast_to(source, (len(target), np.shape(source)[-1]))
    logits = _forward_functions[model]({"source": source, "target": target})
    logits = tf.cast(logits[:, -1, : model.vocab_size], "float64").numpy()
    logits[:, [PAD, START]] = -np.inf
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def greedy(model, source, max_length):
    """Return the most likely tokens of each sentence, computed by full forward passes."""
    ids = np.zeros((len(source), 0), "int32")
    ended = np.zeros(len(source), bool)
    while ids.shape[1] < max_length and not ended.all():
        tokens = np.where(ended, PAD, log_probabilities(model, source, ids).argmax(-1))
        ids = np.concatenate([ids, tokens[:, None]], axis=1)
        ended |= tokens == END
    return rows(ids)


def rows(ids):
    """Return rows of ids as lists without padding."""
    return [[int(i) for i in row if i != PAD] for row in np.asarray(ids)]


@pytest.fixture(scope="module")
def model():
    """Model with random weights, which no test changes."""
    model = randomize(make_model())
    lengths = {len(ids) for ids in rows(model.generate(sources(model), max_length=10))}
    assert len(lengths) > 2 and 10 in lengths, "these tests need different lengths"
    return model


class TestGreedy:
    @pytest.mark.parametrize(
        "options",
        [
            {
                "decoder_layers": 2,
                "positions": "learned",
                "max_source_length": 7,
                "max_target_length": 10,
            },
            {"post_layernorm_residual": True, "encoder_layers": 0},
            {"shared_embeddings": True, "tied_head": True},
        ],
        ids=["deep", "post", "tied"],
    )
    def test_cached_search_matches_full_forward_passes(self, options):
        """Weights may change after the first call, as in training."""
        model = make_model(**options)
        translations = set()
        for seed in (0, 1, 2):
            randomize(model, seed)
            expected = greedy(model, sources(model), max_length=10)
            assert rows(model.generate(sources(model), max_length=10)) == expected
            translations |= {tuple(row) for row in expected}
        assert len(translations) > 5

    @pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
    def test_16_bit_search_finds_tokens_near_the_best(self, policy):
        """Every token is as likely as the best one, up to rounding."""
        with dtype_policy(policy):
            model = randomize(make_model())
        ids = rows(model.generate(sources(model), max_length=4))
        for source, row in zip(sources(model), ids):
            for n, token in enumerate(row):
                log_p = log_probabilities(model, source, [row[:n]])[0]
                spread = np.ptp(log_p[np.isfinite(log_p)])
                assert log_p[token] >= log_p.max() - BLOCKS[policy] * spread

    def test_padding_and_start_are_never_generated(self):
        """The head bias makes these tokens most likely."""
        model = make_model()
        for token in (PAD, START):
            randomize(model).head.bias.assign_add(100.0 * np.eye(23)[token])
            for options in ({}, {"beam_size": 3}, {"temperature": 5.0, "seed": 1}):
                ids = model.generate(sources(model), max_length=8, **options).numpy()
                assert START not in ids, options
                for row in rows(ids):  # Padding only follows an end token.
                    assert len(row) == ids.shape[1] or row[-1] == END, options

    @pytest.mark.parametrize("options", [{}, {"beam_size": 4}], ids=str)
    def test_ended_rows_are_padded_and_no_column_is_all_padding(self, model, options):
        for max_length in (10, 60):
            ids = model.generate(sources(model), max_length=max_length, **options).numpy()
            assert ids.dtype == np.int32 and ids.shape[1] <= max_length
            ended = np.cumsum(ids == END, axis=1) - (ids == END) > 0
            np.testing.assert_array_equal(ids[ended], PAD)
            assert (ids[~ended] != PAD).all()
            assert (ids[:, -1] != PAD).any()

    def test_max_length_cuts_off(self, model):
        long = rows(model.generate(sources(model), max_length=10))
        short = model.generate(sources(model), max_length=3)
        assert short.shape == (6, 3)
        assert rows(short) == [row[:3] for row in long]

    def test_default_length_depends_on_the_source_and_the_positions(self):
        model = randomize(make_model(), end_bias=-100.0)  # The end token is never chosen.
        assert model.generate(sources(model)).shape == (6, 2 * 7 + 10)
        model = randomize(make_model(positions="learned", max_target_length=9), end_bias=-100.0)
        assert model.generate(sources(model)).shape == (6, 9)

    def test_one_compiled_function_for_all_shapes(self, model):
        model.generate(sources(model), max_length=4)
        before = dict(model._generator._functions)
        for batch, length in ((1, 1), (2, 9), (8, 3)):
            assert model.generate(np.full((batch, length), 5, "int32")).shape[0] == batch
        assert model._generator._functions == before

    def test_beam_of_one_and_top_k_of_one_are_greedy(self, model):
        expected = greedy(model, sources(model), max_length=10)
        for options in (
            {"beam_size": 1, "length_penalty": 2.0},
            {"temperature": 1.0, "top_k": 1, "seed": 5},
        ):
            ids = model.generate(sources(model), max_length=10, **options)
            assert rows(ids) == expected, options


def exhaustive(model, source, max_length, alpha):
    """Return all translations and their scores, best first, including truncated translations."""
    words = [token for token in range(model.vocab_size) if token not in (PAD, START, END)]
    ended, living = [], {(): 0.0}
    for length in range(1, max_length + 1):
        penalty = ((5 + length) / 6) ** alpha
        longer = {}
        following = log_probabilities(model, source, list(living))
        for (prefix, log_p), next_log_p in zip(living.items(), following):
            ended.append(([*prefix, END], (log_p + next_log_p[END]) / penalty))
            longer.update({(*prefix, word): log_p + next_log_p[word] for word in words})
        living = longer
    cut_off = [(list(ids), log_p / penalty) for ids, log_p in living.items()]
    return sorted([*ended, *cut_off], key=lambda e: -e[1])


def compiled_search(model, beam_size):
    """Return a function of (source, max_length, alpha) that computes all hypotheses and scores."""
    ids = SpecialIds.from_model(model, never=(PAD, START))

    @functools.cache
    def compile_for(alpha):
        options = GenerationOptions(beam_size=beam_size, length_penalty=alpha)

        def hypotheses(source, max_length):
            search = BeamSearch(ids, max_length, options)
            search.result = lambda state: (state["ended"], state["ended_score"])
            return decode(Generation(model, search), source)

        signature = [IDS, tf.TensorSpec([], "int32")]
        return tf.function(hypotheses, input_signature=signature, autograph=False)

    def search(source, max_length, alpha):
        ids, scores = compile_for(alpha)(source, max_length)
        assert ids.shape == (len(source), beam_size, max_length)
        return [rows(sentence) for sentence in ids.numpy()], scores.numpy()

    return search


class TestBeamSearch:
    # Words 1, 4 and 5 and the end token give 13 complete translations of up to 3 tokens
    # and 27 truncated translations.
    TINY = np.array([[4, 5, 1], [5, 4, 0], [1, 0, 0]], "int32")

    @pytest.fixture(scope="class")
    def tiny(self):
        model = make_model(vocab_size=6, decoder_layers=2)
        return model, compiled_search(model, beam_size=40)

    @pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 3.0])
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_wide_beam_finds_all_translations(self, tiny, seed, alpha):
        model, search = tiny
        randomize(model, seed, end_bias=seed - 1.0)
        hypotheses, scores = search(self.TINY, 3, alpha)
        for sentence, ids, score in zip(self.TINY, hypotheses, scores):
            expected = exhaustive(model, sentence, 3, alpha)
            assert len(expected) == 40
            assert ids == [hypothesis for hypothesis, _ in expected]
            np.testing.assert_allclose(score, [e[1] for e in expected], BLOCKS["float32"])

    @pytest.mark.parametrize("alpha", [0.6, 2.0])
    def test_generate_returns_the_best_translation(self, tiny, alpha):
        model, _ = tiny
        for seed in (3, 4, 5):
            randomize(model, seed, end_bias=0.0)
            expected = [exhaustive(model, sentence, 3, alpha)[0][0] for sentence in self.TINY]
            ids = model.generate(self.TINY, beam_size=27, length_penalty=alpha, max_length=3)
            assert rows(ids) == expected

    def test_narrow_beam_has_correct_scores(self, model):
        ids, search = sources(model, batch=3), compiled_search(model, beam_size=4)
        for alpha in (0.0, 0.6):
            found_hypotheses, scores = search(ids, 6, alpha)
            for source, hypotheses, row in zip(ids, found_hypotheses, scores):
                assert len({tuple(hypothesis) for hypothesis in hypotheses}) == 4
                assert list(row) == sorted(row, reverse=True), "the best come first"
                for hypothesis, score in zip(hypotheses, row):
                    log_p = sum(
                        log_probabilities(model, source, [hypothesis[:n]])[0, token]
                        for n, token in enumerate(hypothesis)
                    )
                    expected = log_p / ((5 + len(hypothesis)) / 6) ** alpha
                    assert score == pytest.approx(expected, rel=BLOCKS["float32"])

    def test_length_penalty_prefers_longer_translations(self, model):
        search = compiled_search(model, beam_size=8)
        lengths = [
            sum(len(hypotheses[0]) for hypotheses in search(sources(model), 12, alpha)[0])
            for alpha in (0.0, 0.6, 3.0)
        ]
        assert lengths[0] <= lengths[1] <= lengths[2] and lengths[0] < lengths[2]


@pytest.mark.parametrize("options", [{}, {"beam_size": 4}], ids=["greedy", "beam"])
class TestBatches:
    def test_translations_do_not_depend_on_other_rows(self, model, options):
        ids = sources(model)
        together = rows(model.generate(ids, max_length=10, **options))
        for source, expected in zip(ids, together):
            alone = source[source != PAD][None]
            assert rows(model.generate(alone, max_length=10, **options)) == [expected]
        backwards = rows(model.generate(ids[::-1], max_length=10, **options))
        assert backwards == together[::-1]

    def test_padding_does_not_change_translations(self, model, options):
        ids = sources(model)
        expected = rows(model.generate(ids, max_length=10, **options))
        wider = np.pad(ids, [(0, 0), (0, 5)])
        assert rows(model.generate(wider, max_length=10, **options)) == expected

    def test_empty_rows_do_not_change_other_rows(self, model, options):
        ids = sources(model)
        expected = rows(model.generate(ids, max_length=10, **options))
        with_empty = np.concatenate([np.zeros_like(ids[:1]), ids])
        assert rows(model.generate(with_empty, max_length=10, **options))[1:] == expected


class TestSampling:
    def test_sampling_depends_on_the_seed(self, model):
        def sample(seed):
            return rows(model.generate(sources(model), temperature=1.0, seed=seed, max_length=8))

        first = sample(1)
        assert sample(1) == first
        assert sample(2) != first
        assert sample(2**31 - 1) != sample(0)

    def test_rows_and_steps_draw_independently(self):
        model = make_model()
        model.head.kernel.assign(tf.zeros_like(model.head.kernel))
        model.head.bias.assign(-100.0 * np.eye(23)[END])  # All other tokens are equally likely.
        ids = model.generate(np.full((40, 3), 5, "int32"), temperature=1.0, max_length=12).numpy()
        assert ids.shape == (40, 12)
        assert len({tuple(row) for row in ids}) == 40
        assert len({tuple(column) for column in ids.T}) == 12
        assert (ids[:, 1:] == ids[:, :-1]).mean() < 0.2

    @pytest.mark.parametrize("temperature, top_k", [(0.5, 0), (3.0, 4), (1.0, 99)])
    def test_sampled_frequencies_match_the_probabilities(self, model, temperature, top_k):
        num_draws = 4000
        source = np.array([[5, 6, 7]], "int32")
        log_p = log_probabilities(model, source, [[]])[0] / temperature
        if 0 < top_k < len(log_p):
            log_p[np.argsort(log_p)[:-top_k]] = -np.inf
        expected = np.exp(log_p - np.logaddexp.reduce(log_p))
        ids = model.generate(
            source,
            num_return_sequences=num_draws,
            temperature=temperature,
            top_k=top_k,
            seed=3,
            max_length=1,
        ).numpy()
        counts = np.bincount(ids[:, 0], minlength=model.vocab_size)
        assert (counts[expected == 0] == 0).all(), "only among the k most likely"
        spread = np.sqrt(num_draws * expected * (1 - expected))
        assert (np.abs(counts - num_draws * expected) <= 5 * spread + 1).all()

    def test_top_p_and_min_p_keep_likely_tokens_only(self, model):
        options = {"temperature": 3.0, "num_return_sequences": 500, "max_length": 1}
        source = np.array([[5, 6, 7], [8, 9, 0]], "int32")
        p = np.exp(log_probabilities(model, source, [[], []]) / 3.0)
        p /= p.sum(axis=1, keepdims=True)
        expected = {
            "top_p": [set(np.argsort(-x)[: 1 + np.sum(np.cumsum(-np.sort(-x)) < 0.5)]) for x in p],
            "min_p": [set(np.flatnonzero(x >= 0.5 * x.max())) for x in p],
        }
        for name, allowed in expected.items():
            ids = model.generate(source, **options, **{name: 0.5}).numpy()[:, 0]
            assert [set(ids[:500]), set(ids[500:])] == allowed

    def test_later_tokens_stay_within_the_top_k(self, model):
        options = {"temperature": 3.0, "top_k": 4, "seed": 1, "max_length": 6}
        ids = rows(model.generate(sources(model), **options))
        choices = 0
        for source, row in zip(sources(model), ids):
            for n, token in enumerate(row):
                log_p = log_probabilities(model, source, [row[:n]])[0]
                assert token in np.argsort(log_p)[-4:]
                choices += token != log_p.argmax()
        assert choices > 5, "sampled tokens must not always be the most likely"


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 0},
        {"beam_size": -1},
        {"beam_size": 2.0},
        {"beam_size": True},
        {"max_length": 0},
        {"max_length": "9"},
        {"length_penalty": -0.1},
        {"length_penalty": float("nan")},
        {"length_penalty": "0.6"},
        {"length_penalty": None},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_k": 5},
        {"top_p": 1.5, "temperature": 1.0},
        {"top_p": 0.5},
        {"min_p": -0.5, "temperature": 1.0},
        {"min_p": True, "temperature": 1.0},
        {"repetition_penalty": 0},
        {"no_repeat_ngram_size": -1},
        {"early_stopping": 1},
        {"num_return_sequences": 0},
        {"num_return_sequences": 3, "beam_size": 2},
        {"stop_ids": 3},
        {"stop_ids": [99]},
        {"stop_ids": [-2]},
        {"beam_size": 2, "temperature": 1.0},
        {"seed": 1.5},
        {"seed": "1"},
    ],
    ids=str,
)
def test_invalid_options_raise_errors_that_name_them(model, options):
    with pytest.raises((TypeError, ValueError)) as caught:
        model.generate(sources(model), **options)
    name, value = next(iter(options.items()))
    value = value[0] if isinstance(value, list) else value
    assert name in str(caught.value) and str(value) in str(caught.value)


def test_unknown_option_raises_an_error(model):
    with pytest.raises(
        TypeError, match="no option 'top_q'. The options are beam_size, length_penalty"
    ):
        model.generate(sources(model), top_q=0.5)


@pytest.mark.parametrize(
    "length, options, words",
    [
        (8, {}, ["8", "max_source_length=7"]),
        (7, {"max_length": 10}, ["10", "max_target_length=9"]),
        (7, {"max_length": 10, "beam_size": 2}, ["10", "max_target_length=9"]),
    ],
    ids=["source", "target", "beam"],
)
def test_lengths_beyond_the_learned_positions_raise_an_error(length, options, words):
    """A GPU would silently read zeros there."""
    model = make_model(positions="learned", max_source_length=7, max_target_length=9)
    with pytest.raises(ValueError) as caught:
        model.generate(np.full((1, length), 5, "int32"), **options)
    assert all(word in str(caught.value) for word in words)


class WordTokenizer:
    """Tokenizer with one word per id, such as w4. Padding and end tokens have no word."""

    def encode(self, sentences):
        return [[int(word[1:]) for word in sentence.split()] for sentence in sentences]

    def decode(self, ids):
        return [" ".join(f"w{i}" for i in row if i not in (PAD, END)) for row in ids]


class RaggedTokenizer(WordTokenizer):
    def encode(self, sentences):
        return tf.ragged.constant(super().encode(sentences), ragged_rank=1)


SENTENCES = [
    "w5 w6 w7 w8 w9 w10",
    "w4",
    "",
    "w9 w8",
    "w20 w21 w22 w5",
    "   ",
    "w11 w4 w4",
    "w9 w8",
    "w12 w13 w14 w15 w16",
]


class TestTranslator:
    def translator(self, model, **options):
        settings = {"tokenizer": WordTokenizer(), "beam_size": 1, "max_new_tokens": 10, **options}
        return TextGenerator(model, **settings)

    @pytest.mark.parametrize("batch_size", [1, 3, 64])
    def test_order_is_kept_for_every_batch_size(self, model, batch_size):
        translate = self.translator(model, batch_size=batch_size)
        expected = [self.translator(model)([sentence])[0] for sentence in SENTENCES]
        assert len(set(expected)) > 4, "translations must differ to show an order"
        assert translate(SENTENCES) == expected
        assert translate(SENTENCES[::-1]) == expected[::-1]
        assert translate(tuple(SENTENCES)) == expected

    def test_translations_match_generate(self, model):
        ids = np.array([[5, 6, 7, 8]], "int32")
        for max_new_tokens, search in ((10, {}), (5, {"beam_size": 4, "length_penalty": 0.6})):
            generated = model.generate(ids, max_length=max_new_tokens, **search).numpy()
            expected = WordTokenizer().decode(generated)
            translate = self.translator(model, max_new_tokens=max_new_tokens, **search)
            assert translate(["w5 w6 w7 w8"]) == expected

    def test_empty_sentences_stay_empty(self, model):
        translate = self.translator(model)
        translations = translate(SENTENCES)
        assert translations[2] == "" and translations[5] == ""
        nonempty = [i for i in range(len(SENTENCES)) if i not in (2, 5)]
        expected = translate([SENTENCES[i] for i in nonempty])
        assert [translations[i] for i in nonempty] == expected
        assert translate(["", " "]) == ["", ""]
        assert translate([]) == []

    def test_long_sentences_are_truncated_and_reported(self, model):
        reports = []
        translate = self.translator(
            model, max_source_length=4, on_truncation=lambda *report: reports.append(report)
        )
        translations = translate(SENTENCES)
        assert reports == [(0, 6, 4), (8, 5, 4)]
        cut = [" ".join(sentence.split()[:4]) for sentence in SENTENCES]
        assert translations == self.translator(model)(cut)
        assert self.translator(model, max_source_length=4)(SENTENCES) == translations, "no report"

    def test_ragged_tensors_of_ids(self, model):
        ragged = self.translator(model, tokenizer=RaggedTokenizer())
        assert ragged(SENTENCES) == self.translator(model)(SENTENCES)
