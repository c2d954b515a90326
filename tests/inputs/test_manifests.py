"""A checkpoint's manifest is checked even if its checksum is right."""

import json
import pathlib
import shutil
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtransformer.trainers.checkpoint import Checkpoint
from dtransformer.trainers.checkpoint.manifest import MANIFEST
from tests.inputs.bounded import BOUNDED, read_or_reject, refusal

FORMAT_1 = pathlib.Path(__file__).parents[1] / "trainers" / "checkpoint" / "format_1"
FILE = {"bytes": 1, "crc32": "00000000", "rank": 0}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FORMAT_1, tmp_path / "step-00000006")


def content():
    return json.loads((FORMAT_1 / MANIFEST).read_text())["checkpoint"]


def write(folder, body):
    """Write a manifest with a right checksum."""
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (folder / MANIFEST).write_text(json.dumps({"crc32": f"{crc:08x}", "checkpoint": body}))


def places(value, path=()):
    """Return the places of all values inside a nested value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    result = []
    for key, inner in items:
        result.append((*path, key))
        if isinstance(inner, (dict, list)):
            result += places(inner, (*path, key))
    return result


def change(body, place, value):
    for key in place[:-1]:
        body = body[key]
    body[place[-1]] = value


@pytest.mark.parametrize(
    "place, value, expected_error",
    [
        (["step"], "3", "step must be an integer"),
        (["step"], -1, "step must be at least 0"),
        (["seed"], True, "seed must be an integer"),
        (["saved_at"], 1e300, "saved_at"),
        (["metrics"], [], "metrics must be keys and values"),
        (["position"], {"epoch": 1}, "position.batch is missing"),
        (["files"], [], "files must be keys and values"),
        (["files", "/etc/passwd"], FILE, "inside of the folder"),
        (["files", "../outside"], FILE, "inside of the folder"),
        (["files", "a/../../outside"], FILE, "inside of the folder"),
        (["files", "a\0b"], FILE, "inside of the folder"),
        (["files", "more"], {**FILE, "bytes": -1}, "bytes must be at least 0"),
        (["files", "state.data-00001-of-00002"], FILE, "all of TensorFlow's files"),
        (["tensors", "more"], [[2**40, 2**40], "float32"], "files with the size of the tensors"),
        (["tensors", "more"], [[-1], "float32"], "must be at least 0"),
        (["tensors", "more"], [[1], "string"], "must be 'bool', "),
        (["tensors", "more"], [[1]], "tensors.more"),
        (["version"], 2, "Update dtransformer"),
    ],
)
def test_wrong_fields_are_named(folder, place, value, expected_error):
    body = content()
    change(body, place, value)
    write(folder, body)
    message = refusal(Checkpoint, folder)
    assert expected_error in message and str(folder / MANIFEST) in message


@BOUNDED
@given(data=st.data())
def test_any_value_in_any_field_is_read_or_refused(folder, data):
    body = content()
    change(body, data.draw(st.sampled_from(places(body))), data.draw(JSON))
    write(folder, body)
    checkpoint = read_or_reject(Checkpoint, folder)
    if checkpoint is not None:
        assert checkpoint.step >= 0 and checkpoint.shapes
        checkpoint.problems()


@BOUNDED
@given(text=st.one_of(st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode())))
def test_any_manifest_is_read_or_refused(folder, text):
    (folder / MANIFEST).write_bytes(text)
    assert read_or_reject(Checkpoint, folder) is None


@pytest.mark.parametrize(
    "text, expected_error",
    [
        ("[" * 100_000, "brackets"),
        ('{"a":' * 500 + "1" + "}" * 500, "levels"),
        ("9" * 5000, "5000 digits"),
        ('{"crc32": NaN}', "Out of range float"),
        ('{"crc32": 1e999}', "Out of range float"),
        ('{"crc32": "", "crc32": ""}', "repeated"),
        ('{"crc32": ""}', "checkpoint is missing"),
        (" " * (2**24 + 1), "bytes"),
    ],
)
def test_json_has_limits(folder, text, expected_error):
    (folder / MANIFEST).write_text(text)
    assert expected_error in refusal(Checkpoint, folder)


def test_links_are_not_followed(folder, tmp_path):
    (tmp_path / "outside").mkdir()
    for name in ("state.index", MANIFEST):
        shutil.move(folder / name, tmp_path / "outside" / name)
        (folder / name).symlink_to(tmp_path / "outside" / name)
    assert "is a link" in refusal(Checkpoint, folder)
    (folder / MANIFEST).unlink()
    shutil.copy(tmp_path / "outside" / MANIFEST, folder)
    assert "is a link" in Checkpoint(folder).problems()["state.index"]


def test_repair_stays_inside_the_folder(folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    body, words = content(), b"words"
    about = {"bytes": len(words), "crc32": f"{zlib.crc32(words):08x}", "rank": 0}
    body["files"] |= {"tokenizer/vocab.txt": about, "replicas/tokenizer/vocab.txt": about}
    write(folder, body)
    replica = folder / "replicas" / "tokenizer" / "vocab.txt"
    replica.parent.mkdir(parents=True)
    replica.write_bytes(words)
    (folder / "tokenizer").symlink_to(outside)
    assert not Checkpoint(folder).repair("tokenizer/vocab.txt")
    (folder / "tokenizer").unlink()
    (folder / "tokenizer").mkdir()
    assert Checkpoint(folder).repair("tokenizer/vocab.txt")
    assert not list(outside.iterdir())


@BOUNDED
@given(place=st.integers(0, 900), length=st.sampled_from([1, 8, 1000]))
def test_damaged_index_with_a_right_checksum_is_refused(folder, place, length):
    body, index = content(), (FORMAT_1 / "state.index").read_bytes()
    harmed = index[:place] + b"\xff" * min(length, len(index) - place) + index[place + length :]
    (folder / "state.index").write_bytes(harmed)
    about = {"bytes": len(harmed), "crc32": f"{zlib.crc32(harmed):08x}"}
    body["files"]["state.index"] |= about
    write(folder, body)
    assert "state.index" in Checkpoint(folder).problems() or harmed == index


def test_index_is_compared_with_the_manifest(folder):
    body = content()
    tensors = body["tensors"]
    tensors["network/renamed"] = tensors.pop("network/head/bias")
    write(folder, body)
    assert "its tensors do not match" in Checkpoint(folder).problems()["state.index"]
