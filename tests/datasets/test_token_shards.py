"""Token shards restore their documents, are written completely or not at all, and detect damage."""

import json
import os
import shutil

import numpy as np
import pytest
import tokenizers

from dtransformer.datasets import (
    MaskedLanguageModelBatches,
    SubwordTokenizer,
    TokenShards,
    load_tokenizer,
    write_token_shards,
)
from dtransformer.datasets import shard_writer as writer
from dtransformer.errors import InputError
from tests.datasets.input_errors import get_error_message
from tests.datasets.small_shards import Letters, some_documents, some_shards

DOCUMENTS = some_documents(parts=3)
MANIFEST = "shards.json"


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("shard_tokens", [1, 100, 10**6])
@pytest.mark.parametrize("block", [1, 50, 10**6])
def test_documents_are_restored_by_index(tmp_path, shard_tokens, block, monkeypatch):
    monkeypatch.setattr(writer, "_BLOCK", block)
    shards = some_shards(tmp_path / "x", DOCUMENTS, shard_tokens)
    assert len(shards) == len(DOCUMENTS) and shards.has_parts
    letters = Letters()
    for index in (*range(len(DOCUMENTS)), -1):
        assert letters.decode(shards.parts(index)) == DOCUMENTS[index]
        assert letters.decode([shards[index]]) == ["".join(DOCUMENTS[index])]
        assert shards[index].dtype == np.int32
    assert shards.lengths().tolist() == [len("".join(parts)) for parts in DOCUMENTS]
    assert shards.num_tokens == sum(shards.lengths())
    sizes = [tokens for _, tokens in shards.shard_sizes]
    assert all(size >= shard_tokens for size in sizes[:-1])
    assert len(sizes) == {1: len(DOCUMENTS), 10**6: 1}.get(shard_tokens, len(sizes))
    with pytest.raises(IndexError):
        shards[len(shards)]


def test_documents_without_parts_or_tokens(tmp_path):
    shards = some_shards(tmp_path / "x", ["ab", "", "?!", "c", ""])
    assert [ids.tolist() for ids in shards] == [[4, 5], [6]] and shards.num_skipped == 3
    assert [part.tolist() for part in shards.parts(0)] == [[4, 5]] and not shards.has_parts
    shards = some_shards(tmp_path / "y", [["ab", ""], ["a", "bc"], []])
    assert len(shards) == 1 and shards.num_skipped == 2


def test_same_documents_give_the_same_bytes(tmp_path):
    item, other = (some_shards(tmp_path / name, DOCUMENTS) for name in "ab")
    assert contents(item.folder) == contents(other.folder)
    assert item.fingerprint == other.fingerprint
    assert some_shards(tmp_path / "c", DOCUMENTS[1:]).fingerprint != item.fingerprint


def test_tokenizer_is_saved_with_the_ids(tmp_path):
    texts = ["one two three", "two two"]
    tokenizer = SubwordTokenizer.train(texts, vocab_size=28)
    shards = write_token_shards(texts, tokenizer, tmp_path / "x")
    again = SubwordTokenizer.load(shards.tokenizer_folder)
    assert again.decode([shards[0], shards[1]]) == texts
    assert shards.vocab_size == 28
    assert shards.special_ids == {"pad": 0, "unk": 1, "start": 2, "end": 3}
    lower = SubwordTokenizer(tokenizer.vocabulary, lower_case=True)
    other = write_token_shards(texts, lower, tmp_path / "y")
    assert other.fingerprint != shards.fingerprint


