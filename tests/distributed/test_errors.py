"""A wrong start raises an error on every rank instead of a hang."""

import pytest

WRONG = {
    ("data_shards/dp2@2x1", "other_batches"): [
        "Rank 0 and rank 1 have different batches in step 1"
    ],
    ("data_shards/dp2@2x1", "equal_shares"): [
        "Rank 0 and rank 1 have had the same rows up to step 1"
    ],
    ("data_shards/dp2@2x1", "other_rows"): ["have different batches in step 1", "shard=False"],
    ("data_shards/dp2@2x1", "other_validation"): ["have different batches in step 1"],
    ("data_shards/dp2@2x1", "generators"): ["have different batches in step 1"],
    ("data_shards/dp2@2x1", "normalization"): ["would compute different means"],
    ("data_shards/dp2@2x1", "normalization_that_is_unfrozen"): ["would compute different means"],
    ("data_shards/dp2@2x1", "metric_of_all_rows"): ["<lambda>", "returns a scalar for all rows"],
    ("sharded_weights/dp2@2x1+shard1", "accumulated"): ["Adam has gradient_accumulation_steps=2, "],
    ("sharded_weights/dp2@2x1+shard1", "averages"): [
        *("Nadam has ema_overwrite_frequency=2, which", "use AdamW"),
    ],
    ("sharded_weights/dp2@2x1+shard1", "full_weights"): ["Lamb computes with full weights"],
    ("starts/dp2@2x1", "different_configs"): [
        *("gradient_aggregation_group", "rank 0 has 4", "rank 1 has 5"),
    ],
    ("starts/dp2@2x1", "different_seeds"): ["seed", "rank 0 has 0", "rank 1 has 1"],
    ("starts/dp2@2x1", "wrong_product"): ["data_parallel=3", "needs 3 ranks", "has 2"],
    ("starts/dp2@2x1", "different_numbers_of_batches"): ["Rank 0 has 2 batches", "rank 1 has 3"],
    ("batches/mp2@2x1", "different_shapes"): [
        *("rank 0 has int32 [16, 8]", "rank 1 has int32 [16, 16]", "data_shard()"),
    ],
    ("checkpoints/dp2@2x1", "file_that_cannot_be_written"): [
        "could not be written: rank 1: OSError: no space is left",
    ],
    ("checkpoints/dp2@2x1", "folder_that_cannot_be_made"): ["cannot be written ("],
    ("checkpoints/dp2@2x1", "lost_file"): ["state.data-00001-of-00002 is missing"],
    ("checkpoints/dp2@2x1", "other_network"): [
        *("does not fit", "shapes differ", "(60, 32), in the file (60, 16)"),
    ],
}
TASKS = "tests.distributed.tasks.errors:"


@pytest.mark.parametrize(
    "run, action",
    [pytest.param(*case, marks=pytest.mark.runs(TASKS + case[0])) for case in WRONG],
)
def test_every_rank_raises_an_error_that_explains_the_fault(run, action, rank_results):
    for rank in rank_results(TASKS + run):
        for words in WRONG[run, action]:
            assert words in rank[action]


@pytest.mark.runs(TASKS + "checkpoints/dp2@2x1")
def test_checkpoint_is_unchanged_after_failed_saves(rank_results):
    for rank in rank_results(TASKS + "checkpoints/dp2@2x1"):
        assert rank["restored in the end"] == 0
