"""Every text, also a compressed one, is read correctly or refused, with limited memory."""

import gzip
import json
import os
import re
import threading
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtransformer.datasets import read_lines
from dtransformer.inputs import text
from dtransformer.inputs.files import read_bytes
from tests.inputs.bounded import BOUNDED, read_or_reject, refusal

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


# Text.


@BOUNDED
@given(lines=st.lists(ANY_TEXT.map(lambda line: re.sub(r"[\r\n]", " ", line)), max_size=5))
@pytest.mark.parametrize("packed", [False, True])
def test_lines_are_restored(tmp_path, packed, lines):
    path = tmp_path / ("x.txt.gz" if packed else "x.txt")
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if packed else data)
    expected = [line.removeprefix("\ufeff") if not i else line for i, line in enumerate(lines)]
    assert read_lines(path) == [line.strip(text.WHITE_SPACE) for line in expected]


@BOUNDED
@given(data=st.binary(max_size=100))
@pytest.mark.parametrize("name", ["x.txt", "x.gz"])
def test_any_bytes_are_read_or_refused(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    lines = read_or_reject(read_lines, tmp_path / name)
    assert lines is None or all("\n" not in line and "\0" not in line for line in lines)


@pytest.mark.parametrize(
    "data, expected_error",
    [
        ("a\nb".encode("utf-16-le"), "UTF-16"),
        ("a".encode("utf-16"), "iconv -f utf-16 -t utf-8"),
        ("é\n".encode() + b"\xe9", "line 2: Byte 0xe9 at column 1 is not UTF-8"),
        ("é\n".encode() + b"\xe9", "drop such bytes with iconv -c"),
        (b"x\n" + b"a" * (text.MAX_LINE + 1), "line 2 has 131,073 characters"),
    ],
)
def test_invalid_text_is_refused(tmp_path, data, expected_error):
    (tmp_path / "x.txt").write_bytes(data)
    assert expected_error in refusal(read_lines, tmp_path / "x.txt")


@pytest.mark.parametrize("name", ["x.jsonl.zst", "x.txt.bz2", "x.XZ"])
def test_unsupported_archives_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"\xfd7zXZ\x00")
    assert "only .gz files are decompressed" in refusal(text.read_text_lines, tmp_path / name)


def test_only_files_and_pipes_are_read(tmp_path):
    assert "is neither a file nor a pipe" in refusal(read_bytes, "/dev/zero")
    assert "is a folder" in refusal(read_bytes, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert read_bytes(tmp_path / "pipe") == b""  # A pipe without a writer is empty.
    writer = threading.Thread(target=lambda: (tmp_path / "named").write_bytes(b"x" * 200_000))
    os.mkfifo(tmp_path / "named")
    descriptor = os.open(tmp_path / "named", os.O_RDWR)  # The pipe has a writer from the beginning.
    writer.start()
    threading.Timer(0.5, os.close, [descriptor]).start()
    assert len(read_bytes(tmp_path / "named")) == 200_000
    writer.join()


def test_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    (tmp_path / "x.txt").write_bytes(b"line\n" * 1000)
    assert "1,000 bytes" in refusal(read_bytes, tmp_path / "x.txt", 1000)
    monkeypatch.setattr(text, "free_memory", lambda: 1000)
    assert "half of the free memory" in refusal(read_lines, tmp_path / "x.txt")


# Archives.


def bomb(size, fill=b"\0"):
    """Return gzip that decompresses to `size` equal bytes."""
    packer = zlib.compressobj(9, wbits=31)
    chunk = fill * 2**20
    return b"".join(packer.compress(chunk) for _ in range(size // 2**20)) + packer.flush()


@pytest.mark.parametrize("fill", [b"a", b"\n", b"\0"])
def test_decompression_bomb_is_refused_early(tmp_path, fill):
    (tmp_path / "x.gz").write_bytes(bomb(2**27, fill))
    assert "bytes of gzip decompress to more than" in refusal(read_lines, tmp_path / "x.gz")


def test_gzip_members_are_concatenated(tmp_path):
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b"one\n") + gzip.compress(b"two\n") + b"\0" * 100)
    assert read_lines(path) == ["one", "two"]
    path.write_bytes(gzip.compress(b"one\n") + b"rest")
    assert "not a complete gzip file" in refusal(read_lines, path)


# Tokenizers.


def load_tokenizer(path):
    from dtransformer.datasets import SubwordTokenizer

    return SubwordTokenizer.load(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from dtransformer.datasets import SubwordTokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    SubwordTokenizer.train(["a cat", "un chat"], 28).save(path)
    return path


@pytest.mark.parametrize(
    "old, new, expected_error",
    [
        ('"version": "1.0"', '"version": Infinity', "Out of range float"),
        ('"version": "1.0"', '"version": ' + "9" * 5000, "5000 digits"),
        ('"version": "1.0"', '"version": "1.0", "version": "1.0"', "repeated"),
        ("{", "[" * 60_000 + "{", "brackets"),
    ],
)
@pytest.mark.tensorflow
def test_tokenizer_file_is_checked(folder, tmp_path, old, new, expected_error):
    words = (folder / "tokenizer.json").read_text()
    assert old in words
    (tmp_path / "tokenizer.json").write_text(words.replace(old, new, 1))
    assert expected_error in refusal(load_tokenizer, tmp_path)


@pytest.mark.tensorflow
@BOUNDED
@given(data=st.data())
def test_vocabulary_damaged_anywhere_is_read_or_refused(folder, tmp_path, data):
    content = json.loads((folder / "tokenizer.json").read_text())
    pieces = list(content["model"]["vocab"])
    pieces[data.draw(st.integers(0, len(pieces) - 1))] = data.draw(
        ANY_TEXT | st.sampled_from(["a" * 257, "##", "▁", "\ufffd", "a\0", "##" + "a" * 255])
    )
    content["model"]["vocab"] = {piece: index for index, piece in enumerate(pieces)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = read_or_reject(load_tokenizer, tmp_path)
    if tokenizer is not None:
        assert len(set(tokenizer.vocabulary)) == tokenizer.vocab_size == 28
