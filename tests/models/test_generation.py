"""Greedy and beam search and sampling, against searches that use no cache."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.models import TranslationTransformer, generation
from dtransformer.models.translator import Translator
from tests.layers.reference_compare import dtype_policy
from tests.tolerances import LAYERS

PAD, START, END = 0, 2, 3


def random_model(vocab_size=23, seed=0, end_bias=0.0, weight=1.0, **options):
    """A model whose translations differ by source and have different lengths.

    Args:
        end_bias: added to the logit of the end token.
        weight: factor of the weights: the greater, the surer the model.
    """
    sizes = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2}
    model = TranslationTransformer(vocab_size, **{**sizes, "head_bias": True, **options})
    model.build()
    rng = np.random.default_rng(seed)
    for variable in model.variables:
        spread = weight * 0.6 * (0.1 if len(variable.shape) == 1 else 1.0)
        values = rng.normal(0, spread, variable.shape) + ("gamma" in variable.path)
        variable.assign(values)
    model.head.bias.assign_add(end_bias * np.eye(vocab_size)[END])
    return model


def sources(model, batch=6, length=7, seed=0):
    """Sentences of different lengths, padded."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(4, model.vocab_size, (batch, length)).astype("int32")
    for row in range(batch):
        ids[row, max(length - row, 2) :] = PAD
    return ids


IDS = tf.TensorSpec([None, None], "int32")
_forward_functions = {}


def log_probabilities(model, source, prefixes):
    """Of the tokens after prefixes of one length, by a full forward pass.

    Padding and start tokens do not count.

    Args:
        source: int array [b, s], or [s] for the same sentence for all prefixes.
        prefixes: list of b lists of t tokens.

    Returns:
        A float64 array [b, V].
    """
    if model not in _forward_functions:
        spec = [{"source": IDS, "target": IDS}]
        _forward_functions[model] = tf.function(model, input_signature=spec)
    target = np.array([[START, *prefix] for prefix in prefixes], "int32")
    source = np.broadcast_to(source, (len(target), np.shape(source)[-1]))
    logits = _forward_functions[model]({"source": source, "target": target})
    logits = tf.cast(logits[:, -1, : model.vocab_size], "float64").numpy()
    logits[:, [PAD, START]] = -np.inf
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def greedy(model, source, max_length):
    """The most likely tokens of each sentence, by full forward passes."""
    ids = np.zeros((len(source), 0), "int32")
    ended = np.zeros(len(source), bool)
    while ids.shape[1] < max_length and not ended.all():
        tokens = np.where(ended, PAD, log_probabilities(model, source, ids).argmax(-1))
        ids = np.concatenate([ids, tokens[:, None]], axis=1)
        ended |= tokens == END
    return rows(ids)


def rows(ids):
    """Lists without padding."""
    return [[int(i) for i in row if i != PAD] for row in np.asarray(ids)]


@pytest.fixture(scope="module")
def model():
    model = random_model(end_bias=2.5)
    lengths = {len(ids) for ids in rows(model.generate(sources(model), max_length=12))}
    assert len(lengths) > 2, "these tests need translations of different lengths"
    return model


