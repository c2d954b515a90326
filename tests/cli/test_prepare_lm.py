"""`prepare --lm` converts files to token shards, and rejects wrong options in one line."""

import json

import pytest

from dtransformer.cli import main
from dtransformer.datasets import TokenShards, load_tokenizer


@pytest.fixture
def files(tmp_path):
    text, lines = tmp_path / "some.txt", tmp_path / "pairs.jsonl"
    text.write_text("one two three\nthree\n\ntwo\n")
    rows = [{"prompt": "one", "answer": "two"}, {"prompt": "two", "answer": "three"}]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return text, lines


def prepare(*arguments):
    return main(["prepare", *map(str, arguments)])


def test_prepare_lm_writes_token_shards(files, tmp_path, capsys):
    text, lines = files
    out, pairs = tmp_path / "out", tmp_path / "pairs"
    assert prepare("--lm", "--input", text, "--train-tokenizer", 20, "--out", out) == 0
    assert "tokens in 2 documents, 1 shards" in capsys.readouterr().out
    tokenizer = load_tokenizer(out / "tokenizer")
    assert tokenizer.vocab_size == 20
    assert tokenizer.decode(list(TokenShards(out))) == ["one two three\nthree", "two"]
    options = ["--field", "prompt", "answer", "--tokenizer", out / "tokenizer"]
    assert prepare("--lm", "--input", lines, *options, "--out", pairs, "--shard-tokens", 1) == 0
    shards = TokenShards(pairs)
    assert tokenizer.decode(shards.parts(1)) == ["two", "three"]
    assert len(shards.shard_sizes) == 2
    assert prepare("--lm", "--input", lines, *options, "--out", pairs) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert prepare("--lm", "--input", lines, *options, "--out", pairs, "--overwrite") == 0
    options = ["--documents", "line", "--sentences", "--tokenizer", out / "tokenizer"]
    assert prepare("--lm", "--input", text, *options, "--out", tmp_path / "lines") == 0
    assert len(TokenShards(tmp_path / "lines")) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        (["--lm"], "--lm requires --input"),
        (["--lm", "--input", "some.txt"], "--tokenizer FOLDER or --train-tokenizer SIZE"),
        (["--embedded", "--field", "text"], "--field requires --lm"),
        (["--embedded", "--lm"], "not allowed with"),
        (["--lm", "--input", "some.txt", "--seed", "0"], "--seed requires --embedded"),
        (["--lm", "--input", "some.txt", "--num-train", "3"], "--num-train requires --embedded"),
        (["--lm", "--input", "none.txt", "--train-tokenizer", "26"], "none.txt does not exist"),
        (["--lm", "--input", "some.txt", "--tokenizer", "none"], "none does not exist"),
        (["--lm", "--input", "some.txt", "--train-tokenizer", "9"], "an integer from 16"),
    ],
)
def test_prepare_lm_rejects_wrong_options(files, options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert prepare(*options, "--out", "out") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()
