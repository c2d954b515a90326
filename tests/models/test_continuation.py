"""Promise: a language model continues texts as if all of it were computed anew for each token."""

import numpy as np
import pytest

from dtransformer.models import CausalLM

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
    "no_padding": {"pad_id": None, "end_id": None},
}


def model(variant="learned", **options):
    sizes = {"hidden_size": 16, "num_heads": 4, "num_layers": 2, "max_length": 16}
    network = CausalLM(VOCAB, **{**sizes, **VARIANTS[variant], **options})
    network.build()
    rng = np.random.default_rng(3)
    network.set_weights([w.numpy() + rng.normal(size=w.shape, scale=0.3) for w in network.weights])
    return network


def log_p(network, ids):
    logits = np.asarray(network(np.array([ids], "int32")), "float64")[0]
    if network.pad_id is not None:
        logits[:, network.pad_id] = -1e9
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def anew(network, prompt):
    """Return the greedy continuation, by the whole network for each token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NEW and (len(ids) == len(prompt) or ids[-1] != network.end_id):
        ids.append(int(log_p(network, ids)[-1].argmax()))
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
    assert of_rows(network.generate(PROMPTS, NEW, temperature=0.5, top_k=1), network) == expected


@pytest.mark.parametrize("variant", VARIANTS)
def test_beams_find_what_is_at_least_as_likely(variant):
    network = model(variant)

    def score(prompt, ids):
        all_of_it = log_p(network, prompt + ids)[len(prompt) - 1 : -1]
        return all_of_it[range(len(ids)), ids].sum()

    found = network.generate(PROMPTS, NEW, beam_size=4, length_penalty=0.0)
    for prompt, ids in zip(PROMPTS, of_rows(found, network), strict=True):
        assert score(prompt, ids) >= score(prompt, anew(network, prompt)) - 1e-4


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


@pytest.mark.parametrize(
    "arguments, told",
    [
        (([[]],), "each prompt must have a token"),
        (([],), "each prompt must have a token"),
        (([[0, 0]],), "each prompt must have a token"),
        (([[0, 5]],), "prompt 0 has padding .pad_id=0. before a token"),
        (([[5], [-1, 7]],), "prompt 1 has the id -1, which is not in the vocabulary of 23"),
        (([[5, 23]],), "prompt 0 has the id 23, which is not in the vocabulary of 23"),
        (([[0.5]],), "prompts must be an int tensor"),
        ((5 * [[[1]]],), "prompts must be an int tensor"),
        ((PROMPTS, 0), "max_new_tokens must be at least 1"),
        (
            (PROMPTS, 11),
            "17 positions are asked for, but the learned positions end at max_length=16",
        ),
        ((PROMPTS, 3, 0), "beam_size must be an int of at least 1"),
    ],
)
def test_wrong_options(arguments, told):
    with pytest.raises(ValueError, match=told):
        model().generate(*arguments)
