"""Promise: a pipeline gives the numbers of one process, and a rank has its stage's weights only."""

import numpy as np
import pytest

from tests.distributed import layouts
from tests.distributed.launch import needs_horovod
from tests.distributed.layouts import parse
from tests.tolerances import PARITY_LOSS, PARITY_WEIGHTS

# One launch for each number of ranks. The whole grid: python benchmarks/parity.py
RUNS = """
    deep/pp2m2gpipe@2x1 deep_tied/pp2m8gpipe@2x1
    deep/pp2m21f1b@2x1  deep/pp2m81f1b@2x1  deep_dropout/pp2m41f1b@2x1
    deep_dropout/pp4m41f1b@4x1 deep_tied/pp4m81f1b@4x1 deep/dp2pp2m41f1b@4x1
""".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def alone():
    """What one process gives, by network and number of micro-batches, which dropout depends on."""
    results = {}
    for run in RUNS:
        network, layout = parse(run)
        key = _key(network, layout)
        if key not in results:
            layouts.Layout(parts=key[1]).start()
            results[key] = layouts.train(network, num_blocks=layout.num_blocks)[1]
    return results


@pytest.fixture(scope="module")
def ranks_of(folder):
    """A function of a run that returns what each of its ranks gives."""
    return layouts.reader(folder, RUNS, [])


def _key(network, layout):
    parts = layout.parts if network == "deep_dropout" else 1
    return network, parts, layout.num_blocks


def expected_of(run, alone):
    return alone[_key(*parse(run))]


@needs_horovod
@pytest.mark.parametrize("run", RUNS)
def test_losses_and_weights_are_those_of_one_process(run, ranks_of, alone):
    found, expected = {}, expected_of(run, alone)
    for results in ranks_of(run):
        found.update(results)
    assert layouts.weights(found, "final").keys() == layouts.weights(expected, "final").keys()
    differences = layouts.differences(found, expected, parse(run)[0])
    assert differences["loss"] <= PARITY_LOSS
    assert differences["weights"] <= PARITY_WEIGHTS, differences["where"]


@needs_horovod
@pytest.mark.parametrize("run", RUNS)
def test_ranks_agree_to_the_last_bit(run, ranks_of):
    first, *others = ranks_of(run)
    have = [layouts.weights(results, "final") for results in ranks_of(run)]
    for other in others:
        np.testing.assert_array_equal(other["losses"], first["losses"])
    for path in {path for weights in have for path in weights}:
        one, *more = [weights[path] for weights in have if path in weights]
        for weight in more:
            np.testing.assert_array_equal(weight, one)


@needs_horovod
@pytest.mark.parametrize("run", RUNS)
def test_a_rank_has_its_stage_only(run, ranks_of, alone):
    network, layout = parse(run)
    whole = layouts.weights(expected_of(run, alone), "final")
    per_stage = layout.ranks // layout.stages
    for rank, results in enumerate(ranks_of(run)):
        stage, blocks = rank // per_stage, 4 // layout.stages
        own = layouts.weights(results, "final")
        numbers = range(stage * blocks, (stage + 1) * blocks)
        names = {f"{'decoder' if n > 1 else 'encoder'}/block_{n % 2}" for n in numbers}
        assert {"/".join(p.split("/")[2:4]) for p in own if "/block_" in p} == names
        tables = {path for path in own if path.endswith("embedding/table")}
        has_tables = stage == 0 or (network != "deep" and stage == layout.stages - 1)
        assert tables == (
            {p for p in whole if p.endswith("embedding/table")} if has_tables else set()
        )
        assert any("head/" in path for path in own) == (
            network == "deep" and stage == layout.stages - 1
        )
