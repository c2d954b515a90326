"""A cut never leaves a record without its answer; such records are left out and counted."""

import json

import numpy as np
import pytest

from dtransformer.datasets.record_batches import prepared_lengths
from dtransformer.errors import InputError
from dtransformer.runs.config import load_config
from dtransformer.runs.tasks import make_task
from tests.runs.small_records import write, write_config

LENGTH = 32
LONG = "four five six " * 20  # more than LENGTH tokens


@pytest.fixture
def place(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(place, name, rows, part="dev", *settings):
    """Return the records of a task that are read from rows, as lists of token ids by side."""
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings_of_task = [f"data.{part}=rows.jsonl", f"data.length={LENGTH}", "data.longer=cut"]
    if name in ("chat", "preference"):
        settings_of_task += ["model.from=llama", "model.adapters=null"]
    if name == "chat":
        settings_of_task.append("data.packed=false")
    if name == "seq2seq":
        settings_of_task += ["tokenizer.folder=llama", "tokenizer.vocab_size=null"]
    task = make_task(load_config(write_config(name, place), [*settings_of_task, *settings]))
    task.read(None if part == "dev" else part)
    return task.records[part]


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def message(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize("part", ["dev", "train"])
@pytest.mark.parametrize("name", ["reward", "preference"])
@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(pair(LONG, "yes", "no"), id="prompt fills the row"),
        pytest.param(pair("Q: ", LONG + "yes", LONG + "no"), id="answers begin alike"),
        pytest.param(pair("Q: ", LONG, "Q"), id="kept"),
    ],
)
def test_pairs_without_different_answers_are_left_out(bad, name, part, place, capsys, request):
    good = [pair("Q: ", "yes", "no")] * 19
    result = read(place, name, [*good, bad], part)
    assert result.lengths.max() <= LENGTH
    printed = capsys.readouterr().out
    if "kept" in request.node.name:
        assert len(result) == 20 and f"Records ({part}): 1 of 20 records are longer" in printed
        assert "and are cut off" in printed and "left out" not in printed
        return
    assert len(result) == 19
    line = f"Records ({part}): 1 of 20 records would lose an answer if cut to {LENGTH} tokens"
    assert f"{line} and are left out. Increase `data.length`" in printed


def test_chats_without_a_learnt_token_are_left_out(place, capsys):
    answer = message("assistant", "yes")
    rows = [{"messages": [message("user", "or?"), answer]}] * 19
    rows.append({"messages": [message("user", LONG), answer]})
    first = {"messages": [message("user", "or?"), message("assistant", LONG), answer]}
    result = read(place, "chat", [*rows, first])
    assert len(result) == 20
    assert "1 of 21 records are longer than 32 tokens and are cut off" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_pairs_of_texts_without_a_second_text_are_left_out(name, place, capsys):
    label = "yes" if name == "classification" else 0.5
    rows = [{"text": "one", "text_pair": "two", "label": label}] * 18
    rows.append({"text": "one", "text_pair": LONG, "label": label})
    rows.append({"text": LONG, "text_pair": "two", "label": label})
    settings = ["data.labels=[yes, no]"] * (name == "classification")
    settings += ["tokenizer.folder=llama", "tokenizer.vocab_size=null"]
    result = read(place, name, rows, "train", *settings)
    assert len(result) == len(result.targets) == 19
    printed = capsys.readouterr().out
    assert "1 of 20 records are longer than 32 tokens and are cut off" in printed
    assert "1 of 20 records would lose an answer if cut to 32 tokens" in printed


def test_long_texts_of_other_tasks_are_only_cut(place):
    tokens = LONG.split()
    rows = {
        "seq2seq": {"prompt": LONG, "completion": LONG},
        "token_classification": {"tokens": tokens, "labels": ["yes"] * len(tokens)},
        "classification": {"text": LONG, "label": "yes"},
        "embedding": {"query": LONG, "positive": "one " + LONG},
    }
    for name, row in rows.items():
        with pytest.warns(UserWarning, match="and are cut off"):
            result = read(
                place, name, [row], "train", *["data.labels=[yes, no]"] * ("class" in name)
            )
        assert len(result) == 1 and result.lengths.max() == LENGTH, name


def test_file_in_which_every_record_is_too_long_raises_an_error(place):
    with (
        pytest.warns(UserWarning, match="1 of 1 records would lose an answer"),
        pytest.raises(InputError, match="all records of a file have more than data.length=32"),
    ):
        read(place, "reward", [pair(LONG, "yes", "no")], "train")


def test_targets_stay_with_their_records():
    """The kept indices name the records, whose targets follow."""
    learnt = np.arange(5), np.array([-100, -100, -100, 3, 4])
    rows = [[learnt], [(np.arange(3), np.array([-100, 1, 2]))], [learnt]]
    with pytest.warns(UserWarning, match="2 of 3"):
        saved, cut = prepared_lengths(rows, 3, "cut", "Records")
    assert saved == [1] and [len(ids) for ids, _ in cut[0]] == [3]
