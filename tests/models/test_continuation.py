"""Cached generation gives the same texts as full forward passes for each token."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.models import CausalLM
from dtransformer.models.generation.beam_search import BeamSearch
from dtransformer.models.generation.continuation import Continuation
from dtransformer.models.generation.options import GenerationOptions
from dtransformer.models.generation.search import Sampling, SpecialIds
from tests.on_mesh import on_mesh, start

VOCAB, NEW = 23, 9
PROMPTS = [[5, 9, 7], [11], [4, 4, 8, 15, 16, 22, 10]]
VARIANTS = {
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal", "tied_head": False, "head_bias": True},
    "llama": {
        "positions": "rotary",
        "norm": "rms_norm",
        "gated": True,
        "use_bias": False,
        "num_kv_heads": 2,
        "embedding_scale": 1.0,
        "tied_head": False,
    },
    "window": {"positions": "rotary", "rotary_fraction": 0.5, "window": 4, "num_kv_heads": 1},
    "prefix": {"positions": "rotary", "prefix": True},
    "no_padding": {"pad_id": None, "end_id": None},
}
BEAM_VARIANTS = "llama", "no_padding"  # Beam searches of other variants are in the long suite.


def make_model(variant="learned", **options):
    sizes = {"hidden_size": 16, "num_heads": 4, "num_layers": 2, "max_length": 16}
    network = CausalLM(**{"vocab_size": VOCAB, **sizes, **VARIANTS[variant], **options})
    network.build()
    rng = np.random.default_rng(3)
    network.set_weights([w.numpy() + rng.normal(size=w.shape, scale=0.3) for w in network.weights])
    return network


def log_p(network, ids, num_prompt):
    inputs = np.array([ids], "int32")
    if network.arguments["prefix"]:
        inputs = {"tokens": inputs, "prefix": np.arange(len(ids))[None] < num_prompt}
    logits = np.asarray(network(inputs), "float64")[0]
    if network.pad_id is not None:
        logits[:, network.pad_id] = -1e9
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def greedy_without_cache(network, prompt):
    """Return the greedy continuation, with a full forward pass for each token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW and (len(ids) == len(prompt) or ids[-1] != network.end_id):
        ids.append(int(log_p(network, ids, len(prompt))[-1].argmax()))
    return ids[len(prompt) :]


def rows_until_end(generated, network):
    """Return generated rows, cut after their first end token."""
    rows = [list(row) for row in generated.numpy()]
    end = network.end_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_search_matches_full_forward_passes(variant):
    network = make_model(variant)
    expected = [greedy_without_cache(network, prompt) for prompt in PROMPTS]
    assert rows_until_end(network.generate(PROMPTS, max_new_tokens=NEW), network) == expected
    if variant in BEAM_VARIANTS:
        sampled = network.generate(PROMPTS, NEW, temperature=0.5, top_k=1)
        assert rows_until_end(sampled, network) == expected


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in BEAM_VARIANTS))
        for name in VARIANTS
    ],
)
def test_beam_search_is_at_least_as_likely_as_greedy_search(variant):
    network = make_model(variant)

    def score(prompt, ids):
        log_probabilities = log_p(network, prompt + ids, len(prompt))[len(prompt) - 1 : -1]
        return log_probabilities[range(len(ids)), ids].sum()

    generated = network.generate(PROMPTS, NEW, beam_size=4, length_penalty=0.0)
    for prompt, ids in zip(PROMPTS, rows_until_end(generated, network), strict=True):
        assert score(prompt, ids) >= score(prompt, greedy_without_cache(network, prompt)) - 1e-4


@pytest.mark.parametrize("beams", [1, 3])
def test_window_bounds_the_cache_size(beams):
    """Compare the cache sizes in bytes of two texts with room for 40 tokens."""

    def cache_bytes(window):
        network = make_model("window", window=window)
        options, ids = (
            GenerationOptions(beam_size=beams),
            SpecialIds.from_model(network, None, (0,)),
        )
        search = BeamSearch(ids, 40, options) if beams > 1 else Sampling(ids, 40, None, options)
        decoding = Continuation(network, search)
        cache = decoding.encode(tf.ones([2, 30], "int32"), capacity=40)
        tensors = [x for x in tf.nest.flatten(cache["blocks"]) if x.shape.rank]
        return sum(4 * int(tf.size(x)) for x in tensors)

    # A position has keys and values of 4 float32 features in two blocks, for two texts.
    position_bytes = 2 * 2 * 2 * 4 * 4
    assert cache_bytes(None) == position_bytes * (29 + 40 * beams)
    assert cache_bytes(4) == position_bytes * (3 + 4 * beams)


@pytest.mark.long
@on_mesh
def test_window_on_a_mesh():
    options = {
        "vocab_size": 24,
        "num_kv_heads": 2,
        "window": None,
        "block_pattern": [{"window": 4}, {}],
    }
    searches = {}, {"beam_size": 3, "length_penalty": 0.0}
    alone = make_model("window", **options)
    expected = [alone.generate(PROMPTS, NEW, **search).numpy() for search in searches]
    start(model_parallel=2)
    network = make_model("window", **options)
    for search, ids in zip(searches, expected, strict=True):
        np.testing.assert_array_equal(network.generate(PROMPTS, NEW, **search), ids)


def test_ragged_padded_and_single_prompts_give_equal_texts():
    network = make_model("llama")
    together = rows_until_end(network.generate(PROMPTS, NEW), network)
    padded = np.array([row + [0] * (7 - len(row)) for row in PROMPTS])
    assert rows_until_end(network.generate(padded, NEW), network) == together
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert rows_until_end(network.generate([prompt], NEW), network) == [expected]


