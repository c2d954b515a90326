"""The first rows of a data shard are the rows that it computes."""

import numpy as np
import pytest

from dtransformer.parallel.runtime import job
from dtransformer.trainers.row_sharding import RowSharding, take_shard


@pytest.mark.parametrize("num_rows", [24, 12, 20])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_first_rows_match_the_local_rows(num_rows, num_shards, num_parts, monkeypatch):
    rows = np.arange(num_rows)
    sharding = RowSharding(is_global=True)
    for shard in range(num_shards):
        monkeypatch.setattr(job, "data_shard", lambda shard=shard: (shard, num_shards))
        local_rows = sharding.local_rows(rows, num_parts)
        parts = [np.asarray(take_shard(local_rows, i, num_parts)) for i in range(num_parts)]
        first_rows = sharding.first_rows(rows, num_parts)
        np.testing.assert_array_equal(first_rows, [part[0] for part in parts])
        for part in parts:
            np.testing.assert_array_equal(part, part[0] + np.arange(len(part)))


def test_separate_batches_follow_each_other(monkeypatch):
    monkeypatch.setattr(job, "data_shard", lambda: (2, 3))
    first_rows = RowSharding(is_global=False).first_rows(np.zeros([8, 5]), 2)
    np.testing.assert_array_equal(first_rows, [16, 20])
