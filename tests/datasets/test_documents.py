"""Documents come from files of every kind one by one, and what is wrong is told with its line."""

import gzip
import importlib.util
import json

import numpy as np
import pytest

from dtransformer.datasets import read_documents
from dtransformer.errors import InputError
from dtransformer.inputs.files import MEBIBYTE
from tests.datasets.refused import refused

TEXTS = ["One.\nTwo.", "Quoi\u00a0?\u2028x", "last"]


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def documents(*args, **options):
    return list(read_documents(*args, **options))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_text_files(tmp_path, end, packed):
    text = f"{2 * end}One.{end}Two.{end} {end}{end}Quoi\u00a0?\u2028x{end}{end}last".encode()
    name, text = ("x.txt.gz", gzip.compress(text)) if packed else ("x.txt", text)
    path = written(tmp_path / name, text)
    assert documents([path]) == TEXTS
    assert documents([path, path], boundary="line")[2:4] == ["One.", "Two."]
    (everything,) = documents([path], boundary="file")
    assert everything.split() == ["One.", "Two.", "Quoi", "?", "x", "last"]
    assert documents([path], sentences=True) == [["One.", "Two."], [TEXTS[1]], ["last"]]


def test_a_large_file_is_read_block_by_block(tmp_path):
    """Lines that lie across the ends of blocks, and a line longer than a block."""
    lines = ["é" * n for n in (1, 5, MEBIBYTE // 2, 2 * MEBIBYTE, 3, 700_000, 0, 9)]
    path = written(tmp_path / "x.txt", "\n".join(lines))
    assert documents([path], boundary="line") == lines


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson.gz"])
def test_json_lines(tmp_path, name):
    lines = [json.dumps({"text": text, "more": {"a": [1]}}) for text in TEXTS]
    content = ("\n".join(lines) + "\n\n").encode()
    path = written(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    assert documents([path]) == TEXTS
    assert "no 'body', it has 'text, more'" in refused(documents, [path], field="body")
    assert "expected a text" in refused(documents, [path], field="more")


def write_table(table, path):
    """Write a table of pyarrow as a file of its name's kind."""
    import pyarrow
    from pyarrow import parquet

    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    else:
        is_stream = "stream" in path.name
        open_file = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
        with open_file(path, table.schema) as writer:
            writer.write_table(table)


@pytest.mark.parametrize("name", ["x.parquet", "file.arrow", "stream.arrow"])
def test_arrow_and_parquet(tmp_path, name):
    pyarrow = pytest.importorskip("pyarrow")
    pairs = {"question": [*TEXTS, None] * 700, "answer": ["yes"] * 2800, "n": range(2800)}
    path = tmp_path / name
    write_table(pyarrow.table(pairs), path)
    assert documents([path], field="question") == [*TEXTS, ""] * 700
    assert documents([path], field=["question", "answer"])[2] == ["last", "yes"]
    assert "row 1 has no 'text', it has 'question, answer, n'" in refused(documents, [path])
    assert "'n' is 0, expected a text" in refused(documents, [path], field="n")
    write_table(pyarrow.table([TEXTS, TEXTS], ["text", "text"]), two := tmp_path / f"two_{name}")
    assert "has two columns 'text'" in refused(documents, [two])
    written(path, path.read_bytes()[:-9])
    data = path.read_bytes()
    if name != "x.parquet":  # whose texts have their lengths beside them
        ends = np.cumsum([0, *(len(text.encode()) for text in TEXTS)]).astype("int32")[1:].tobytes()
        written(path, data.replace(ends, b"\xff" * len(ends), 1))
        assert str(path) in refused(documents, [path], field="question")
    if name != "stream.arrow":  # whose end says nothing
        assert str(path) in refused(documents, [path], field="question")
    written(path, path.read_bytes()[:300])
    assert str(path) in refused(documents, [path], field="question")


def test_pyarrow_is_asked_for_where_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = written(tmp_path / "x.parquet", b"")
    assert "need pyarrow: pip install pyarrow" in refused(documents, [path])


@pytest.mark.parametrize(
    "name, content, told",
    [
        ("x.txt", None, ["does not exist"]),
        ("x.txt", b"good\n\nbad \xff\n", ["line 3", "0xff"]),
        ("x.txt", b"a\n" * 2**20 + b"\xff", [f"line {2**20 + 1}", "0xff"]),
        ("x.gz", gzip.compress(b"text\n" * 9, mtime=0)[:-9], ["gzip"]),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', ["line 2", "JSON"]),
        ("x.jsonl", b'{"text": "a"}\n["text"]\n', ["line 2", "an object"]),
        ("x.json", b'[{"text": "a"}, "b"]\n', ["record 2", "give JSON lines"]),
        ("x.jsonl", b'{"text": "a"}\n{"text": "b \\ud83d c"}', ["line 2", "U+D83D is half of a"]),
        ("x.jsonl", b'{"text": "a", "text": "b"}', ["line 1", "twice"]),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path, name, content, told):
    path = tmp_path / name
    if content is not None:
        written(path, content)
    message = refused(documents, [path])
    assert all(part in message for part in [str(path), *told])


RECORDS = [
    {"instruction": "Add.", "input": "", "output": "Yes \N{GRINNING FACE}."},
    {"instruction": "Say it.", "input": "two words", "output": "One."},
    {"instruction": "Go.", "input": None, "output": "Gone."},
]


@pytest.mark.parametrize(
    "field", [["instruction", "input", "output"], ["instruction+input", "output"]]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_fields_that_may_be_empty_are_lines_of_a_prompt(tmp_path, field, indent):
    """As of instructions with an optional input; files may be one list of records."""
    expected = ["Add.", "Say it.\ntwo words", "Go."]
    content = json.dumps(RECORDS, indent=indent)
    if indent is None:
        content = "\n".join(map(json.dumps, RECORDS))
    found = documents([written(tmp_path / "x.json", content)], field=field)
    assert found == [[prompt, one["output"]] for prompt, one in zip(expected, RECORDS)]


def test_a_list_that_is_too_large_is_to_be_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("dtransformer.datasets.documents.MAX_DOCUMENT", 20)
    (tmp_path / "x.json").write_text('[{"text": "a"},\n{"text": "b"}]')
    with pytest.raises(InputError, match="x.json has more than 20 bytes of JSON: .*JSON lines"):
        list(read_documents([tmp_path / "x.json"]))


def test_options_that_cannot_be(tmp_path):
    path = written(tmp_path / "x.txt", "a")
    assert "boundary is 'page'" in refused(documents, [path], boundary="page")
    assert "has no fields a, b" in refused(documents, [path], field=["a", "b"])
    assert "parts of one kind" in refused(documents, [path], field=["a", "b"], sentences=True)
