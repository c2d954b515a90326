"""The WMT14 sample: its data rules to the letter, and archives that mean harm."""

import hashlib
import io
import tarfile

import numpy as np
import pytest

from dtransformer.datasets import read_tsv, wmt14, write_sgm
from examples.wmt14.faithful import faithful_examples
from tests.datasets.refused import refused

ENGLISH, FRENCH = ["One & two.", "A\ttab."], ["Un & deux\u00a0?", "Un\u0085onglet."]


@pytest.fixture
def folder(tmp_path):
    """A folder with two small files of the official names."""
    write_sgm(tmp_path / "in" / wmt14.ENGLISH, ENGLISH, "en", "s")
    write_sgm(tmp_path / "in" / wmt14.FRENCH, FRENCH, "fr", "s")
    return tmp_path / "in"


def archive(path, members, mode="w:gz"):
    """Writes a tar archive of (name, bytes or {attribute: value}) members."""
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, dict):
                for key, value in content.items():
                    setattr(member, key, value)
                tar.addfile(member)
            else:
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def official(folder, prefix="test-full/"):
    return [(prefix + n, (folder / n).read_bytes()) for n in (wmt14.ENGLISH, wmt14.FRENCH)]


def everything_under(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize("kind", ["folder", "tgz", "tar", "paths"])
def test_prepare_writes_both_directions(folder, tmp_path, kind):
    source = {
        "folder": lambda: folder,
        "tgz": lambda: archive(tmp_path / "a.tgz", official(folder)),
        "tar": lambda: archive(tmp_path / "a.tar", official(folder), "w"),
        "paths": lambda: (folder / wmt14.ENGLISH, folder / wmt14.FRENCH),
    }[kind]()
    paths = wmt14.prepare(source, tmp_path / "out")
    english = [line.replace("\t", " ") for line in ENGLISH]
    assert [path.name for path in paths] == ["wmt14.en_fr.txt", "wmt14.fr_en.txt"]
    assert read_tsv(paths[0]) == (english, FRENCH)
    assert read_tsv(paths[1]) == (FRENCH, english)
    assert everything_under(tmp_path / "out") == ["wmt14.en_fr.txt", "wmt14.fr_en.txt"]


@pytest.mark.parametrize("packed", [False, True])
def test_prepare_refuses_files_that_do_not_match(folder, tmp_path, packed):
    write_sgm(folder / wmt14.FRENCH, FRENCH[:1], "fr", "s")
    source = archive(tmp_path / "a.tgz", official(folder)) if packed else folder
    message = refused(wmt14.prepare, source, tmp_path / "out")
    for told in ("line 4", wmt14.ENGLISH, wmt14.FRENCH, "</doc>", "A\\ttab."):
        assert told in message
    assert not (tmp_path / "out").exists()


def test_prepare_refuses_what_is_missing(folder, tmp_path):
    assert "does not exist" in refused(wmt14.prepare, tmp_path / "none", tmp_path / "out")
    (folder / wmt14.FRENCH).unlink()
    assert wmt14.FRENCH in refused(wmt14.prepare, folder, tmp_path / "out")
    for name in (wmt14.ENGLISH, wmt14.FRENCH):
        (folder / name).write_text("<doc>\n</doc>\n")
    assert "no segment" in refused(wmt14.prepare, folder, tmp_path / "out")


def test_what_an_archive_says_of_places_is_not_followed(folder, tmp_path):
    (tmp_path / "safe").mkdir()
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    source = archive(
        tmp_path / "safe" / "hostile.tgz",
        [
            ("../escaped.txt", b"x"),
            (str(tmp_path / "absolute.txt"), b"x"),
            ("link", {"type": tarfile.SYMTYPE, "linkname": "/etc"}),
            ("device", {"type": tarfile.CHRTYPE}),
            (f"a/{wmt14.ENGLISH}", {"type": tarfile.SYMTYPE, "linkname": str(secret)}),
            (f"b/{wmt14.FRENCH}", {"type": tarfile.LNKTYPE, "linkname": "../../secret.txt"}),
            (f"c/{wmt14.FRENCH}", {"type": tarfile.FIFOTYPE}),
            *official(folder, "../../"),
        ],
    )
    before = everything_under(tmp_path)
    paths = wmt14.prepare(source, tmp_path / "out")
    assert read_tsv(paths[1])[0] == FRENCH
    new = {"out", "out/wmt14.en_fr.txt", "out/wmt14.fr_en.txt"}
    assert everything_under(tmp_path) == sorted({*before, *new})


@pytest.mark.parametrize(
    "spoil, told",
    [
        (lambda members: members[:1], [wmt14.FRENCH, "no regular file"]),
        (
            lambda members: [members[0], (wmt14.FRENCH, {"type": tarfile.SYMTYPE})],
            [wmt14.FRENCH, "no regular file"],
        ),
        (lambda members: [(wmt14.ENGLISH, b"x" * 2000), *members], ["2000 bytes", "at most 1000"]),
    ],
    ids=["missing", "link", "too large"],
)
def test_a_bad_archive_is_refused(folder, tmp_path, monkeypatch, spoil, told):
    monkeypatch.setattr(wmt14, "_MAX_MEMBER_BYTES", 1000)
    source = archive(tmp_path / "a.tgz", spoil(official(folder)))
    message = refused(wmt14.prepare, source, tmp_path / "out")
    assert all(word in message for word in told), message
    assert not (tmp_path / "out").exists()


def test_a_damaged_archive_is_refused(folder, tmp_path):
    source = archive(tmp_path / "a.tgz", official(folder))
    data = source.read_bytes()
    half = len(data) // 2
    one_bit = bytes([*data[:half], data[half] ^ 1, *data[half + 1 :]])
    wrong_sum = data[:-8] + bytes(4) + data[-4:]
    for damaged in (b"", b"no archive", data[:half], one_bit, wrong_sum):
        source.write_bytes(damaged)
        assert "a.tgz" in refused(wmt14.prepare, source, tmp_path / "out")


def test_download_checks_sums_before_it_writes(folder, tmp_path, monkeypatch, capsys):
    url = archive(tmp_path / "test-full.tgz", official(folder)).as_uri()
    message = refused(wmt14.download, tmp_path / "data", url=url)
    assert "SHA-256" in message and wmt14.SHA256[wmt14.ENGLISH] in message
    assert everything_under(tmp_path / "data") == []
    sums = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in wmt14.SHA256}
    monkeypatch.setattr(wmt14, "SHA256", sums)
    wmt14.verify(wmt14.download(tmp_path / "data", url=url))
    assert everything_under(tmp_path / "data") == sorted(sums)
    assert "MiB" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.tgz", "file:///none/x.tgz", "nonsense"])
