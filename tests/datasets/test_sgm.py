"""SGM files: WMT14's form is written and read to the letter, faults name their line."""

import pytest

from dtransformer.datasets import read_sgm, read_sgm_pairs, write_sgm
from tests.datasets.refused import refused

TRICKY = [
    "Plain.",
    "Salt & pepper, 3 < 4 > 2 &amp;",
    "Quoi\u00a0? \u00ab\u202fOui\u202f\u00bb",
    "one\u0085line \u2028 still \u2029 one \x0b\x0c\x1c line",
    "\u00a0a no-break space at both ends\u00a0",
    "tab\tinside",
    "",
]


def sgm(*lines, end=b"\n"):
    return end.join(line if isinstance(line, bytes) else line.encode() for line in lines) + end


@pytest.mark.parametrize("kind", ["refset", "srcset"])
def test_what_is_written_is_read_back(tmp_path, kind):
    path = tmp_path / "new" / "train.fr.sgm"
    write_sgm(path, TRICKY, "fr", "train", kind=kind, segments_per_document=3)
    assert read_sgm(path) == TRICKY
    assert [p.name for p in path.parent.iterdir()] == ["train.fr.sgm"]


def test_the_form_is_that_of_wmt14(tmp_path):
    path = tmp_path / "x.sgm"
    write_sgm(path, ["a", "b", "c"], "fr", "newstest2014", segments_per_document=2)
    assert path.read_text("utf-8").splitlines() == [
        '<refset trglang="fr" setid="newstest2014" srclang="any">',
        '<doc sysid="ref" docid="newstest2014-1" genre="newstest2014" origlang="fr">',
        '<seg id="1">a</seg>',
        '<seg id="2">b</seg>',
        "</doc>",
        '<doc sysid="ref" docid="newstest2014-2" genre="newstest2014" origlang="fr">',
        '<seg id="1">c</seg>',
        "</doc>",
        "</refset>",
    ]


@pytest.mark.parametrize(
    "line, segments",
    [
        ('<seg id="1">a</seg>', ["a"]),
        ('<seg id="1" x="2"> a \t</seg>  ', ["a"]),
        ('<seg id="1">a > b, <i>c</i></seg>', ["a > b, <i>c</i>"]),
        ('<seg id="1">\u00a0a</seg>', ["\u00a0a"]),
        ("<hl> <p>", []),
        ("<segment>", []),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_is_a_segment_or_tags(tmp_path, line, segments, end):
    path = tmp_path / "x.sgm"
    path.write_bytes(sgm("<doc>", line, "</doc>", end=end))
    assert read_sgm(path) == segments


@pytest.mark.parametrize(
    "content, told",
    [
        (None, ["x.sgm", "does not exist"]),
        (sgm("<doc>", b'<seg id="1">caf\xe9</seg>'), ["x.sgm", "line 2", "0xe9", "UTF-8"]),
        (sgm("<doc>", '<seg id="1">a</seg>', '<seg id="2">b'), ["x.sgm", "line 3", "</seg>"]),
        (sgm("<doc>", '<seg id="1"'), ["x.sgm", "line 2"]),
        *(
            (sgm("<doc>", '<seg id="1">a</seg>', line), ["x.sgm", "line 3", "one segment"])
            for line in (
                '<seg id="2">two</seg><seg id="3">on a line</seg>',
                ' <seg id="2">indented</seg>',
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
def test_a_bad_file_is_refused_with_its_line(tmp_path, content, told):
    path = tmp_path / "x.sgm"
    if content is not None:
        path.write_bytes(content)
    message = refused(read_sgm, path)
    assert all(word in message for word in told), message


def test_files_that_match_are_paired(tmp_path):
    source, target = tmp_path / "a.sgm", tmp_path / "b.sgm"
    write_sgm(source, ["un", "deux", "trois"], "fr", "s", segments_per_document=2)
    write_sgm(target, ["one", "two", "three"], "en", "s", segments_per_document=2)
    target.write_bytes(target.read_bytes() + b"\n\n")  # blank lines at the end are no fault
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
        ((*GOOD[:1], *GOOD[2:], "</doc>"), 2, '<seg id="2">b'),  # one segment is missing
        ((*GOOD[:3], "</doc>", "</doc>"), 4, "</doc>"),
        ((GOOD[0], "", *GOOD[1:]), 2, "''"),
        (('<doc docid="other">', *GOOD[1:]), 1, "docid"),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_files_that_do_not_match_are_refused_at_the_first_bad_line(
    tmp_path, other, line, stood, swapped
):
    paths = [tmp_path / "a.sgm", tmp_path / "b.sgm"]
    for path, lines in zip(paths, (other, GOOD) if swapped else (GOOD, other)):
        path.write_bytes(sgm(*lines))
    message = refused(read_sgm_pairs, *paths)
    for told in ("a.sgm", "b.sgm", f"line {line}:", stood):
        assert told in message


@pytest.mark.parametrize("segment", ["two\nlines", "two\rlines", "an </seg> inside"])
def test_what_the_form_cannot_hold_is_refused_and_the_old_file_stays(tmp_path, segment):
    path = tmp_path / "x.sgm"
    write_sgm(path, ["old"], "en", "s")
    assert "segment 2" in refused(write_sgm, path, ["new", segment], "en", "s")
    assert read_sgm(path) == ["old"]
    assert [p.name for p in tmp_path.iterdir()] == ["x.sgm"]


def test_a_place_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in refused(write_sgm, tmp_path / "file" / "x.sgm", ["a"], "en", "s")
    assert "kind" in refused(write_sgm, tmp_path / "x.sgm", ["a"], "en", "s", "tstset")


def test_the_real_files_are_read(shared_data):
    folder = shared_data / "wmt14"
    name = "newstest2014-fren-ref.{}.sgm"
    pairs = read_sgm_pairs(folder / name.format("fr"), folder / name.format("en"))
    assert len(pairs) == 3003
    assert sum("\u00a0" in french for french, _ in pairs) == 707
    assert sum("&" in english for _, english in pairs) == 11
