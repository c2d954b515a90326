"""Only answers and their end tokens have a loss, and documents stay complete."""

import numpy as np
import pytest

from dtransformer.datasets import InstructionBatches
from tests.datasets.input_errors import get_error_message
from tests.datasets.small_shards import END, PAD, START, some_documents, some_shards

IGNORED = -100


def some_batches(shards, **options):
    return InstructionBatches(shards, **{"length": 70, "batch_size": 4, "seed": 7, **options})


def concatenate_rows(batches):
    batches = list(batches.as_dataset().as_numpy_iterator())
    parts = zip(*((x["tokens"], x["segments"], y) for x, y in batches))
    return [np.concatenate(part) for part in parts]


@pytest.fixture(scope="module")
def documents():
    return [parts * 2 for parts in some_documents(60, 12, parts=2)]


@pytest.fixture(scope="module")
def shards(documents, tmp_path_factory):
    return some_shards(tmp_path_factory.mktemp("shards") / "x", documents)


def test_structure_of_a_batch(tmp_path):
    shards = some_shards(tmp_path / "x", [["ab", "cd"], ["e", "f", "g", "hi"]])
    batches = some_batches(shards, length=16, batch_size=1)
    tokens, segments, labels = (part[0].tolist() for part in concatenate_rows(batches))
    a, b, c, d, e, f, g, h, i = range(4, 13)
    second, first = [START, e, f, END, g, h, i, END], [START, a, b, c, d, END]
    assert tokens == second + first + [PAD] * 2
    assert segments == [1] * 8 + [2] * 6 + [0] * 2
    no = IGNORED
    assert labels == [no, f, END, no, h, i, END, no] + [no, no, c, d, END, no] + [no] * 2


def test_prefix_marks_the_first_prompt_of_a_document(tmp_path):
    shards = some_shards(tmp_path / "x", [["ab", "cd"], ["e", "f", "g", "hi"]])
    batches = some_batches(shards, length=16, batch_size=1, prefix=True)
    ((inputs, _),) = batches.as_dataset().as_numpy_iterator()
    assert inputs["prefix"][0].tolist() == [1] * 2 + [0] * 6 + [1] * 3 + [0] * 5


def test_epoch_contains_every_document_in_one_row(documents, shards):
    batches = some_batches(shards, batch_size=1)
    orders = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        result = []
        for tokens, segments, labels in zip(*concatenate_rows(batches)):
            for segment in range(1, segments.max() + 1):
                ids = tokens[segments == segment]
                assert ids[0] == START and ids[-1] == END
                answers = labels[segments == segment]
                np.testing.assert_array_equal(answers[:-1][answers[:-1] != IGNORED],
                                              ids[1:][answers[:-1] != IGNORED])  # fmt: skip
                result.append(ids.tolist())
        assert len(result) == len(documents)
        letters = lambda ids: "".join(chr(i - 4 + ord("a")) for i in ids if i >= 4)
        assert sorted(map(letters, result)) == sorted("".join(parts) for parts in documents)
        orders.append(result)
    assert orders[0] != orders[1]
    assert (concatenate_rows(batches)[0] != PAD).mean() > 0.85


def test_long_documents_are_left_out_in_training_and_cut_off_otherwise(tmp_path):
    shards = some_shards(tmp_path / "x", [["a" * 5, "b" * 9], ["a", "b"]])
    training = some_batches(shards, length=8, batch_size=1)
    assert training.num_skipped == 1 and len(training) == 1
    held_out = some_batches(shards, length=8, batch_size=1, training=False)
    tokens, _, labels = concatenate_rows(held_out)
    assert tokens[0].tolist() == [START, *[4] * 5, *[5] * 2]
    assert labels[0].tolist() == [IGNORED] * 5 + [5] * 2 + [IGNORED]
    assert len(held_out) == 2
    assert "length=3" in get_error_message(some_batches, shards, length=3)


def test_ranks_divide_and_resume_one_plan(shards):
    full = some_batches(shards)
    full.set_epoch(1)
    expected = [part[2 * 4 :] for part in concatenate_rows(full)]
    for index in range(2):
        share = some_batches(shards, shard_index=index, num_shards=2)
        share.restore(full.position(2))
        for part, of_all in zip(concatenate_rows(share), expected):
            np.testing.assert_array_equal(part, of_all[index::2])


def test_prompt_without_an_answer_is_refused(tmp_path):
    shards = some_shards(tmp_path / "x", [["a", "b"], ["a", "b", "c"]])
    assert "Document 1 has 3 parts" in get_error_message(some_batches, shards)
    shards = some_shards(tmp_path / "y", ["ab", "cd"])
    assert "Document 0 has 1 parts" in get_error_message(some_batches, shards)
