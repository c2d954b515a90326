"""Pairs of text files stay aligned for every content, and errors name file and line."""

import gzip

import pytest

from dtransformer.datasets import (
    clean_pairs,
    read_lines,
    read_pairs,
    read_tsv,
)
from tests.datasets.input_errors import get_error_message

LINES = ["One.", "Quoi\u00a0?", "", "a\u2028b\u0085c", "last"]


def text(lines, end="\n"):
    return "".join(line + end for line in lines).encode()


@pytest.mark.parametrize(
    "name, content",
    [
        ("x.txt", text(LINES)),
        ("x.fr", text(LINES)[:-1]),  # No line break at the end.
        ("x.txt", text(LINES, "\r\n")),
        ("x.txt", b"\xef\xbb\xbf" + text(LINES)),  # A byte order mark.
        ("x.txt", text(f"  {line} \t" for line in LINES)),
        ("x.txt.gz", gzip.compress(text(LINES), mtime=0)),
    ],
)
def test_each_line_is_a_sentence(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_lines(tmp_path / name) == LINES


@pytest.mark.parametrize(
    "name, content, expected_error",
    [
        ("x.txt", None, ["does not exist"]),
        ("x.txt", b"good\nbad \xff\n", ["line 2", "0xff"]),
        ("x.gz", gzip.compress(text(LINES), mtime=0)[:-9], ["gzip"]),
        ("x.gz", b"no gzip at all", ["gzip"]),
        ("x.gz", gzip.compress(b"ok\n\xff", mtime=0), ["line 2", "0xff"]),
    ],
)
def test_malformed_file_is_refused(tmp_path, name, content, expected_error):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    message = get_error_message(read_lines, tmp_path / name)
    assert all(word in message for word in [name, *expected_error]), message


@pytest.mark.parametrize(
    "source, target, expected_error",
    [
        (["a", "b", "c"], ["x", "y"], ["3", "2", "source.txt", "target.txt"]),
        ([], [], ["source.txt", "no sentence"]),
        (["a", "b"], ["", ""], ["target.txt", "no sentence"]),
    ],
)
def test_files_without_pairs_are_refused(tmp_path, source, target, expected_error):
    paths = [tmp_path / "source.txt", tmp_path / "target.txt"]
    for path, lines in zip(paths, (source, target)):
        path.write_bytes(text(lines))
    message = get_error_message(read_pairs, *paths)
    assert all(word in message for word in expected_error), message


def test_reads_tab_separated_files(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(text(["a\tb", " c \t", "d\u00a0?\te"]))
    assert read_tsv(path) == (["a", "c", "d\u00a0?"], ["b", "", "e"])
    for lines, expected_error in (
        (["a\tb", "c"], "line 2"),
        (["a\tb\tc"], "line 1"),
        ([], "no sentence"),
    ):
        path.write_bytes(text(lines))
        assert expected_error in get_error_message(read_tsv, path)


@pytest.mark.parametrize(
    "pair, options, reason",
    [
        (("a b", "c d"), {}, "kept"),
        (("", "c"), {}, "empty"),
        (("a", " \t "), {}, "empty"),
        (("a", "b c d e"), {"max_ratio": 2}, "kept"),  # Short sentences may differ by three words.
        (("a", "b c d e f"), {"max_ratio": 2}, "uneven"),
        (("a b c d e", "b"), {"max_ratio": 2}, "uneven"),
        (("a b c d e", "b"), {"max_ratio": 5}, "kept"),
    ],
)
def test_cleaning_counts_removed_pairs_by_reason(pair, options, reason):
    sources, targets, counts = clean_pairs([pair[0]], [pair[1]], **options)
    assert counts[reason] == 1 and sum(counts.values()) == 1
    assert len(sources) == len(targets) == (reason == "kept")


def test_cleaning_keeps_order_and_no_break_spaces():
    sources = ["a  \t b", "quoi\u00a0\u00a0?", "a b"]
    targets = [" c ", "what?", "c"]
    saved = clean_pairs(sources, targets, distinct=True)
    assert saved[:2] == (["a b", "quoi\u00a0\u00a0?"], ["c", "what?"])
    assert (saved[2]["kept"], saved[2]["repeated"]) == (2, 1)
    assert clean_pairs(sources, targets)[2]["kept"] == 3
    assert "1 sources and 0 targets" in get_error_message(clean_pairs, ["a"], [])
