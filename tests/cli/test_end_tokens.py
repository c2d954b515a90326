"""Texts end at every known end token, from a published folder, a run and its export."""

import json
import shutil

import numpy as np
import pytest
import yaml

from dtransformer.cli import main
from dtransformer.datasets import load_tokenizer
from dtransformer.models import from_pretrained, save_pretrained
from tests.cli import test_generate

folder = test_generate.folder
LENGTH, PROMPT = 12, "The quick"


@pytest.fixture(scope="module")
def greedy(folder):
    """The prompt's ids and the ids after it, without any end."""
    prompt = load_tokenizer(folder).encode_prompts([PROMPT]).to_list()
    ids = from_pretrained(folder).generate(prompt, LENGTH, stop_ids=()).numpy()[0].tolist()
    assert len(ids) == LENGTH and not {1, 2} & set(ids)
    return prompt, ids


def with_ends(folder, target, **files):
    """Copy the folder with end ids in its JSON files."""
    shutil.copytree(folder, target)
    for name, ids in files.items():
        path = target / f"{name}.json"
        fields = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**fields, "eos_token_id": ids}))
    return target


def generated(model, capsys):
    capsys.readouterr()
    options = ["--model", str(model), "--max-new-tokens", str(LENGTH), "--prompt", PROMPT]
    assert main(["generate", *options]) == 0
    text = capsys.readouterr().out
    assert main(["generate", *options, "--stream"]) == 0
    assert capsys.readouterr().out == text
    return text.removesuffix("\n")


@pytest.mark.parametrize(
    "files",
    [
        {"config": lambda end: end},
        {"config": lambda end: [2, end]},
        {"generation_config": lambda end: [end], "config": lambda end: 2},
        {"generation_config": lambda end: 2, "config": lambda end: [2, end]},
    ],
)
def test_texts_end_at_the_ids_of_config_and_generation_config(
    files,
    folder,
    greedy,
    tmp_path,
    capsys,
):
    _, ids = greedy
    place = next(x for x in range(3, LENGTH) if ids[x] not in ids[:x])
    files = {name: ends(ids[place]) for name, ends in files.items()}
    ended = with_ends(folder, tmp_path / "ended", **files)
    expected = load_tokenizer(folder).decode([ids[:place]])[0]
    assert generated(ended, capsys) == expected
    assert set(load_tokenizer(ended).stop_ids) == {2, ids[place]}


def test_run_stops_where_its_export_and_transformers_stop(
    folder,
    greedy,
    tmp_path,
    capsys,
    monkeypatch,
):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    prompt, ids = greedy
    place = next(x for x in range(3, LENGTH) if ids[x] not in ids[:x])
    with_ends(folder, tmp_path / "base", config=[260, ids[place]])
    monkeypatch.chdir(tmp_path)
    template = "additional_chat_templates/tool_use.jinja"
    (tmp_path / "base" / template).parent.mkdir()
    (tmp_path / "base" / template).write_text("{{ tools | tojson }}")
    save_pretrained(from_pretrained("base"), "copy")
    (tmp_path / "text.txt").write_text("The quick brown fox.\n\n" * 20)
    config = {
        "task": "causal_lm",
        "data": {"train": "text.txt", "length": 8},
        "model": {"from": "base"},
        "training": {"max_steps": 1, "batch_size": 1, "learning_rate": 1e-12},
        "export": {"folder": "export"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert main(["train", "--config", "run.yaml", "--run", "run"]) == 0
    texts = {name: generated(name, capsys) for name in ("base", "run", "export")}
    expected = load_tokenizer(folder).decode([ids[:place]])[0]
    assert texts == dict.fromkeys(texts, expected)
    for name in ("run/tokenizer", "export", "copy"):
        assert (tmp_path / name / template).read_text() == "{{ tools | tojson }}"
    model = transformers.AutoModelForCausalLM.from_pretrained("export")
    result = model.generate(torch.tensor(prompt), max_new_tokens=LENGTH, do_sample=False)
    np.testing.assert_array_equal(result.numpy()[0, len(prompt[0]) :], ids[: place + 1])
    assert {2, 260, ids[place]} == set(model.generation_config.eos_token_id)
