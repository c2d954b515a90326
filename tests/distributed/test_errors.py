"""Promise: ranks that were started wrongly end with an error on every rank, not a hang."""

import pytest

from tests.distributed.launch import launch, needs_horovod


@pytest.fixture(scope="module")
def output():
    code, output = launch(2, ["-m", "tests.distributed.wrong"], timeout=120)
    assert code == 0, output[-8000:]
    return output


@needs_horovod
@pytest.mark.parametrize(
    "action, words",
    [
        ("different_configs", ["gradient_aggregation_group", "rank 0 has 4", "rank 1 has 5"]),
        ("different_seeds", ["seed", "rank 0 has 0", "rank 1 has 1"]),
        ("wrong_product", ["data_parallel=3", "needs 3 ranks", "has 2"]),
        ("different_numbers_of_batches", ["rank 0 has 2 batches", "rank 1 has 3"]),
        (
            "file_that_cannot_be_written",
            ["could not be written: rank 1: OSError: no space is left"],
        ),
        ("folder_that_cannot_be_made", ["cannot be written here"]),
        ("lost_file", ["state.data-00001-of-00002 is missing"]),
        ("other_network", ["does not fit", "shapes differ", "(60, 32), there (60, 16)"]),
        ("all_is_well", ["in the end"]),
    ],
)
def test_every_rank_says_what_is_wrong(action, words, output):
    lines = [line for line in output.splitlines() if f"{action}: " in line]
    assert [line[:3] for line in sorted(lines)] == ["[0]", "[1]"]
    for line in lines:
        for word in words:
            assert word in line


# How the last rank fails, what the ranks are together -> what the output says.
FAILURES = {
    ("kill", "model"): ["Process name: 1", "Exit code: 137"],
    ("kill", "data"): ["Process name: 1", "Exit code: 137"],
    ("kill", "stage"): ["Process name: 1", "Exit code: 137"],
    ("midst", "stage"): ["this rank has had enough", "Process name: 1"],
    ("save", "data"): ["Process name: 1", "Exit code: 137"],
    ("raise", "model"): ["this rank has had enough", "Process name: 1"],
    ("shapes", "model"): ["rank 0 has int32 [16, 8]", "rank 1 has int32 [16, 16]", "data_shard()"],
}


@needs_horovod
@pytest.mark.parametrize("how, axis", FAILURES)
def test_a_rank_that_fails_ends_the_job(how, axis):
    """Within the time of a start, five steps and a minute."""
    arguments = ["-m", "tests.distributed.failing", how, axis]
    code, output = launch(2, arguments, timeout=180)
    assert code != 0
    assert ("step 5" in output) == (how != "shapes"), output[-4000:]
    assert "step 7" not in output
    for words in FAILURES[how, axis]:
        assert words in output, output[-4000:]
