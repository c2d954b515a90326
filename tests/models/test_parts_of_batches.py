"""Promise: parts of a batch that are decoded side by side give what the whole gives."""

import numpy as np
import pytest

from dtransformer.models import CausalLM
from dtransformer.models.generator import _has_experts
from dtransformer.parallel import decoding
from tests.models.test_generation import make_model, randomize, rows, sources


@pytest.fixture
def in_parts(monkeypatch):
    """Of two sources at least, in three parts at most."""
    monkeypatch.setattr(decoding, "_num_loops", lambda: 3)
    monkeypatch.setattr(decoding, "SOURCES_OF_A_LOOP", 2)


@pytest.mark.parametrize(
    "options", [{}, {"beam_size": 3}, {"beam_size": 2, "early_stopping": True}]
)
def test_any_number_of_sources(monkeypatch, in_parts, options):
    model = randomize(make_model())
    parts = {
        n: rows(model.generate(sources(model, n), max_length=10, **options)) for n in range(1, 9)
    }
    monkeypatch.setattr(decoding, "_num_loops", lambda: 1)
    model._generator.forget_functions()
    for number, found in parts.items():
        assert found == rows(model.generate(sources(model, number), max_length=10, **options))
    assert len({len(row) for row in parts[8]}) > 2, "this test needs different lengths"


def test_draws_and_tokens_that_are_told_are_of_the_whole(monkeypatch, in_parts):
    model, told = randomize(make_model()), {}

    def tell(number, ids):
        told.setdefault(number, []).extend(ids)

    drawn = model.generate(sources(model), max_length=10, temperature=1.0, seed=3).numpy()
    found = model.generate(sources(model), max_length=10, on_tokens=tell)
    assert [told[number] for number in range(6)] == rows(found)
    monkeypatch.setattr(decoding, "_num_loops", lambda: 1)
    model._generator.forget_functions()
    again = model.generate(sources(model), max_length=10, temperature=1.0, seed=3).numpy()
    np.testing.assert_array_equal(drawn, again)


def test_experts_are_noticed():
    sizes = {"hidden_size": 16, "num_heads": 2, "num_layers": 1}
    assert not _has_experts(CausalLM(23, **sizes))
    assert _has_experts(CausalLM(23, **sizes, moe_config={"expert_num": 2}))
