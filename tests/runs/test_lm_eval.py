"""Scores of the evaluation harness match `transformers`."""

import importlib.machinery
import importlib.util
import pathlib
import sys
import types

import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.models import CausalLM
from dtransformer.parallel.collectives.objects import on_all
from dtransformer.runs.lm_eval import harness_model
from tests.runs.small_records import NUMBERS, write
from tests.shared_runs import on_ranks

MOST = 16


def request(*args):
    return types.SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("harness")
    write(place)
    return place / "llama"


def make_harness(folder, monkeypatch):
    """Return a model for the harness, with a plain base class if the package is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules["lm_eval.api.model"].LM = type("LM", (), {})
    return harness_model(folder, batch_size=2, max_length=MOST)


@pytest.fixture
def harness(folder, monkeypatch):
    return make_harness(folder, monkeypatch)


@pytest.fixture(scope="module")
def reference(folder):
    """Function (ids, count) that scores the last ids with `transformers`: log p, and if greedy."""
    torch = pytest.importorskip("torch", reason="the reference environment has PyTorch")
    transformers = pytest.importorskip("transformers", reason="as PyTorch")
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()

    def scores(ids, index):
        with torch.no_grad():
            table = model(torch.tensor(ids[None, :-1])).logits[0].double().log_softmax(-1).numpy()
        log_probabilities = table[np.arange(len(ids) - 1), ids[1:]][-index:]
        return log_probabilities.sum(), bool((table.argmax(-1)[-index:] == ids[1:][-index:]).all())

    return scores


def encode(harness, text):
    return harness._tokenizer.encode([text]).to_list()[0]


def test_log_likelihood_of_continuations_matches_transformers(harness, reference):
    pairs = [
        ("one and two?", " three"),
        ("", "seven"),
        ("zero ", "one"),
        ("four " * 9, "five and six"),
    ]
    result = harness.loglikelihood([request(*pair) for pair in pairs])
    for (context, text), (total, is_greedy) in zip(pairs, result, strict=True):
        full, before = encode(harness, context + text), encode(harness, context.rstrip())
        if not context:  # This tokenizer adds no special tokens.
            full, before = [1, *full], [1]
        ids = np.array(full[-(MOST + 1) :])
        expected = reference(ids, min(len(full) - len(before), MOST))
        assert total == pytest.approx(expected[0], rel=1e-5) and is_greedy == expected[1]


def test_rolling_log_likelihood_uses_windows(harness, reference):
    texts = ["one and two and three and four and five and six and seven?" * 2, "one"]
    result = harness.loglikelihood_rolling([request(text) for text in texts])
    for text, total in zip(texts, result, strict=True):
        ids, expected = encode(harness, text), 0.0
        full = np.array([1, *ids])
        # Each token depends on the previous tokens of its window.
        for end in range(1, len(ids) + 1):
            last = min(-(-end // MOST) * MOST, len(ids))
            first = max(0, last - MOST)
            expected += reference(full[first : end + 1], 1)[0]
        assert total == pytest.approx(expected, rel=1e-5)
    assert len(encode(harness, texts[0])) > 2 * MOST


def test_generate_until_stops_at_the_given_texts(harness):
    options = {"max_gen_toks": 4, "do_sample": False, "temperature": 0.0}
    (full,) = harness.generate_until([request("one and two?", {**options, "until": []})])
    assert full
    (cut,) = harness.generate_until([request("one and two?", {**options, "until": full[1:3]})])
    assert cut == full[:1]


def test_long_contexts_are_truncated_from_the_left(harness):
    """The number of learned positions also limits contexts."""
    network = CausalLM(
        290, hidden_size=8, num_heads=2, num_layers=1, max_length=MOST, start_id=None
    )
    network.build()
    learned = type(harness)(network, harness._tokenizer, 2, MOST)
    context, options = "zero and one " * 6 + "and four?", {"max_gen_toks": 4}
    last = encode(harness, context)[4 - MOST :]
    end = harness._tokenizer.decode_all(last)
    assert len(encode(harness, context)) > MOST and encode(harness, end) == last
    (text,) = learned.generate_until([request(context, options)])
    assert [text] == learned.generate_until([request(end, options)])


def test_reports_the_missing_package(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install lm_eval"):
        harness_model(folder)


@on_ranks("dp2@2x1")
def test_data_ranks_divide_the_requests_and_receive_all_results(folder, layout):
    place = pathlib.Path(folder) / f"harness-{layout.name}"
    (place / "llama").mkdir(parents=True, exist_ok=True)
    write(place)
    on_all(lambda: None, "written")
    with pytest.MonkeyPatch.context() as patched:
        harness = make_harness(place / "llama", patched)
    pairs = [request("one and two?", f" {word}") for word in NUMBERS[:5]]
    texts = [request(f"{word} and one") for word in NUMBERS[:3]]
    prompts = [request(word, {"max_gen_toks": 3}) for word in NUMBERS[:3]]
    expected = harness._score([harness._pair(*pair.args) for pair in pairs])
    scores = harness.loglikelihood(pairs)
    assert [greedy for _, greedy in scores] == [greedy for _, greedy in expected]
    totals = [total for total, _ in scores]
    assert totals == pytest.approx([total for total, _ in expected], rel=1e-5)
    rolling = harness.loglikelihood_rolling(texts)
    assert rolling == pytest.approx(harness._score_windows(texts), rel=1e-5)
    assert harness.generate_until(prompts) == harness._generate(prompts)


@on_ranks("mp2@1x2")
def test_layouts_that_divide_the_network_are_refused(folder):
    with (
        pytest.raises(InputError, match="Remove all degrees except `data_parallel`"),
        pytest.MonkeyPatch.context() as patched,
    ):
        make_harness(folder, patched)
