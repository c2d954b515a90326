"""Promise: a pipeline gives the numbers of one process, and a rank has its stage's weights only."""

import numpy as np
import pytest

from dtransformer import parallel_config
from dtransformer.layers.block import BlockStack
from dtransformer.trainers import Trainer
from tests.distributed import layouts
from tests.distributed.launch import needs_horovod
from tests.distributed.layouts import ALONE, assert_same, parse, weights
from tests.tolerances import PARITY_LOGITS, PARITY_LOSS, PARITY_WEIGHTS

pytestmark = needs_horovod

# One launch for each number of ranks; all schedules with a decoder alone: test_stages.py. The
# whole grid: python benchmarks/parity.py --layouts '*pp*'
RUNS = """
    deep_dropout/pp2m4-1f1b@2x1 deep_tied/pp2m2-interleaved2@2x1 deep_tied/mp2pp2m2-1f1b@2x2
    deep_dropout/pp4m4-1f1b@4x1 deep_tied/dp2pp2m2-1f1b@4x1+shard2 deep/mp2pp2m2-1f1b@4x1+rows+sp
""".split()
USED = ("deep_tied/pp2m2-interleaved2@2x1", "deep_tied/mp2pp2m2-1f1b@2x2")
each = pytest.mark.parametrize("run", RUNS)
each_used = pytest.mark.parametrize("run", USED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def alone(folder):
    """What one process gives, by network and number of micro-batches, which dropout depends on."""
    results = {}
    for run in RUNS:
        key = _key(run)
        if key not in results:
            network, parts = key
            layouts.Layout(parts=parts).start()
            trainer, results[key] = layouts.train(network)
            if run in USED:
                results[key] |= layouts.use(trainer, network, folder, ALONE)
    return results


@pytest.fixture(scope="module")
def ranks_of(folder, alone):
    """A function of a run that returns what each of its ranks gives."""
    return layouts.reader(folder, RUNS, USED)


@pytest.fixture(scope="module")
def expected_of(alone):
    """A function of a run that returns what one process gives."""
    return lambda run: alone[_key(run)]


def _key(run):
    network, layout = parse(run)
    return network, layout.parts if network == "deep_dropout" else 1


@each
def test_losses_and_weights_are_those_of_one_process(run, ranks_of, expected_of):
    found, expected = {}, expected_of(run)
    for results in ranks_of(run):
        found.update(results)
    assert weights(found, "final").keys() == weights(expected, "final").keys()
    differences = layouts.differences(found, expected, parse(run)[0])
    assert differences["loss"] <= PARITY_LOSS
    assert differences["weights"] <= PARITY_WEIGHTS, differences["where"]


@each
def test_ranks_agree_to_the_last_bit(run, ranks_of):
    first, *others = ranks_of(run)
    have = [weights(results, "final") for results in ranks_of(run)]
    for other in others:
        np.testing.assert_array_equal(other["losses"], first["losses"])
    for path in {path for own in have for path in own}:
        one, *more = [own[path] for own in have if path in own]
        for weight in more:
            np.testing.assert_array_equal(weight, one)


@each
def test_a_rank_has_its_stage_only(run, ranks_of, expected_of):
    network, layout = parse(run)
    whole = weights(expected_of(run), "final")
    stacks = _stacks(network, layout)
    for rank, results in enumerate(ranks_of(run)):
        stage = rank * layout.stages // layout.ranks
        own = weights(results, "final")
        names = {
            f"{stack.name}/{block.name}"
            for stack in stacks
            for block in stack.blocks
            if block.pipeline_stage % layout.stages == stage
        }
        assert {"/".join(p.split("/")[-4:-2]) for p in own if p.endswith("key_kernel")} == names
        is_last = stage == layout.stages - 1
        tables = {path for path in whole if path.endswith("embedding/table")}
        has_tables = stage == 0 or (is_last and network != "deep")
        assert {path for path in own if path in tables} == (tables if has_tables else set())
        assert any("head/" in path for path in own) == (network == "deep" and is_last)


def _stacks(network, layout):
    with parallel_config(pipeline_stage=layout.stages, pipeline_chunks=layout.chunks):
        model, _ = layouts.make(network)
    return [layer for layer in model._flatten_layers() if isinstance(layer, BlockStack)]


@each_used
def test_evaluation_and_prediction_are_those_of_one_process(run, ranks_of, expected_of):
    for rank in ranks_of(run):
        expected = expected_of(run)
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["logits"], expected["logits"], rtol=0, atol=PARITY_LOGITS)


@each_used
@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_translations_are_those_of_one_process(run, search, ranks_of, expected_of):
    for rank in ranks_of(run):
        np.testing.assert_array_equal(rank[search], expected_of(run)[search])


@each_used
def test_weights_saved_by_the_job_load_in_one_process(run, ranks_of, folder):
    network, layout = parse(run)
    model, _ = layouts.make(network)
    trained = {}
    for results in ranks_of(run):
        trained.update(weights(results, "final"))
    Trainer(model).load_weights(layouts.weights_file(folder, network, layout))
    assert_same(trained, {weight.path: weight.numpy() for weight in model.weights})


@each_used
def test_weights_saved_by_one_process_load_in_the_job(run, ranks_of, expected_of):
    expected = weights(expected_of(run), "final")
    for results in ranks_of(run):
        loaded = weights(results, "loaded")
        assert loaded.keys() == weights(results, "final").keys()
        assert_same(loaded, {path: expected[path] for path in loaded})