class TestGreedy:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"positions": "learned", "max_source_length": 7, "max_target_length": 12},
            {"post_layernorm_residual": True},
            {"shared_embeddings": True, "tied_head": True},
        ],
        ids=["pre", "learned", "post", "tied"],
    )
    def test_the_cache_changes_nothing(self, options):
        model = random_model(seed=1, end_bias=2.5, **options)
        ids = sources(model)
        expected = greedy(model, ids, max_length=12)
        assert rows(model.generate(ids, max_length=12)) == expected
        assert len({tuple(row) for row in expected}) > 3

    @pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
    def test_in_16_bits(self, policy):
        """Sure enough for rounding not to change the choice at once."""
        with dtype_policy(policy):
            model = random_model(seed=1, end_bias=2.5)
        ids = model.generate(sources(model), max_length=12)
        first = log_probabilities(model, sources(model), [[]] * 6).argmax(-1)
        np.testing.assert_array_equal(ids.numpy()[:, 0], first)

    def test_padding_and_start_are_never_generated(self):
        """However likely the model finds them."""
        model = random_model()
        bias = model.head.bias
        bias.assign(100.0 * np.eye(23)[PAD] + 90.0 * np.eye(23)[START])
        for options in ({}, {"beam_size": 3}, {"temperature": 5.0, "seed": 1}):
            ids = model.generate(sources(model), max_length=8, **options).numpy()
            assert START not in ids, options
            for row in rows(ids):  # padding comes after an end only
                assert len(row) == ids.shape[1] or row[-1] == END, options

    def test_ended_rows_are_padded(self, model):
        ids = model.generate(sources(model), max_length=12).numpy()
        assert ids.dtype == np.int32
        ended = np.cumsum(ids == END, axis=1) - (ids == END) > 0
        np.testing.assert_array_equal(ids[ended], PAD)
        assert (ids[~ended] != PAD).all()
        assert (ids[:, -1] != PAD).any(), "no column is all padding"

    def test_max_length_cuts_off(self, model):
        long = rows(model.generate(sources(model), max_length=12))
        short = model.generate(sources(model), max_length=3)
        assert short.shape == (6, 3)
        assert rows(short) == [row[:3] for row in long]

    def test_the_default_length_suits_the_source(self):
        model = random_model(end_bias=-100.0)  # that never ends
        assert model.generate(sources(model)).shape == (6, 2 * 7 + 10)

    def test_learned_positions_end_the_default_length(self):
        model = random_model(end_bias=-100.0, positions="learned", max_target_length=9)
        assert model.generate(sources(model)).shape == (6, 9)

    def test_one_compiled_function_for_all_shapes(self, model):
        for batch, length in ((1, 1), (2, 9), (8, 3)):
            assert model.generate(np.full((batch, length), 5, "int32")).shape[0] == batch
        before = dict(model._generate_functions)
        model.generate(sources(model), max_length=4)
        assert model._generate_functions == before

    def test_new_weights_are_used(self):
        model = random_model(seed=1)
        ids = sources(model)
        before = rows(model.generate(ids, max_length=5))
        for variable, other in zip(model.variables, random_model(seed=2).variables):
            variable.assign(other)
        assert rows(model.generate(ids, max_length=5)) != before
        assert rows(model.generate(ids, max_length=5)) == greedy(model, ids, 5)

    def test_a_beam_of_one_and_top_k_of_one_are_greedy(self, model):
        ids = sources(model)
        expected = rows(model.generate(ids, max_length=8))
        for options in (
            {"beam_size": 1, "length_penalty": 0.0},
            {"beam_size": 1, "length_penalty": 2.0},
            {"temperature": 1.0, "top_k": 1, "seed": 5},
        ):
            assert rows(model.generate(ids, max_length=8, **options)) == expected, options


def exhaustive(model, source, max_length, alpha):
    """Every translation with its score: those that end, then those that are cut off."""
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
    return [*sorted(ended, key=lambda e: -e[1]), *sorted(cut_off, key=lambda e: -e[1])]


def search(model, source, max_length, beam_size, alpha):
    """All hypotheses of a batch, with their scores."""
    function = tf.function(
        lambda source: generation.beam_search(model, source, max_length, beam_size, alpha),
        input_signature=[IDS],
    )
    ids, scores = function(tf.constant(source))
    assert ids.shape == (len(source), beam_size, max_length)
    return [rows(sentence) for sentence in ids.numpy()], scores.numpy()


