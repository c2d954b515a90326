"""Promise: a language model continues texts as if all of it were computed anew for each token."""

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
IN_BEAMS = "llama", "no_padding"  # beams of the others are among the long tests


def model(variant="learned", **options):
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


def anew(network, prompt):
    """Return the greedy continuation, by the whole network for each token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW and (len(ids) == len(prompt) or ids[-1] != network.end_id):
        ids.append(int(log_p(network, ids, len(prompt))[-1].argmax()))
    return ids[len(prompt) :]


def of_rows(found, network):
    """Return the rows of a result without what comes after their end tokens."""
    rows = [list(row) for row in found.numpy()]
    end = network.end_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy(variant):
    network = model(variant)
    expected = [anew(network, prompt) for prompt in PROMPTS]
    assert of_rows(network.generate(PROMPTS, max_new_tokens=NEW), network) == expected
    if variant in IN_BEAMS:
        drawn = network.generate(PROMPTS, NEW, temperature=0.5, top_k=1)
        assert of_rows(drawn, network) == expected


@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, marks=[pytest.mark.long] * (one not in IN_BEAMS)) for one in VARIANTS],
)
def test_beams_find_what_is_at_least_as_likely(variant):
    network = model(variant)

    def score(prompt, ids):
        all_of_it = log_p(network, prompt + ids, len(prompt))[len(prompt) - 1 : -1]
        return all_of_it[range(len(ids)), ids].sum()

    found = network.generate(PROMPTS, NEW, beam_size=4, length_penalty=0.0)
    for prompt, ids in zip(PROMPTS, of_rows(found, network), strict=True):
        assert score(prompt, ids) >= score(prompt, anew(network, prompt)) - 1e-4


@pytest.mark.parametrize("beams", [1, 3])
def test_a_window_bounds_what_is_kept(beams):
    """Bytes of two texts' caches, with room for 40 tokens."""

    def kept(window):
        network = model("window", window=window)
        options, ids = GenerationOptions(beam_size=beams), SpecialIds.of(network, None, (0,))
        search = BeamSearch(ids, 40, options) if beams > 1 else Sampling(ids, 40, None, options)
        decoding = Continuation(network, search)
        cache = decoding.encode(tf.ones([2, 30], "int32"), capacity=40)
        tensors = [x for block in cache["blocks"] for x in block.values() if x.shape.rank]
        return sum(4 * int(tf.size(x)) for x in tensors)

    # Two blocks' keys and values of one head of 4 features in float32.
    position = 2 * 2 * 2 * 4 * 4
    assert kept(None) == position * (29 + 40 * beams)
    assert kept(4) == position * (3 + 4 * beams)


@pytest.mark.long
@on_mesh
def test_windows_on_a_mesh():
    options = {
        "vocab_size": 24,
        "num_kv_heads": 2,
        "window": None,
        "block_pattern": [{"window": 4}, {}],
    }
    searches = {}, {"beam_size": 3, "length_penalty": 0.0}
    alone = model("window", **options)
    expected = [alone.generate(PROMPTS, NEW, **own).numpy() for own in searches]
    start(model_parallel=2)
    network = model("window", **options)
    for own, ids in zip(searches, expected, strict=True):
        np.testing.assert_array_equal(network.generate(PROMPTS, NEW, **own), ids)


def test_prompts_in_either_form_and_each_by_itself():
    network = model("llama")
    together = of_rows(network.generate(PROMPTS, NEW), network)
    padded = np.array([row + [0] * (7 - len(row)) for row in PROMPTS])
    assert of_rows(network.generate(padded, NEW), network) == together
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert of_rows(network.generate([prompt], NEW), network) == [expected]


