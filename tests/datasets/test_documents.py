"""Documents are read one by one from all kinds of files, and errors name the line."""

import gzip
import importlib.util
import json

import numpy as np
import pytest

from dtransformer.datasets import read_documents
from dtransformer.errors import InputError
from dtransformer.inputs.files import MEBIBYTE
from tests.datasets.input_errors import get_error_message

TEXTS = ["One.\nTwo.", "Quoi\u00a0?\u2028x", "last"]


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def documents(*args, **options):
    return list(read_documents(*args, **options))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("packed", [False, True])
def test_reads_documents_from_text_files(tmp_path, end, packed):
    text = f"{2 * end}One.{end}Two.{end} {end}{end}Quoi\u00a0?\u2028x{end}{end}last".encode()
    name, text = ("x.txt.gz", gzip.compress(text)) if packed else ("x.txt", text)
    path = written(tmp_path / name, text)
    assert documents([path]) == TEXTS
    assert documents([path, path], boundary="line")[2:4] == ["One.", "Two."]
    (everything,) = documents([path], boundary="file")
    assert everything.split() == ["One.", "Two.", "Quoi", "?", "x", "last"]
    assert documents([path], sentences=True) == [["One.", "Two."], [TEXTS[1]], ["last"]]


def test_large_file_is_read_in_blocks(tmp_path):
    """Some lines cross block boundaries, and one line is longer than a block."""
    lines = ["é" * n for n in (1, 5, MEBIBYTE // 2, 2 * MEBIBYTE, 3, 700_000, 0, 9)]
    path = written(tmp_path / "x.txt", "\n".join(lines))
    assert documents([path], boundary="line") == lines


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson.gz"])
def test_reads_documents_from_json_lines(tmp_path, name):
    lines = [json.dumps({"text": text, "more": {"a": [1]}}) for text in TEXTS]
    content = ("\n".join(lines) + "\n\n").encode()
    path = written(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    assert documents([path]) == TEXTS
    assert "no field 'body', only 'text, more'" in get_error_message(
        documents, [path], field="body"
    )
    assert "must be a text" in get_error_message(documents, [path], field="more")


def write_table(table, path):
    """Write a pyarrow table in the format of the file name."""
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
def test_reads_documents_from_arrow_and_parquet(tmp_path, name):
    pyarrow = pytest.importorskip("pyarrow")
    pairs = {"question": [*TEXTS, None] * 700, "answer": ["yes"] * 2800, "n": range(2800)}
    path = tmp_path / name
    write_table(pyarrow.table(pairs), path)
    assert documents([path], field="question") == [*TEXTS, ""] * 700
    assert documents([path], field=["question", "answer"])[2] == ["last", "yes"]
    assert "row 1 has no field 'text', only 'question, answer, n'" in get_error_message(
        documents, [path]
    )
    assert "'n' must be a text, got 0" in get_error_message(documents, [path], field="n")
    write_table(pyarrow.table([TEXTS, TEXTS], ["text", "text"]), two := tmp_path / f"two_{name}")
    assert "has two columns 'text'" in get_error_message(documents, [two])
    written(path, path.read_bytes()[:-9])
    data = path.read_bytes()
    if name != "x.parquet":  # Parquet stores the lengths of texts next to them.
        ends = np.cumsum([0, *(len(text.encode()) for text in TEXTS)]).astype("int32")[1:].tobytes()
        written(path, data.replace(ends, b"\xff" * len(ends), 1))
        assert str(path) in get_error_message(documents, [path], field="question")
    if name != "stream.arrow":  # A stream has no checked end.
        assert str(path) in get_error_message(documents, [path], field="question")
    written(path, path.read_bytes()[:300])
    assert str(path) in get_error_message(documents, [path], field="question")


def test_missing_pyarrow_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = written(tmp_path / "x.parquet", b"")
    assert "need pyarrow: pip install pyarrow" in get_error_message(documents, [path])


@pytest.mark.parametrize(
    "name, content, expected_error",
    [
        ("x.txt", None, ["does not exist"]),
        ("x.txt", b"good\n\nbad \xff\n", ["line 3", "0xff"]),
        ("x.txt", b"a\n" * 2**20 + b"\xff", [f"line {2**20 + 1}", "0xff"]),
        ("x.gz", gzip.compress(b"text\n" * 9, mtime=0)[:-9], ["gzip"]),
        ("x.jsonl", b'{"text": "a"}\n{"text": \n', ["line 2", "JSON"]),
        ("x.jsonl", b'{"text": "a"}\n["text"]\n', ["line 2", "a JSON object"]),
        ("x.json", b'[{"text": "a"}, "b"]\n', ["record 2", "one object per line"]),
        ("x.jsonl", b'{"text": "a"}\n{"text": "b \\ud83d c"}', ["line 2", "U+D83D is half of a"]),
        ("x.jsonl", b'{"text": "a", "text": "b"}', ["line 1", "repeated"]),
    ],
)
def test_errors_name_the_line(tmp_path, name, content, expected_error):
    path = tmp_path / name
    if content is not None:
        written(path, content)
    message = get_error_message(documents, [path])
    assert all(part in message for part in [str(path), *expected_error])


RECORDS = [
    {"instruction": "Add.", "input": "", "output": "Yes \N{GRINNING FACE}."},
    {"instruction": "Say it.", "input": "two words", "output": "One."},
    {"instruction": "Go.", "input": None, "output": "Gone."},
]


@pytest.mark.parametrize(
    "field", [["instruction", "input", "output"], ["instruction+input", "output"]]
)
@pytest.mark.parametrize("indent", [None, 2])
def test_joined_fields_become_lines_of_a_prompt(tmp_path, field, indent):
    """Instructions may have an optional input. Files may be one list of records."""
    expected = ["Add.", "Say it.\ntwo words", "Go."]
    content = json.dumps(RECORDS, indent=indent)
    if indent is None:
        content = "\n".join(map(json.dumps, RECORDS))
    result = documents([written(tmp_path / "x.json", content)], field=field)
    assert result == [[prompt, item["output"]] for prompt, item in zip(expected, RECORDS)]


def test_error_for_a_large_list_recommends_json_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("dtransformer.datasets.documents.MAX_DOCUMENT", 20)
    (tmp_path / "x.json").write_text('[{"text": "a"},\n{"text": "b"}]')
    with pytest.raises(InputError, match="x.json has more than 20 bytes of JSON. .*JSON lines"):
        list(read_documents([tmp_path / "x.json"]))


def test_invalid_options_are_refused(tmp_path):
    path = written(tmp_path / "x.txt", "a")
    assert "boundary='page'" in get_error_message(documents, [path], boundary="page")
    assert "has no fields a, b" in get_error_message(documents, [path], field=["a", "b"])
    assert "Cannot combine 2 fields" in get_error_message(
        documents, [path], field=["a", "b"], sentences=True
    )