class TestBeamSearch:
    # Words 1, 4 and 5, and the end: 13 translations of up to 3 tokens that end, and
    # 27 that are cut off.
    @pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 3.0])
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_a_wide_beam_finds_everything(self, seed, alpha):
        model = random_model(vocab_size=6, seed=seed, end_bias=seed - 1.0)
        source = np.array([[4, 5, 1], [5, 4, 0]], "int32")
        found, scores = search(model, source, 3, 40, alpha)
        for sentence, ids, score in zip(source, found, scores):
            expected = exhaustive(model, sentence, 3, alpha)
            assert len(expected) == 40
            assert ids == [hypothesis for hypothesis, _ in expected]
            np.testing.assert_allclose(score, [e[1] for e in expected], rtol=10 * LAYERS["float32"])

    @pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
    @pytest.mark.parametrize("seed", [3, 4, 5])
    def test_generate_returns_the_best(self, seed, alpha):
        model = random_model(vocab_size=6, seed=seed)
        source = np.array([[4, 5, 1], [5, 4, 0], [1, 0, 0]], "int32")
        expected = [exhaustive(model, sentence, 3, alpha)[0][0] for sentence in source]
        ids = model.generate(source, beam_size=27, length_penalty=alpha, max_length=3)
        assert rows(ids) == expected

    def test_a_long_length_never_prefers_what_does_not_exist(self):
        """A beam wider than the vocabulary has beams that stand for nothing."""
        model = random_model(vocab_size=6, end_bias=-30.0)
        source = np.array([[4, 5, 1]], "int32")
        for alpha in (0.6, 1.0):
            found, scores = search(model, source, 40, 6, alpha)
            assert all(len(hypothesis) == 40 for hypothesis in found[0]), "all are cut off"
            assert (scores > -1e6).all() and (np.diff(scores[0]) <= 0).all()

    def test_scores_are_those_of_the_hypotheses(self, model):
        ids = sources(model, batch=3)
        found, scores = search(model, ids, 6, 4, 0.6)
        for source, hypotheses, row in zip(ids, found, scores):
            assert len({tuple(hypothesis) for hypothesis in hypotheses}) == 4
            for hypothesis, score in zip(hypotheses, row):
                log_p = sum(
                    log_probabilities(model, source, [hypothesis[:n]])[0, token]
                    for n, token in enumerate(hypothesis)
                )
                expected = log_p / ((5 + len(hypothesis)) / 6) ** 0.6
                assert score == pytest.approx(expected, rel=10 * LAYERS["float32"])

    def test_a_wider_beam_is_rarely_worse(self, model):
        """And never at this seed: the search does what it is for."""
        ids = sources(model, batch=6)
        best = [search(model, ids, 6, beam_size, 0.6)[1][:, 0] for beam_size in (2, 4, 16)]
        assert best[0].sum() < best[1].sum() <= best[2].sum()

    def test_the_penalty_prefers_longer_translations(self):
        model = random_model(seed=2, end_bias=3.0, weight=0.7)
        ids = sources(model)
        lengths = [
            sum(map(len, rows(model.generate(ids, beam_size=8, length_penalty=a, max_length=12))))
            for a in (0.0, 0.6, 3.0)
        ]
        assert lengths[0] <= lengths[1] <= lengths[2] and lengths[0] < lengths[2]

    def test_ended_rows_are_padded_and_no_column_is_all_padding(self, model):
        ids = model.generate(sources(model), beam_size=4, max_length=30).numpy()
        assert ids.dtype == np.int32 and ids.shape[1] < 30
        ended = np.cumsum(ids == END, axis=1) - (ids == END) > 0
        np.testing.assert_array_equal(ids[ended], PAD)
        assert (ids[:, -1] != PAD).any()


@pytest.mark.parametrize(
    "options", [{}, {"beam_size": 4}, {"beam_size": 3, "length_penalty": 2.0}], ids=str
)
class TestBatches:
    def test_a_translation_does_not_depend_on_the_others(self, model, options):
        ids = sources(model)
        together = rows(model.generate(ids, max_length=10, **options))
        for source, expected in zip(ids, together):
            alone = source[source != PAD][None]
            assert rows(model.generate(alone, max_length=10, **options)) == [expected]
        backwards = rows(model.generate(ids[::-1], max_length=10, **options))
        assert backwards == together[::-1]

    def test_padding_changes_nothing(self, model, options):
        ids = sources(model)
        expected = rows(model.generate(ids, max_length=10, **options))
        wider = np.pad(ids, [(0, 0), (0, 5)])
        assert rows(model.generate(wider, max_length=10, **options)) == expected

    def test_empty_rows_do_no_harm(self, model, options):
        ids = sources(model)
        expected = rows(model.generate(ids, max_length=10, **options))
        with_empty = np.concatenate([np.zeros_like(ids[:1]), ids])
        assert rows(model.generate(with_empty, max_length=10, **options))[1:] == expected


