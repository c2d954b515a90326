"""The WMT14 example reads SGM files exactly, and errors name the line."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtransformer.datasets import read_documents, read_pairs
from examples.wmt14.preprocess import parse_sgm, read_sgm_pairs
from tests.datasets.input_errors import get_error_message
from tests.inputs.bounded import BOUNDED, read_or_reject

TRICKY = [
    "Plain.",
    "Salt & pepper, 3 < 4 > 2 &amp;",
    "Quoi\u00a0? \u00ab\u202fOui\u202f\u00bb",
    "one\u0085line \u2028 still \u2029 one \x0b\x0c\x1c line",
    "\u00a0a no-break space at both ends\u00a0",
    "tab\tinside",
    "",
]
SGM_PARTS = st.sampled_from(
    [
        '<seg id="1">',
        "</seg>",
        "<seg",
        "<SEG id=1>",
        "a",
        " ",
        "<doc>",
        "\n",
        "\r\n",
        "<",
        ">",
        "\t",
    ]
)


def sgm(*lines, end=b"\n"):
    return end.join(line if isinstance(line, bytes) else line.encode() for line in lines) + end


def document(segments):
    """Return the lines of a document."""
    rows = [f'<seg id="{index}">{text}</seg>' for index, text in enumerate(segments, start=1)]
    return ['<refset trglang="fr" setid="s">', '<doc docid="s-1">', *rows, "</doc>", "</refset>"]


def read_segments(path):
    return [text for text, tag in parse_sgm(path) if tag]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_segments_of_documents_are_read(tmp_path, end):
    path = tmp_path / "x.sgm"
    path.write_bytes(sgm(*document(TRICKY), end=end))
    assert read_segments(path) == TRICKY


@pytest.mark.parametrize(
    "line, segments",
    [
        ('<seg id="1">a</seg>', ["a"]),
        (' <seg id="1">indented</seg>', ["indented"]),
        ('<seg id="1" x="2"> a \t</seg>  ', ["a"]),
        ('<seg id="1">a > b, <i>c</i></seg>', ["a > b, <i>c</i>"]),
        ('<seg id="1">\u00a0a</seg>', ["\u00a0a"]),
        ("<hl> <p>", []),
        ("<segment>", []),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_lines_are_segments_or_tags(tmp_path, line, segments, end):
    path = tmp_path / "x.sgm"
    path.write_bytes(sgm("<doc>", line, "</doc>", end=end))
    assert read_segments(path) == segments


@pytest.mark.parametrize(
    "content, expected_error",
    [
        (None, ["x.sgm", "does not exist"]),
        (sgm("<doc>", b'<seg id="1">caf\xe9</seg>'), ["x.sgm", "line 2", "0xe9", "UTF-8"]),
        (sgm("<doc>", '<seg id="1">a</seg>', '<seg id="2">b'), ["x.sgm", "line 3", "</seg>"]),
        (sgm("<doc>", '<seg id="1"'), ["x.sgm", "line 2"]),
        *(
            (sgm("<doc>", '<seg id="1">a</seg>', line), ["x.sgm", "line 3", "one segment"])
            for line in (
                '<seg id="2">two</seg><seg id="3">on a line</seg>',
                '<SEG ID="2">upper case</SEG>',
                '<seg  id="2">two spaces</seg>',
                '<hl><seg id="2">after a tag</seg></hl>',
                '<seg id="2">a</seg> rest',
                "<seg>without an id</seg>",
                "no tag at all",
                "</seg>",
            )
        ),
        (sgm("<doc>", '<seg id="1">a</seg>').decode().encode("utf-16-le"), ["line 1", "UTF-16"]),
    ],
)
def test_error_for_a_malformed_file_names_the_line(tmp_path, content, expected_error):
    path = tmp_path / "x.sgm"
    if content is not None:
        path.write_bytes(content)
    message = get_error_message(parse_sgm, path)
    assert all(word in message for word in expected_error), message


def test_matching_files_are_paired(tmp_path):
    source, target = tmp_path / "a.sgm", tmp_path / "b.sgm"
    source.write_bytes(sgm(*document(["un", "deux", "trois"])))
    target.write_bytes(sgm(*document(["one", "two", "three"]), "", ""))  # Blank lines at the end.
    pairs = [("un", "one"), ("deux", "two"), ("trois", "three")]
    assert read_sgm_pairs(source, target) == pairs


GOOD = (
    '<doc docid="d">',
    '<seg id="1">a</seg>',
    '<seg id="2">b</seg>',
    '<seg id="3">c</seg>',
    "</doc>",
)


@pytest.mark.parametrize(
    "other, line, stood",
    [
        (GOOD[:3], 4, "ends before"),
        ((*GOOD, '<seg id="4">d</seg>'), 6, "ends before"),
        ((*GOOD[:1], *GOOD[2:], "</doc>"), 2, '<seg id="2">b'),  # One segment is missing.
        ((*GOOD[:3], "</doc>", "</doc>"), 4, "</doc>"),
        ((GOOD[0], "", *GOOD[1:]), 2, "''"),
        (('<doc docid="other">', *GOOD[1:]), 1, "docid"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_error_for_mismatched_files_names_the_first_line(tmp_path, other, line, stood, swapped):
    paths = [tmp_path / "a.sgm", tmp_path / "b.sgm"]
    for path, lines in zip(paths, (other, GOOD) if swapped else (GOOD, other)):
        path.write_bytes(sgm(*lines))
    message = get_error_message(read_sgm_pairs, *paths)
    for expected_error in ("a.sgm", "b.sgm", f"line {line}:", stood):
        assert expected_error in message


@BOUNDED
@given(parts=st.lists(SGM_PARTS, max_size=12))
def test_no_segment_is_lost(tmp_path, parts):
    path, content = tmp_path / "x.sgm", "".join(parts)
    path.write_bytes(content.encode())
    lines = read_or_reject(parse_sgm, path)
    if lines is not None:
        segments = [segment for segment, tag in lines if tag]
        assert len(segments) == len(re.findall("<seg", content, re.IGNORECASE))
        assert content.count("a") == sum(segment.count("a") for segment in segments)


def test_package_refuses_sgm(tmp_path):
    path = tmp_path / "x.sgm"
    path.write_bytes(sgm(*document(["a"])))
    for read in (
        lambda path: read_pairs(path, path),
        lambda path: [*read_documents([path])],
    ):
        assert "preprocess.py" in get_error_message(read, path)


def test_reads_the_wmt14_files(shared_data):
    folder = shared_data / "wmt14"
    name = "newstest2014-fren-ref.{}.sgm"
    pairs = read_sgm_pairs(folder / name.format("fr"), folder / name.format("en"))
    assert len(pairs) == 3003
    assert sum("\u00a0" in french for french, _ in pairs) == 707
    assert sum("&" in english for _, english in pairs) == 11