def test_sampling_depends_on_the_seed_only():
    network = make_model()
    first, repeated, other_seed = (
        network.generate(PROMPTS, NEW, temperature=2.0, seed=seed).numpy() for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, repeated)
    assert first.shape != other_seed.shape or (first != other_seed).any()


def test_texts_stop_at_the_end_token_and_are_padded():
    tokens = greedy_without_cache(make_model("llama"), PROMPTS[0])
    end_index = next(i for i, token in enumerate(tokens) if token != tokens[0])
    network = make_model("llama", end_id=tokens[end_index])
    generated = network.generate(PROMPTS, NEW)
    assert rows_until_end(generated, network) == [
        greedy_without_cache(network, prompt) for prompt in PROMPTS
    ]
    assert list(generated[0, : end_index + 1]) == tokens[: end_index + 1]
    assert not generated[0, end_index + 1 :].numpy().any()
    assert network.generate(PROMPTS[:1], NEW).shape == (1, end_index + 1)


def test_end_token_equal_to_padding_is_generated():
    tokens = greedy_without_cache(make_model("llama"), PROMPTS[0])
    network = make_model("llama", pad_id=tokens[1], end_id=tokens[1])
    for options in ({}, {"beam_size": 3, "length_penalty": 0.0}):
        assert tokens[1] in network.generate(PROMPTS[:1], NEW, **options).numpy()


def test_no_repeat_ngram_size_forbids_repeated_pairs():
    for options in ({"beam_size": 3}, {"temperature": 1.0}, {}):
        generated = (
            make_model("llama").generate(PROMPTS, 9, no_repeat_ngram_size=2, **options).numpy()
        )
        for prompt, ids in zip(PROMPTS, generated.tolist(), strict=True):
            ids = prompt + ids[: ids.index(0)] if 0 in ids else prompt + ids
            pairs = list(itertools.pairwise(ids))
            assert len(set(pairs)) == len(pairs)


def test_num_return_sequences_gives_distinct_texts():
    network = make_model("llama")
    best = network.generate(PROMPTS, NEW, beam_size=4).numpy()
    several = network.generate(PROMPTS, NEW, beam_size=4, num_return_sequences=3).numpy()
    np.testing.assert_array_equal(several[::3, : best.shape[1]], best)
    assert len({tuple(row) for row in several}) == 9
    sampled = network.generate(PROMPTS, NEW, temperature=2.0, num_return_sequences=3).numpy()
    assert len(sampled) == 9 and len({tuple(row) for row in sampled}) > 6


@pytest.mark.parametrize("variant", ["llama", "no_padding"])
def test_stop_ids_end_a_text(variant):
    network = make_model(variant)
    unstopped = [greedy_without_cache(network, prompt) for prompt in PROMPTS]
    stop_ids = [unstopped[0][2], unstopped[2][5]]
    generated = network.generate(PROMPTS, NEW, stop_ids=stop_ids).numpy()
    for ids, row in zip(unstopped, generated.tolist(), strict=True):
        length = next((n for n, x in enumerate(ids, 1) if x in stop_ids), len(ids))
        assert row[:length] == ids[:length]
        assert set(row[length:]) <= {stop_ids[0] if variant == "no_padding" else 0}
    assert network.generate(PROMPTS, NEW, stop_ids=[]).shape == (3, NEW)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "num_return_sequences": 2}], ids=str)
def test_on_tokens_receives_every_generated_token(options):
    network, received = make_model("llama"), []
    end = greedy_without_cache(network, PROMPTS[0])[1]
    for _ in range(2):  # The second call compiles nothing.
        received.clear()
        on_tokens = lambda index, ids: received.append((index, *ids))
        generated = network.generate(PROMPTS, NEW, on_tokens=on_tokens, stop_ids=[end], **options)
        rows = [[x for index, x in received if index == row] for row in range(len(generated))]
        for row, ids in zip(rows, generated.numpy().tolist(), strict=True):
            assert row == ids[: len(row)] and not any(ids[len(row) :])
            assert len(row) == NEW or row[-1] == end
    assert received != sorted(received), "texts must be generated side by side"


def test_exception_in_on_tokens_stops_generation():
    class Enough(Exception):
        pass

    def on_tokens(index, ids):
        raise Enough(f"after {index}")

    with pytest.raises(Enough, match="after 0"):
        make_model().generate(PROMPTS, NEW, on_tokens=on_tokens)
    with pytest.raises(ValueError, match="on_tokens.*Set `beam_size=1`"):
        make_model().generate(PROMPTS, NEW, on_tokens=on_tokens, beam_size=2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([[]],), "Each prompt must have at least one token"),
        (([],), "Each prompt must have at least one token"),
        (([[0, 0]],), "Each prompt must have at least one token"),
        (([[0, 5]],), "Prompt 0 has padding .*pad_id=0.* before a token"),
        (([[5], [-1, 7]],), "Prompt 1 has the id -1, which is not in the vocabulary of 23"),
        (([[5, 23]],), "Prompt 0 has the id 23, which is not in the vocabulary of 23"),
        (([[0.5]],), "`prompts` must be an int tensor"),
        ((5 * [[[1]]],), "`prompts` must be an int tensor"),
        ((PROMPTS, 0), "max_new_tokens must be an integer of at least 1"),
        ((PROMPTS, 11), "17 positions exceed the learned positions, `max_length=16`"),
    ],
)
def test_invalid_prompts_and_lengths_raise_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model().generate(*arguments)