class TestSampling:
    def test_the_same_seed_gives_the_same_and_another_another(self, model):
        ids = sources(model)
        sample = lambda seed: rows(model.generate(ids, temperature=1.0, seed=seed, max_length=8))
        first = sample(1)
        assert sample(1) == first
        assert sample(2) != first
        assert sample(2**31 - 1) != sample(0)

    def test_rows_and_steps_have_draws_of_their_own(self):
        model = random_model(end_bias=-100.0)
        model.head.kernel.assign(tf.zeros_like(model.head.kernel))
        model.head.bias.assign(-100.0 * np.eye(23)[END])  # all other tokens are as likely
        ids = model.generate(np.full((40, 3), 5, "int32"), temperature=1.0, max_length=12).numpy()
        assert len({tuple(row) for row in ids}) == 40
        assert len({tuple(column) for column in ids.T}) == ids.shape[1]
        assert (ids[:, 1:] == ids[:, :-1]).mean() < 0.2

    @pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.5, 0), (2.0, 0), (1.0, 4), (1.0, 99)])
    def test_how_often_each_token_is_drawn(self, model, temperature, top_k):
        num_draws = 4000
        source = np.array([[5, 6, 7]], "int32")
        log_p = log_probabilities(model, source, [[]])[0] / temperature
        if 0 < top_k < len(log_p):
            log_p[np.argsort(log_p)[:-top_k]] = -np.inf
        expected = np.exp(log_p - np.logaddexp.reduce(log_p))
        ids = model.generate(
            np.repeat(source, num_draws, 0),
            temperature=temperature,
            top_k=top_k,
            seed=3,
            max_length=1,
        ).numpy()
        counts = np.bincount(ids[:, 0], minlength=model.vocab_size)
        assert (counts[expected == 0] == 0).all(), "only among the k most likely"
        spread = np.sqrt(num_draws * expected * (1 - expected))
        assert (np.abs(counts - num_draws * expected) <= 5 * spread + 1).all()

    def test_later_tokens_stay_within_the_top_k(self, model):
        ids = rows(
            model.generate(sources(model), temperature=3.0, top_k=3, seed=1, max_length=6)
        )
        choices = 0
        for source, row in zip(sources(model), ids):
            for n, token in enumerate(row):
                log_p = log_probabilities(model, source, [row[:n]])[0]
                assert token in np.argsort(log_p)[-3:]
                choices += token != log_p.argmax()
        assert choices > 5, "and not always the first"

    def test_a_low_temperature_is_nearly_greedy(self, model):
        ids = sources(model)
        expected = rows(model.generate(ids, max_length=8))
        assert rows(model.generate(ids, temperature=1e-4, max_length=8)) == expected


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
        {"beam_size": 2, "temperature": 1.0},
        {"seed": 1.5},
        {"seed": "1"},
        {"seed": 2**31},
    ],
    ids=str,
)
def test_wrong_options(model, options):
    with pytest.raises(ValueError) as caught:
        model.generate(sources(model), **options)
    for name, value in options.items():
        assert name in str(caught.value) and str(value) in str(caught.value)


@pytest.mark.parametrize(
    "length, options, words",
    [
        (8, {}, ["8", "max_source_length=7"]),
        (7, {"max_length": 10}, ["10", "max_target_length=9"]),
        (7, {"max_length": 10, "beam_size": 2}, ["10", "max_target_length=9"]),
    ],
)
def test_beyond_the_learned_positions(length, options, words):
    """A GPU would read zeros there and say nothing."""
    model = random_model(
        end_bias=-100.0, positions="learned", max_source_length=7, max_target_length=9
    )
    with pytest.raises(ValueError) as caught:
        model.generate(np.full((1, length), 5, "int32"), **options)
    assert all(word in str(caught.value) for word in words)


class WordTokenizer:
    """Ids of the words w4, w5 …; the end of a translation and padding are no words."""

    def encode(self, sentences):
        return [[int(word[1:]) for word in sentence.split()] for sentence in sentences]

    def decode(self, ids):
        return [" ".join(f"w{i}" for i in row if i > END) for row in ids]


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
        settings = {"tokenizer": WordTokenizer(), "beam_size": 2, "max_length": 8, **options}
        return Translator(model, **settings)

    @pytest.mark.parametrize("batch_size", [1, 3, 64])
    def test_the_order_is_kept_whatever_the_batches(self, model, batch_size):
        translate = self.translator(model, batch_size=batch_size)
        expected = [self.translator(model)([sentence])[0] for sentence in SENTENCES]
        assert len(set(expected)) > 4, "translations have to differ to show an order"
        assert translate(SENTENCES) == expected
        assert translate(SENTENCES[::-1]) == expected[::-1]
        assert translate(tuple(SENTENCES)) == expected

    def test_what_it_gives_is_what_the_model_generates(self, model):
        ids = np.array([[5, 6, 7, 8]], "int32")
        for search in ({"beam_size": 1}, {"beam_size": 3, "length_penalty": 2.0, "max_length": 5}):
            given = model.generate(ids, **{"max_length": 8, **search}).numpy()
            expected = WordTokenizer().decode(given)
            assert self.translator(model, **search)(["w5 w6 w7 w8"]) == expected

    def test_empty_sentences_stay_empty(self, model):
        translate = self.translator(model)
        translations = translate(SENTENCES)
        assert translations[2] == "" and translations[5] == ""
        assert all(translations[i] for i in range(9) if i not in (2, 5))
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

    def test_a_tokenizer_of_the_sources_own(self, model):
        class Shifted(WordTokenizer):
            def encode(self, sentences):
                return [[i + 1 for i in ids] for ids in super().encode(sentences)]

        translate = self.translator(model, source_tokenizer=Shifted())
        assert translate(["w4 w5 w6"]) == self.translator(model)(["w5 w6 w7"])
