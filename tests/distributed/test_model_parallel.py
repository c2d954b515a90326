"""Promise: a job gives the numbers of one process, whatever its layout."""

import re

import numpy as np
import pytest

from dtransformer.trainers import Trainer
from tests.distributed import layouts
from tests.distributed.launch import needs_horovod
from tests.distributed.layouts import assert_same, parse, weights
from tests.tolerances import PARITY_LOGITS, PARITY_LOSS, PARITY_WEIGHTS

# One launch for each number of ranks. More layouts: python benchmarks/parity.py
RUNS = """
    tied/mp2@1x2    untied/dp2mp4@1x8+rows+sp  tied/dp4mp2@1x8+sp    untied/mp8@1x8+rows
    untied/dp8@1x8
    untied/mp2@2x1  tied/mp2@2x1+rows+sp       untied/dp2mp2@2x2+sp  tied/mp4@2x2+rows
    tied/dp4@4x1    tied/dp2mp2@4x1+rows+sp    untied/dp2mp2@4x1+rows
""".split()
USED = ("untied/dp2mp4@1x8+rows+sp", "tied/mp2@2x1+rows+sp")
# The weights of which a rank holds a slice, besides tables.
CUT = re.compile(
    r"(query|key|value|mapping)_(kernel|bias)|(output|projection)_kernel|head/(kernel|bias)"
)


def each(runs):
    """Parametrize a test by runs."""
    parameters = [
        pytest.param(run, marks=needs_horovod if parse(run)[1].ranks > 1 else ()) for run in runs
    ]
    return pytest.mark.parametrize("run", parameters)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def alone(folder):
    """What one process gives, by network."""
    results = {}
    for network in {parse(run)[0] for run in RUNS}:
        trainer, of_training = layouts.train(network)
        results[network] = of_training | layouts.use(trainer, network, folder, layouts.ALONE)
    return results


@pytest.fixture(scope="module")
def ranks_of(folder, alone):
    """A function of a run that returns what each of its ranks gives."""
    return layouts.reader(folder, RUNS, USED)


@each(RUNS)
def test_losses_and_weights_are_those_of_one_process(run, ranks_of, alone):
    network, _ = parse(run)
    expected = alone[network]
    found = layouts.differences(ranks_of(run)[0], expected, network)
    assert len(set(expected["losses"])) == layouts.STEPS
    assert found["loss"] <= PARITY_LOSS
    assert found["weights"] <= PARITY_WEIGHTS, found["where"]


@each(RUNS)
def test_initial_weights_do_not_depend_on_the_layout(run, ranks_of, alone):
    expected = alone[parse(run)[0]]
    assert_same(weights(ranks_of(run)[0], "initial"), weights(expected, "initial"))


@each(run for run in RUNS if parse(run)[1].ranks > 1)
def test_ranks_agree_to_the_last_bit(run, ranks_of):
    first, *others = ranks_of(run)
    for other in others:
        np.testing.assert_array_equal(other["losses"], first["losses"])
        assert_same(weights(other, "final"), weights(first, "final"))


@each(run for run in RUNS if parse(run)[1].model > 1 and parse(run)[1].devices == 1)
def test_a_rank_holds_its_slices_only(run, ranks_of):
    _, layout = parse(run)
    for rank in ranks_of(run):
        cut, whole = 0, 0
        for path, weight in weights(rank, "final").items():
            if CUT.search(path) or layout.rows and path.endswith("_embedding/table"):
                cut += weight.nbytes
            else:
                whole += weight.nbytes
        assert rank["bytes"] == cut // layout.model + whole


@each(USED)
def test_evaluation_and_prediction_are_those_of_one_process(run, ranks_of, alone):
    expected = alone[parse(run)[0]]
    for rank in ranks_of(run):
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["logits"], expected["logits"], rtol=0, atol=PARITY_LOGITS)


@each(USED)
@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_translations_are_those_of_one_process(run, search, ranks_of, alone):
    for rank in ranks_of(run):
        np.testing.assert_array_equal(rank[search], alone[parse(run)[0]][search])


@each(USED)
def test_weights_saved_by_the_job_load_in_one_process(run, ranks_of, folder):
    network, layout = parse(run)
    trained = weights(ranks_of(run)[0], "final")
    model, _ = layouts.NETWORKS[network](layouts.EPSILON)
    Trainer(model).load_weights(layouts.weights_file(folder, network, layout))
    assert_same(trained, {weight.path: weight.numpy() for weight in model.weights})


@each(USED)
def test_weights_saved_by_one_process_load_in_the_job(run, ranks_of, alone):
    expected = alone[parse(run)[0]]
    for rank in ranks_of(run):
        assert_same(weights(rank, "loaded"), weights(expected, "final"))
