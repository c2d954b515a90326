"""Batches report skipped data, and special tokens of texts are not repeated."""

import pytest
import tensorflow as tf
import tokenizers

from dtransformer.datasets import (
    InstructionBatches,
    LanguageModelBatches,
    TranslationBatches,
    load_tokenizer,
    write_token_shards,
)
from tests.datasets.small_shards import END, PAD, START, Letters, some_shards


class Marked(Letters):
    """`Letters` whose texts may contain the special tokens "<" and ">", and a line break "|"."""

    def encode(self, texts):
        special = {"<": START, ">": END, "|": 29}
        return [[special[c] if c in special else ord(c) - 93 for c in text] for text in texts]


def read_ids(batches):
    rows = [x["tokens"].numpy() for x, _ in batches.as_dataset()]
    return [[int(item) for item in row if item != PAD] for batch in rows for row in batch]


def test_few_left_out_records_are_printed_and_many_raise_a_warning(tmp_path, capsys):
    short, long = ["a", "b"], ["abcdef", "ghijk"]
    few = some_shards(tmp_path / "few", [short] * 20 + [long])
    options = {"length": 8, "batch_size": 1}
    assert InstructionBatches(few, **options).num_skipped == 1
    expected_line = (
        "InstructionBatches: 1 of 21 documents are longer than 8 tokens and are left out. Increase"
    )
    assert expected_line in capsys.readouterr().out
    many = some_shards(tmp_path / "many", [short] * 4 + [long] * 2)
    with pytest.warns(
        UserWarning, match="InstructionBatches: 2 of 6 documents are longer than 8 t"
    ):
        InstructionBatches(many, **options)
    with pytest.warns(
        UserWarning, match="2 of 6 documents are longer than 8 tokens and are cut off"
    ):
        InstructionBatches(many, training=False, **options)
    with pytest.warns(
        UserWarning, match="LanguageModelBatches: 2 of 5 rows do not fill a batch of 3"
    ):
        LanguageModelBatches(some_shards(tmp_path / "lm", ["abcdef"] * 5), length=8, batch_size=3)
    ids = tf.ragged.constant([[5] * 9, [7], [8], [9]], "int32")
    with pytest.warns(
        UserWarning, match="TranslationBatches: 1 of 4 pairs are empty or longer than"
    ):
        TranslationBatches(ids, ids, batch_size=1, max_length=8)
    with pytest.warns(UserWarning, match="1 of 4 pairs are cut off at max_length=8"):
        TranslationBatches(ids, ids, batch_size=1, max_length=8, training=False)


def test_nothing_is_reported_for_zero_records_or_on_other_ranks(
    tmp_path, capsys, monkeypatch, recwarn
):
    shards = some_shards(tmp_path / "x", [["a", "b"]] * 4)
    InstructionBatches(shards, length=8, batch_size=1)
    monkeypatch.setenv("HOROVOD_RANK", "1")
    InstructionBatches(shards, length=5, batch_size=3)
    assert not capsys.readouterr().out and not recwarn.list


def test_missing_start_and_end_tokens_are_added_to_instructions(tmp_path):
    """A text without a start or end token gets it, independent of other texts."""
    documents = [["<ab", "cd>"], ["ef", "gh"], ["<a", "b>|", "c", "d>|"], ["<a", "b", "c", "d>"]]
    shards = write_token_shards(documents, Marked(), tmp_path / "x")
    batches = InstructionBatches(shards, length=12, batch_size=1, shuffle=False)
    a, b, c, d, e, f, g, h = range(4, 12)
    expected = [
        [START, a, b, c, d, END],
        [START, e, f, g, h, END],
        [START, a, b, END, 29, c, d, END, 29],
        [START, a, b, END, c, d, END],
    ]
    rows = read_ids(batches)
    full = [[*item] for row in rows for item in _split_documents(row)]
    assert sorted(full) == sorted(expected)


def _split_documents(row):
    starts = [place for place, item in enumerate(row) if item == START]
    return [row[a:b] for a, b in zip(starts, [*starts[1:], len(row)])]


def test_start_and_end_tokens_are_not_added_if_most_documents_have_them(tmp_path):
    shards = write_token_shards(["<ab>|", "<cd>|", "<ef>"], Marked(), tmp_path / "all")
    options = {"length": 5, "batch_size": 1, "training": False}
    with pytest.warns(
        UserWarning, match="3 of 3 sampled documents .* (begin|end) with .* not added"
    ):
        rows = read_ids(LanguageModelBatches(shards, **options))
    assert sum(rows, []) == [START, 4, 5, END, 29, START, 6, 7, END, 29, START, 8, 9, END]
    shards = write_token_shards(["<ab>", "cd", "ef"], Marked(), tmp_path / "one")
    with pytest.warns(UserWarning, match="1 of 3 sampled documents .* and get it again"):
        rows = read_ids(LanguageModelBatches(shards, **options))
    assert sum(rows, [])[:2] == [START, START]


def test_start_and_end_tokens_of_targets_are_not_repeated():
    source = tf.ragged.constant([[5], [6], [7]], "int32")
    target = tf.ragged.constant([[START, 5, 6, END], [7], [8, END]], "int32")
    batches = TranslationBatches(source, target, batch_size=3, shuffle=False, buckets=1)
    ((inputs, labels),) = batches.as_dataset()
    assert inputs["target"].numpy().tolist() == [[2, 5, 6], [2, 7, 0], [2, 8, 0]]
    assert labels.numpy().tolist() == [[5, 6, 3], [7, 3, 0], [8, 3, 0]]


def test_start_token_of_prompts_is_not_repeated(tmp_path):
    original = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, "a"))
    original.add_special_tokens(["<s>", "</s>"])
    original.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    original.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    original.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    texts = ["a", "<s>a", "a</s>", "<s>a</s>", "<s><s>a", ""]
    rows = tokenizer.encode(texts, add_special_ids=True).to_list()
    assert rows == [[0, 2, 1], [0, 2, 1], [0, 2, 1], [0, 2, 1], [0, 0, 2, 1], [0, 1]]
    assert tokenizer.encode(texts).to_list()[1] == [0, 2]