def test_download_says_what_to_do_when_there_is_no_way(tmp_path, url):
    message = refused(wmt14.download, tmp_path / "data", url=url, timeout=5)
    assert url in message and "--source" in message
    assert everything_under(tmp_path / "data") == []


def pairs_file(tmp_path, *pairs):
    path = tmp_path / "pairs.txt"
    path.write_text("".join("\t".join(pair) + "\n" for pair in pairs), "utf-8")
    return path


def test_faithful_examples_follow_the_rules(tmp_path):
    path = pairs_file(
        tmp_path,
        ("b b a c", "X Y Z W"),  # 4 words: more than src_len + 1
        ("a b d", "only counted in the vocabularies"),  # 3 words: not
        ("a\u00a0? e f", "Z"),  # 4 words: a no-break space separates words
    )
    examples = faithful_examples(path, src_len=2, tgt_len=3, vocab_size=20)
    # b and a stand three times, b first; then all others in the order of appearance.
    words = ["b", "a", "c", "d", "?", "e", "f"]
    assert examples.source_vocabulary == {w: 3 + i for i, w in enumerate(words)}
    assert list(examples.target_vocabulary)[:4] == ["Z", "X", "Y", "W"]
    np.testing.assert_array_equal(examples.source, [[3, 3], [4, 7]])
    np.testing.assert_array_equal(examples.target, [[4, 5, 3], [3, 1, 1]])
    np.testing.assert_array_equal(examples.label, [[5, 3, 2], [1, 1, 2]])
    assert {examples.source.dtype, examples.target.dtype, examples.label.dtype} == {np.dtype("i4")}


def test_faithful_examples_refuse_what_does_not_fit(tmp_path):
    path = pairs_file(tmp_path, ("a b c d", "x y"))
    assert len(faithful_examples(path, 2, 2, vocab_size=7).source) == 1
    assert "--vocab_size 7" in refused(faithful_examples, path, 2, 2, vocab_size=6)
    assert "--src_len" in refused(faithful_examples, path, 10, 2)
    assert "src_len=0" in refused(faithful_examples, path, 0, 2)


def test_the_real_files_give_the_published_numbers(shared_data, tmp_path):
    wmt14.verify(shared_data / "wmt14")
    _, french_english = wmt14.prepare(shared_data / "wmt14", tmp_path)
    examples = faithful_examples(french_english)
    assert len(read_tsv(french_english)[0]) == 3003
    assert examples.source.shape == examples.target.shape == examples.label.shape == (2468, 10)
    assert len(examples.source_vocabulary) == 15736
    assert len(examples.target_vocabulary) == 14399
    assert len(examples.source) // 32 == 77