def test_special_ids_of_a_published_tokenizer_are_saved(tmp_path):
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    words = [*special.values(), "one", "two", "three"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    published = tokenizers.Tokenizer(model)
    published.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = tmp_path / "published"
    folder.mkdir()
    published.save(str(folder / "tokenizer.json"))
    config = {f"{name}_token": token for name, token in special.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shards = write_token_shards(["one two", "three four"], load_tokenizer(folder), tmp_path / "x")
    assert shards.special_ids == {"pad": 0, "unk": 1, "mask": 4, "cls": 2, "sep": 3}
    assert [ids.tolist() for ids in shards] == [[5, 6], [7, 1]]
    assert load_tokenizer(shards.tokenizer_folder).mask_id == 4
    batches = MaskedLanguageModelBatches(
        shards, length=8, batch_size=1, rate=1, shuffle=False, all_positions=True
    )
    assert batches.vocab_size == 8
    inputs, labels = batches.row(0, 0)
    assert np.where(labels == -100, inputs["tokens"], labels).tolist() == [2, 5, 6, 3, 2, 7, 1, 3]


def test_large_vocabularies_use_uint32(tmp_path):
    class Large(Letters):
        vocab_size = 2**17

        def encode(self, texts):
            return [[2**17 - 1] for _ in texts]

    shards = write_token_shards(["a"], Large(), tmp_path / "x")
    assert shards[0].tolist() == [2**17 - 1]


def test_existing_files_are_not_replaced_without_overwrite(tmp_path):
    folder = tmp_path / "x"
    before = some_shards(folder, DOCUMENTS).fingerprint
    assert "is not empty" in get_error_message(write_token_shards, ["a"], Letters(), folder)
    assert TokenShards(folder).fingerprint == before
    shards = write_token_shards(["ab"], Letters(), folder, overwrite=True)
    assert len(shards) == 1 and len(list(folder.glob("shard-*"))) == 2
    (folder / "mine").write_text("")
    message = get_error_message(write_token_shards, ["a"], Letters(), folder, overwrite=True)
    assert "mine" in message
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "mine").write_text("")
    message = get_error_message(
        write_token_shards, ["a"], Letters(), tmp_path / "y", overwrite=True
    )
    assert "contains no token shards" in message
    assert [path.name for path in tmp_path.iterdir()] == ["x", "y"]


def test_failure_leaves_no_files(tmp_path, small_files):
    def broken():
        yield from ["ab"] * 1000
        raise KeyError

    with pytest.raises(KeyError):
        write_token_shards(broken(), Letters(), tmp_path / "x")
    with small_files(500), pytest.raises(InputError, match="cannot be written"):
        write_token_shards(["ab"] * 1000, Letters(), tmp_path / "x")
    assert "contain no text" in get_error_message(
        write_token_shards, ["", "?"], Letters(), tmp_path / "x"
    )
    assert "Put the string into" in get_error_message(
        write_token_shards, "a", Letters(), tmp_path / "x"
    )
    message = get_error_message(write_token_shards, ["a", ["b"]], Letters(), tmp_path / "x")
    assert "Document 2" in message
    assert not list(tmp_path.iterdir())


def use(folder):
    shards = TokenShards(folder)
    shards.verify()
    return [ids.tolist() for ids in shards]


@pytest.mark.parametrize(
    "change", ["missing", "shorter", "other", "header", "ids", "link", "no manifest"]
)
def test_error_for_damage_names_the_file(tmp_path, change):
    some_shards(tmp_path / "x", DOCUMENTS)
    folder = tmp_path / "y"
    shutil.copytree(tmp_path / "x", folder)
    path = folder / "shard-00001.tokens.npy"
    data = path.read_bytes()
    if change == "missing":
        path.unlink()
    elif change == "shorter":
        path.write_bytes(data[:-1])
    elif change == "other":
        path.write_bytes((folder / "shard-00000.tokens.npy").read_bytes().ljust(len(data), b" "))
    elif change == "header":
        path.write_bytes(data.replace(b"}", b"(", 1))
    elif change == "ids":
        path.write_bytes(data[:-2] + b"\xff\xff")
    elif change == "link":
        path.unlink()
        path.symlink_to(tmp_path / "x" / path.name)
    else:
        (folder / MANIFEST).unlink()
    assert str(folder) in get_error_message(use, folder)
    if change in ("ids", "header"):  # Reading without `verify` also detects these.
        assert str(folder) in get_error_message(lambda: list(TokenShards(folder)))
    if change == "ids":  # Reading without comparing checksums also detects it.
        shards = TokenShards(folder)
        assert "A token is 65535" in get_error_message(lambda: list(shards))


@pytest.mark.parametrize("kind", ["documents", "parts"])
def test_wrong_bounds_are_found_without_checksums(tmp_path, kind):
    some_shards(tmp_path / "x", DOCUMENTS)
    path = tmp_path / "x" / f"shard-00000.{kind}.npy"
    data = bytearray(path.read_bytes())
    data[-2 * 8] ^= 64  # The second to last bound, which is then greater than the number of tokens.
    path.write_bytes(data)
    assert path.name in get_error_message(lambda: TokenShards(tmp_path / "x").parts(0))


def test_every_byte_of_a_manifest_is_checked(tmp_path):
    some_shards(tmp_path / "x", DOCUMENTS)
    path = tmp_path / "x" / MANIFEST
    good = json.loads(path.read_text())
    name = "shard-00000.tokens.npy"
    for change in (
        {"version": 2},
        {"format": "other"},
        {"dtype": "float64"},
        {"shards": []},
        {"shards": [{**good["shards"][0], "tokens": -1}, *good["shards"][1:]]},
        {"shards": [{**good["shards"][0], "tokens": 7}, *good["shards"][1:]]},
        {"files": {}},
        {"files": {**good["files"], "../x": good["files"][name]}},
        {"vocab_size": 0},
    ):
        path.write_text(json.dumps({**good, **change}))
        assert str(tmp_path) in get_error_message(use, tmp_path / "x")
    path.write_text("[]")
    assert MANIFEST in get_error_message(use, tmp_path / "x")


def test_more_shards_than_open_files(tmp_path, monkeypatch):
    from dtransformer.datasets import token_shards

    monkeypatch.setattr(token_shards, "_MAX_OPEN_SHARDS", 2)
    shards = some_shards(tmp_path / "x", DOCUMENTS, shard_tokens=1)
    before = len(os.listdir("/proc/self/fd"))
    assert len(list(shards)) == len(DOCUMENTS)
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * 3
