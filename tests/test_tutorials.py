"""Tutorials run from top to bottom at a small scale, including files and commands."""

import json

import keras
import pytest

import dtransformer
from tests.doc_pages import ROOT, page_name, replaced
from tests.page_runner import run_page

PAGES = [*sorted(ROOT.glob("docs/start/*.md")), *sorted(ROOT.glob("docs/tutorials/*.md"))]
EMBEDDED = ROOT / "examples/wmt14/embedded.yaml"
SMALL = {
    "start/first-training.md": {
        "10000": "300",
        "vocab_size: 512": "vocab_size: 300",
        "epochs: 2": "epochs: 1",
        "tokens 24": "tokens 4",
        "epochs=8": "epochs=1",
        "1024": "64",
        "num_layers: 2": "num_layers: 1",
        "num_layers=2": "num_layers=1",
    },
    "start/multi-gpu.md": {"epochs=3": "epochs=1", "1024": "64", "num_layers=2": "num_layers=1"},
    "tutorials/gpt.md": {
        "data/lm\n": "data/lm --sentences 4000\n",
        "vocab_size: 512": "vocab_size: 300",
        "hidden_size: 128": "hidden_size: 16",
        "num_layers: 3": "num_layers: 1",
        "epochs: 2": "epochs: 1",
        "tokens 24": "tokens 4",
    },
    "tutorials/chat-lora.md": {
        "range(10)": "range(4)",
        "[:40]": "[:4]",
        "[40:]": "[4:]",
        "sentence_pairs(500)": "sentence_pairs(20)",
        "epochs: 30": "epochs: 1",
        "epochs: 24": "epochs: 1",
        "hidden_size: 128": "hidden_size: 16",
        "num_layers: 2": "num_layers: 1",
        "batch_size: 8": "batch_size: 2",
    },
    "tutorials/dpo.md": {"epochs: 3": "epochs: 1", "batch_size: 10": "batch_size: 2"},
    "tutorials/classification.md": {
        "2_500": "60",
        "2_000": "50",
        "epochs: 10": "epochs: 1",
        "batch_size: 50": "batch_size: 10",
        "num_layers: 2": "num_layers: 1",
    },
    "tutorials/embeddings.md": {
        "6_500": "60",
        "6_000": "40",
        "vocab_size: 1000": "vocab_size: 300",
        "batch_size: 100": "batch_size: 10",
        "epochs: 5": "epochs: 1",
        "num_layers: 2": "num_layers: 1",
    },
    "tutorials/keras-model.md": {"2_560": "160", "epochs=3": "epochs=1"},
    "tutorials/wmt14.md": {
        "--embedded": "--embedded --num-train 300",
        "--config examples/wmt14/embedded.yaml": f"--config {EMBEDDED} --set training.epochs=1 "
        "training.bleu_sentences=0 model.hidden_size=16 model.encoder_layers=1 model.decoder_layers=1",
    },
}
"""Replacements that keep a page fast. Each old text must exist on the page."""

BEFORE = {"tutorials/dpo.md": "tutorials/chat-lora.md"}
"""Pages that start with the files of another page."""

PARSED_ONLY = {"tutorials/wmt14.md": ("data/wmt14", "--faithful", "wmt14.yaml", "evaluate")}
"""Commands that need data from elsewhere or take hours. `test_doc_blocks.py` checks their options."""

NOTEBOOK = ROOT / "examples/quickstart.ipynb"
NOTEBOOK_SMALL = {
    "sentence_pairs(6_000)": "sentence_pairs(300)",
    "vocab_size=512": "vocab_size=300",
    "hidden_size=128": "hidden_size=16",
    "num_layers=2": "num_layers=1",
    "512, hidden": "300, hidden",
    "epochs=2": "epochs=1",
}


@pytest.fixture(autouse=True)
def restore_one_device():
    """Return to one device and the default layout after each test."""
    yield
    dtransformer.init(dtransformer.TransformerOpParallelConfig())


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = page_name(page)
    text = page.read_text("utf-8")
    missing = [old for old in SMALL.get(name, {}) if old not in text]
    assert not missing, f"SMALL replaces texts that {name} does not contain: {missing}"
    if name in BEFORE:
        run_page(ROOT / "docs" / BEFORE[name], SMALL[BEFORE[name]])
    run_page(page, SMALL.get(name, {}), PARSED_ONLY.get(name, ()))


def test_quickstart_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    missing = [old for old in NOTEBOOK_SMALL if old not in "\n".join(codes)]
    assert not missing, f"NOTEBOOK_SMALL replaces texts that the notebook lacks: {missing}"
    names = {"__name__": "__main__"}
    for code in codes:
        exec(compile(replaced(code, NOTEBOOK_SMALL), "quickstart.ipynb", "exec"), names)
    assert isinstance(names["model"], keras.Model)
    assert names["losses"]["one device"] == pytest.approx(names["losses"]["two devices"], rel=1e-4)
