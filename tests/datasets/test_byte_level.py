"""A tokenizer trained for language models restores every character of a text."""

import json
import pathlib
import subprocess
import sys

import pytest

from dtransformer.datasets import SubwordTokenizer, load_tokenizer, train_byte_level
from tests.datasets.input_errors import get_error_message

CODE = "def f(x):\n\tif x:\n\n        return  x\t# no,  really \n\n\n    y = 'é 猫 😀'\r\n  \n"
SOURCES = [path.read_text(encoding="utf-8") for path in pathlib.Path(__file__).parent.glob("*.py")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_level(SOURCES, vocab_size=600)


def test_white_space_and_unseen_characters_are_restored(tokenizer):
    texts = [CODE, *SOURCES, " ", "\n", "", "\u2028\x00\ufffd", " a", "a ", "<|end|>"]
    ids = tokenizer.encode(texts)
    assert tokenizer.decode(ids) == texts
    assert tokenizer.unk_id not in ids.flat_values.numpy()
    assert len(ids[1]) < 0.7 * len(SOURCES[0].encode())
    # The subword tokenizer for translation restores words only.
    words = SubwordTokenizer.train([CODE], vocab_size=80)
    assert words.decode(words.encode([CODE])) == [" ".join(CODE.split())]


def test_sizes_and_special_ids(tokenizer):
    special = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.start_id, tokenizer.end_id)
    assert special == (0, 1, 2, 3) and tokenizer.stop_ids == (3,)
    assert tokenizer.vocab_size == 600
    assert train_byte_level(["a b"], vocab_size=8000, allow_smaller=True).vocab_size == 260
    assert tokenizer.encode_prompts(["a"]).to_list() == [[2, *tokenizer.encode(["a"]).to_list()[0]]]
    assert train_byte_level(["A\n B"], 260, lower_case=True).decode([[]]) == [""]


def test_small_vocabulary_contains_only_the_bytes_of_the_texts():
    tokenizer = train_byte_level(["one\n\ttwo", "two  one"], vocab_size=17)
    texts = ["two\n\n\tone  two", "wet"]
    assert tokenizer.decode(tokenizer.encode(texts)) == texts
    assert tokenizer.encode(["z"]).to_list() == [[tokenizer.unk_id]]


def test_error_for_a_wrong_size_contains_a_valid_size():
    for text, wrong in (("one two", 9), ("one two", 500)):
        expected_error = get_error_message(train_byte_level, [text], wrong)
        size = int(expected_error.split(" pieces")[0].split()[-1])
        assert train_byte_level([text], size).vocab_size == size
    assert "empty" in get_error_message(train_byte_level, ["", " \n"], 300)


def test_training_is_deterministic(tokenizer, tmp_path):
    script = (
        "import sys, json; from dtransformer.datasets import train_byte_level;"
        "train_byte_level(json.load(sys.stdin), 600).save(sys.argv[1])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "other")]
    subprocess.run(command, input=json.dumps(SOURCES), check=True, text=True)
    tokenizer.save(tmp_path / "own")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_saved_tokenizer_matches_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [CODE, *(text for text in SOURCES if "<|" not in text)]
    ids = tokenizer.encode_prompts(texts).to_list()
    assert [reference.encode(text) for text in texts] == ids
    assert reference.batch_decode(ids, skip_special_tokens=True) == texts
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.encode(SOURCES)) == SOURCES
    assert loaded.encode_prompts(["<|end|>"]).to_list() == [[2, 3]]
    assert loaded.encode_prompts(texts).to_list() == ids and loaded.decode(ids) == texts
