"""YAML has its obvious meaning, needs little memory, or is refused."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dtransformer.inputs.yaml_file import MAX_BYTES, parse_yaml, yaml_text
from dtransformer.runs.config import load_config, save_config
from tests.inputs.bounded import BOUNDED, read_or_reject, refusal

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcé", max_size=3), inner),
    max_leaves=8,
)
PARTS = st.lists(
    st.sampled_from(["a", "b: ", "- ", "\n", "  ", "[", "]", "{", "}", "&a ", "*a", "<<: ", "!!int ",
                     "1", ".nan", "'", '"', "|", "---\n", "? ", ", ", "#", "%", "\t", "\0"]),
    max_size=14,
).map("".join)  # fmt: skip


@pytest.mark.parametrize(
    "text, value",
    [
        ("", None),
        ("a: [1, -2, 0.5, 1e-3, .5]", {"a": [1, -2, 0.5, 0.001, 0.5]}),
        ("[true, False, NULL, ~, null]", [True, False, None, None, None]),
        ("[yes, no, on, 1:30, 2014-05-01, 0x1f, 010, 1_000]",
         ["yes", "no", "on", "1:30", "2014-05-01", "0x1f", "010", "1_000"]),
        ("['1', \"true\", 'null', tRUE]", ["1", "true", "null", "tRUE"]),
        ("a: |\n  text\n", {"a": "text\n"}),
    ],
)  # fmt: skip
def test_types_of_scalars(text, value):
    assert parse_yaml(text, "x") == value


def growing(levels):
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text, expected_error",
    [
        (growing(60), "anchor or alias"),
        ("a: &a {b: 1}\nc:\n  <<: *a", "anchor or alias"),
        ("<<: {a: 1}", "not a merge"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' is repeated"),
        ("a: !!int x", "the tag"),
        ("a: !!python/object/apply:os.system [ls]", "the tag"),
        ("a: " + "9" * 5000, "18 digits"),
        ("a: 1e400", "finite"),
        ("a: .nan", "finite"),
        ("a: -.INF", "finite"),
        ("[" * 10_000, "levels"),
        ("[" + "1," * 110_000 + "]", "values"),
        ("1: a", "must be a text"),
        ("? [a]\n: b", "must be a text"),
        ("a: 1\n---\nb: 2", "several documents"),
        ("a: [", "cannot be parsed as YAML"),
        ("a: \0", "cannot be parsed as YAML"),
        ("a: \udce9", "cannot be parsed as YAML"),
        ("x" * (MAX_BYTES + 1), "characters"),
    ],
    ids=lambda text: text[:30].replace("\0", "0").replace("\udce9", "surrogate"),
)
def test_unsupported_yaml_is_refused(text, expected_error):
    assert expected_error in refusal(parse_yaml, text, "x")


@BOUNDED
@given(value=VALUES)
def test_written_yaml_is_read_back(value):
    text = yaml.safe_dump(value, allow_unicode=True)
    read = read_or_reject(parse_yaml, text, "x")
    assert read is None or read == value


@BOUNDED
@given(text=PARTS)
def test_any_text_is_read_or_refused(text):
    value = read_or_reject(parse_yaml, text, "x")
    if value is not None and not set("&*!<").intersection(text):
        assert value == yaml.load(text, Loader=yaml.CSafeLoader) or ".nan" in text


@BOUNDED
@given(
    key=st.sampled_from(["model.hidden_size", "training.learning_rate", "data.source",
                         "training.jit_compile", "parallel.recompute", "parallel.parallel_rules",
                         "parallel.layout_map",
                         "parallel.optimizer_shard", "search.max_length", "nothing", "data.x"]),
    value=VALUES | st.sampled_from([{"recompute": 1}, {"select": "x"}, 10**30, 1e308]),
)  # fmt: skip
def test_any_option_is_accepted_or_refused(tmp_path, key, value):
    path = tmp_path / "config.yaml"
    section, _, name = key.partition(".")
    path.write_text(yaml.safe_dump({section: {name: value} if name else value}), "utf-8")
    config = read_or_reject(load_config, path)
    if config is not None:
        save_config(config, tmp_path / "saved.yaml")
        assert load_config(tmp_path / "saved.yaml") == config


def test_config_of_many_labels_is_read_back(tmp_path):
    config = load_config(None, ["task=classification"])
    config.data.labels = ["1e5", "no", "\x85 \u2028", *(f"{n} " + "x" * 90 for n in range(2000))]
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


@pytest.mark.parametrize("text", ["1e5", "010", ".inf", "9" * 30, "null", "yes", "a: b", ""])
def test_texts_that_look_like_numbers_are_quoted(text):
    assert parse_yaml(yaml_text({"labels": [text]}), "x") == {"labels": [text]}
