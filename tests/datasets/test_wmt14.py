"""The WMT14 example follows the rules for its data exactly."""

import hashlib

import numpy as np
import pytest

from dtransformer.datasets import read_tsv
from examples.wmt14 import preprocess
from examples.wmt14.faithful import faithful_examples
from tests.datasets.input_errors import get_error_message
from tests.datasets.test_sgm import document, sgm

ENGLISH, FRENCH = ["One & two.", "A\ttab."], ["Un & deux\u00a0?", "Un\u0085onglet."]


@pytest.fixture
def folder(tmp_path):
    """Folder with two small files that have the official names."""
    (tmp_path / "in").mkdir()
    for name, segments in ((preprocess.ENGLISH, ENGLISH), (preprocess.FRENCH, FRENCH)):
        (tmp_path / "in" / name).write_bytes(sgm(*document(segments)))
    return tmp_path / "in"


def everything_under(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_prepare_writes_both_directions(folder, tmp_path):
    paths = preprocess.prepare(folder, tmp_path / "out")
    english = [line.replace("\t", " ") for line in ENGLISH]
    assert [path.name for path in paths] == ["wmt14.en_fr.txt", "wmt14.fr_en.txt"]
    assert read_tsv(paths[0]) == (english, FRENCH)
    assert read_tsv(paths[1]) == (FRENCH, english)
    assert everything_under(tmp_path / "out") == ["wmt14.en_fr.txt", "wmt14.fr_en.txt"]


def test_prepare_refuses_mismatched_files(folder, tmp_path):
    (folder / preprocess.FRENCH).write_bytes(sgm(*document(FRENCH[:1])))
    message = get_error_message(preprocess.prepare, folder, tmp_path / "out")
    for expected_error in ("line 4", preprocess.ENGLISH, preprocess.FRENCH, "</doc>", "A\\ttab."):
        assert expected_error in message
    assert not (tmp_path / "out").exists()


def test_prepare_refuses_missing_files(folder, tmp_path):
    assert "does not exist" in get_error_message(
        preprocess.prepare, tmp_path / "none", tmp_path / "out"
    )
    (folder / preprocess.FRENCH).unlink()
    assert preprocess.FRENCH in get_error_message(preprocess.prepare, folder, tmp_path / "out")
    for name in (preprocess.ENGLISH, preprocess.FRENCH):
        (folder / name).write_text("<doc>\n</doc>\n")
    assert "no segment" in get_error_message(preprocess.prepare, folder, tmp_path / "out")


def test_verify_compares_the_sums(folder, monkeypatch):
    message = get_error_message(preprocess.verify, folder)
    assert "SHA-256" in message and preprocess.SHA256[preprocess.ENGLISH] in message
    sums = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in preprocess.SHA256}
    monkeypatch.setattr(preprocess, "SHA256", sums)
    preprocess.verify(folder)


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
    # b and a occur three times, b first. All others follow in order of appearance.
    words = ["b", "a", "c", "d", "?", "e", "f"]
    assert examples.source_vocabulary == {w: 3 + i for i, w in enumerate(words)}
    assert list(examples.target_vocabulary)[:4] == ["Z", "X", "Y", "W"]
    np.testing.assert_array_equal(examples.source, [[3, 3], [4, 7]])
    np.testing.assert_array_equal(examples.target, [[4, 5, 3], [3, 1, 1]])
    np.testing.assert_array_equal(examples.label, [[5, 3, 2], [1, 1, 2]])
    assert {examples.source.dtype, examples.target.dtype, examples.label.dtype} == {np.dtype("i4")}


def test_faithful_examples_refuse_mismatched_files(tmp_path):
    path = pairs_file(tmp_path, ("a b c d", "x y"))
    assert len(faithful_examples(path, 2, 2, vocab_size=7).source) == 1
    assert "--vocab_size 7" in get_error_message(faithful_examples, path, 2, 2, vocab_size=6)
    assert "--src_len" in get_error_message(faithful_examples, path, 10, 2)
    assert "src_len=0" in get_error_message(faithful_examples, path, 0, 2)


def test_real_files_give_the_published_numbers(shared_data, tmp_path):
    preprocess.verify(shared_data / "wmt14")
    _, french_english = preprocess.prepare(shared_data / "wmt14", tmp_path)
    examples = faithful_examples(french_english)
    assert len(read_tsv(french_english)[0]) == 3003
    assert examples.source.shape == examples.target.shape == examples.label.shape == (2468, 10)
    assert len(examples.source_vocabulary) == 15736
    assert len(examples.target_vocabulary) == 14399
    assert len(examples.source) // 32 == 77