def test_drawing_depends_on_the_seed_only():
    network = model()
    first, again, other = (
        network.generate(PROMPTS, NEW, temperature=2.0, seed=seed).numpy() for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert first.shape != other.shape or (first != other).any()


def test_texts_end_and_are_padded():
    tokens = anew(model("llama"), PROMPTS[0])
    place = next(i for i, token in enumerate(tokens) if token != tokens[0])
    network = model("llama", end_id=tokens[place])
    found = network.generate(PROMPTS, NEW)
    assert of_rows(found, network) == [anew(network, prompt) for prompt in PROMPTS]
    assert list(found[0, : place + 1]) == tokens[: place + 1]
    assert not found[0, place + 1 :].numpy().any()
    assert network.generate(PROMPTS[:1], NEW).shape == (1, place + 1)


def test_an_end_that_is_padding_too_is_found():
    tokens = anew(model("llama"), PROMPTS[0])
    network = model("llama", pad_id=tokens[1], end_id=tokens[1])
    for options in ({}, {"beam_size": 3, "length_penalty": 0.0}):
        assert tokens[1] in network.generate(PROMPTS[:1], NEW, **options).numpy()


def test_no_two_tokens_follow_each_other_twice():
    for options in ({"beam_size": 3}, {"temperature": 1.0}, {}):
        found = model("llama").generate(PROMPTS, 9, no_repeat_ngram_size=2, **options).numpy()
        for prompt, ids in zip(PROMPTS, found.tolist(), strict=True):
            ids = prompt + ids[: ids.index(0)] if 0 in ids else prompt + ids
            pairs = list(itertools.pairwise(ids))
            assert len(set(pairs)) == len(pairs)


def test_several_results_of_a_prompt():
    network = model("llama")
    best = network.generate(PROMPTS, NEW, beam_size=4).numpy()
    several = network.generate(PROMPTS, NEW, beam_size=4, num_return_sequences=3).numpy()
    np.testing.assert_array_equal(several[::3, : best.shape[1]], best)
    assert len({tuple(row) for row in several}) == 9
    drawn = network.generate(PROMPTS, NEW, temperature=2.0, num_return_sequences=3).numpy()
    assert len(drawn) == 9 and len({tuple(row) for row in drawn}) > 6


@pytest.mark.parametrize("variant", ["llama", "no_padding"])
def test_other_tokens_may_end_a_text(variant):
    network = model(variant)
    never = [anew(network, prompt) for prompt in PROMPTS]
    stop_ids = [never[0][2], never[2][5]]
    found = network.generate(PROMPTS, NEW, stop_ids=stop_ids).numpy()
    for ids, row in zip(never, found.tolist(), strict=True):
        length = next((n for n, x in enumerate(ids, 1) if x in stop_ids), len(ids))
        assert row[:length] == ids[:length]
        assert set(row[length:]) <= {stop_ids[0] if variant == "no_padding" else 0}
    assert network.generate(PROMPTS, NEW, stop_ids=[]).shape == (3, NEW)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "num_return_sequences": 2}], ids=str)
def test_what_is_told_is_what_is_found(options):
    network, told = model("llama"), []
    end = anew(network, PROMPTS[0])[1]
    for _ in range(2):  # the second time nothing is compiled
        told.clear()
        tell = lambda number, ids: told.append((number, *ids))
        found = network.generate(PROMPTS, NEW, on_tokens=tell, stop_ids=[end], **options)
        rows = [[x for number, x in told if number == row] for row in range(len(found))]
        for row, ids in zip(rows, found.numpy().tolist(), strict=True):
            assert row == ids[: len(row)] and not any(ids[len(row) :])
            assert len(row) == NEW or row[-1] == end
    assert told != sorted(told), "texts go on side by side"


def test_an_error_of_the_callback_ends_it():
    class Enough(Exception):
        pass

    def tell(number, ids):
        raise Enough(f"after {number}")

    with pytest.raises(Enough, match="after 0"):
        model().generate(PROMPTS, NEW, on_tokens=tell)
    with pytest.raises(ValueError, match="on_tokens.*Set `beam_size=1`"):
        model().generate(PROMPTS, NEW, on_tokens=tell, beam_size=2)


@pytest.mark.parametrize(
    "arguments, told",
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
def test_wrong_options(arguments, told):
    with pytest.raises(ValueError, match=told):
        model().generate(*arguments)
