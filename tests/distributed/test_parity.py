"""Promise: a job gives the numbers of one process, whatever its layout."""

import numpy as np
import pytest

from dtransformer.trainers import Trainer
from harness.compare import assert_same, differences, weights
from harness.networks import make
from harness.runs import Run
from harness.tolerances import PARITY_LOGITS, PARITY_LOSS, PARITY_WEIGHTS
from harness.training import STEPS, USED, weights_file
from tests.shared_runs import each

# More layouts: python benchmarks/parity.py, with --layouts '*+shard?', '*pp*', '*cp*' and '*ep*'
QUICK = """
    untied/dp2mp2@1x4+rows+sp
    tied.used/mp2@2x1+rows+sp       sgd/mp4@2x2+rows

    adamw/dp2@2x1+shard2            tied/dp2@2x1+shard3

    lamb/dp2@2x1+whole2

    deep_dropout/pp2m4-1f1b@2x1     deep_tied.used/pp2m2-interleaved2@2x1
    deep_tied/mp2pp2m2-1f1b@2x2     deep_tied/dp2pp2m2-1f1b@4x1+shard2
    deep_llama/mp2@2x1  deep_bert/mp2@1x2+rows+sp

    deep_long/cp2@1x2               deep_long_causal/cp2@2x1+ring
    deep_moe/dp2ep2@2x1
""".split()
LONG = """
    untied.used/dp2mp2@1x4+rows+sp  sgd/dp2@1x2  sgd/dp2mp2@2x2+sp  adamw/dp2@2x1+shard1
    tied.used/dp2@2x1+shard3  muon/dp2@2x1+whole1  deep_llama_lora/dp2@2x1
    deep_llama_frozen/pp2m4-1f1b@2x1  deep_bert.used/mp2@1x2+rows+sp  deep_long.used/cp2@1x2
    untied.used/dp2mp4@1x8+rows+sp  tied/dp4mp2@1x8+sp  untied/dp8@1x8  untied/mp8@1x8+rows
    tied/mp2@1x2  tied/mp4@1x4+sp  sgd/dp4@1x4  untied/mp2@2x1  tied/mp4@2x2+rows  untied/dp2mp2@2x2+sp
    tied/dp4@4x1  adamw/dp4@4x1+shard3  untied/dp2mp2@4x1+rows  tied/dp2mp2@4x1+rows+sp
    sgd/dp2@2x1+shard2  lion/dp2@2x1+shard1  adamw/dp2mp2@2x2+shard1  adamw/dp4mp2@4x2+shard3
    sgd/dp2mp2@2x2+shard3  adamw/dp2@2x1+shard3  deep_tied.used/mp2pp2m2-1f1b@2x2
    deep_dropout/pp2m4-zb_h1@2x1  deep_dropout/pp4m4-1f1b@4x1  deep_dropout/pp4m4-zb_h1@4x1
    deep_packed/mp2@1x2+sp  deep_packed/dp2mp2@2x2+rows  deep_packed/pp2m4-1f1b@2x1
    deep_packed/dp2@2x1+shard3
    deep_llama.used/dp2mp2@2x2+rows
    deep_llama.used/mp2@1x2+sp  deep_llama/mp4@1x4  deep_llama/dp2@2x1+shard1
    deep_llama/dp2@2x1+shard2  deep_llama.used/dp2@2x1+shard3  deep_llama.used/pp2m4-1f1b@2x1
    deep_llama/pp2m4-zb_h1@2x1  deep_llama.used/mp2pp2m2-1f1b@2x2+rows
    deep_llama_lora.used/dp2mp2@2x2+rows  deep_llama_lora/mp2@2x1+sp
    deep_llama_lora/mp2pp2m2-1f1b@2x2+rows
    deep_llama_lora/dp2@2x1+shard1  deep_llama_lora/dp2@2x1+shard2  deep_llama_lora/pp2m4-zb_h1@2x1
    deep_llama_lora.used/dp2@2x1+shard3  deep_llama_lora.used/pp2m4-1f1b@2x1
    deep_llama_lora/dp2mp2@2x2+shard3  deep_llama_lora/dp2@2x1+whole2  deep_llama_lora/mp2@1x2+rows+sp
    deep_llama_frozen.used/dp2mp2@2x2+rows  deep_llama_frozen/dp2@2x1+shard3
    deep_llama_frozen/dp2@2x1+shard1  deep_llama_frozen/dp2mp2@2x2+shard2
    deep_llama_frozen/pp2m4-zb_h1@2x1  deep_llama_frozen.used/mp2pp2m2-1f1b@2x2+rows
    deep_llama_frozen/pp2m4-zb_v2@2x1  deep_llama_frozen.used/pp2m2-interleaved2@2x1
    deep_bert.used/dp2mp2@2x2+rows  deep_bert.used/dp2@2x1+shard3  deep_bert/dp2@2x1+shard1
    deep_bert.used/pp2m4-1f1b@2x1  deep_bert/pp2m4-zb_h1@2x1  deep_bert/mp2pp2m2-1f1b@2x2+rows
    deep_moe/dp2@2x1  deep_moe/dp2@2x1+shard1  deep_moe/dp2@2x1+shard2  deep_moe.used/dp2@2x1+shard3
    deep_moe/dp2@1x2  deep_moe/dp2mp2@1x4+sp  deep_moe.used/mp2@2x1+rows+sp  deep_moe/pp2m4-1f1b@2x1
    deep_moe.used/dp2ep2@1x2  deep_moe_global/dp2@2x1  deep_moe/dp2ep2@2x1+shard3
    deep_moe.used/dp2mp2ep2@2x2+rows+sp
    deep_moe/dp4ep2@4x1  deep_moe/dp4ep2@4x1+shard1  deep_moe/dp4ep2@4x1+shard2  deep_moe/dp4ep4@4x1
    deep_moe/dp2mp2ep2@4x1  deep_moe/dp2mp2ep2@2x2+shard3  deep_moe.used/pp2m4-1f1b@2x1
    deep_moe/pp2m4-zb_h1@2x1  deep_moe/dp2pp2m2-1f1b@4x1+shard2  deep_moe/dp2ep2pp2m2-1f1b@4x1
    deep_moe/dp2mp2ep2pp2m2-1f1b@4x2  deep_moe_global.used/dp2@1x2  deep_moe_global/dp2ep2@2x1
    deep_moe_global/dp2@2x1+shard3  deep_moe_global/dp4@4x1+shard2  deep_moe_global/dp2mp2ep2@2x2
    deep_sentences/mp2@1x2+sp  deep_sentences/dp2@2x1+shard2  deep_sentences/dp2pp2m2-1f1b@4x1
    deep_bart.used/dp2mp2@2x2+rows  deep_bart/mp2@1x2+rows+sp  deep_bart.used/dp2@2x1+shard3
    deep_bart/dp2@2x1+shard1  deep_bart/dp2@2x1+shard2  deep_bart.used/pp2m4-1f1b@2x1
    deep_bart/pp2m4-zb_h1@2x1  deep_bart.used/mp2pp2m2-1f1b@2x2+rows
    deep_t5.used/dp2mp2@2x2+rows  deep_t5/mp2@1x2+rows+sp  deep_t5.used/dp2@2x1+shard3
    deep_t5/dp2@2x1+shard1  deep_t5/dp2@2x1+shard2  deep_t5.used/pp2m4-1f1b@2x1
    deep_t5/pp2m4-zb_h1@2x1  deep_t5/pp2m2-interleaved2@2x1  deep_t5.used/mp2pp2m2-1f1b@2x2+rows
    deep_long/cp4@1x4+ring  deep_long/cp4mp2@1x8+ulysses  deep_long/dp2cp2@2x2+all_gather
    deep_long.used/cp2pp2m2-1f1b@2x2+ring  deep_long/dp2cp2@2x2+ulysses+shard1
    deep_long/dp2cp2@1x4+all_gather  deep_long/dp2cp2@2x2+ring+shard3  deep_long/cp2mp2@1x4+rows+ring
    deep_long_causal.used/cp2mp2@2x2+rows+all_gather  deep_long_causal/dp2cp2@2x2+ring+shard2
    deep_long_causal/cp4@4x1+ring  deep_long_causal/cp4@2x2+ulysses  deep_long_causal/cp4@1x4+all_gather
    deep_long_causal/cp2pp2m2-1f1b@4x1+ulysses  deep_long_causal/dp2cp2@2x2+all_gather+shard3
    deep_long_causal/cp2mp2pp2m2-1f1b@2x4+ring
    deep_causal.used/mp2@2x1+sp  deep_causal.used/pp2m2-interleaved2@2x1
    deep_long_moe/cp2@1x2  deep_long_moe/dp2cp2ep2@1x4  deep_moe/dp2ep2@1x2+recompute
    deep_long_causal/cp2@1x2+ring+recompute
    deep_causal.used/mp2-interleaved4@1x2  deep_tied.used/mp2m2-interleaved4@2x1+rows+sp
    deep_llama.used/dp2mp2-interleaved4@2x2+shard2  deep_t5.used/mp2-interleaved4@1x2
    deep_tied.used/pp2m4-zb_v2@2x1  deep/dp2pp2m4-zb_h1@4x1+shard2
    deep/mp2pp2m2-1f1b@4x1+rows+sp
    lamb/dp2@2x1+whole1  adafactor/dp2@2x1+whole1  adafactor/dp2@2x1+whole2
    muon/dp2@2x1+whole2  adamw/dp2@2x1+whole2  lamb/dp2mp2@2x2+rows+whole1
    lamb/dp4@4x1+whole1  adafactor/dp4@4x1+whole2  muon/dp4@4x1+whole2
    adafactor/dp2mp2@4x1+rows+whole2  muon/mp2@2x1+rows+whole1  deep_lamb/dp2pp2m2-1f1b@4x1+whole2
""".split()
RUNS = [*QUICK, *LONG]
USED_RUNS = [run for run in RUNS if USED in run]


def network_of(run):
    return Run.of(run).task.removesuffix(USED)


def alone(run):
    """Return the run of the same network in one process."""
    network, layout = network_of(run), Run.of(run).layout
    if network == "deep_dropout":  # its masks depend on the micro-batches
        return f"{network}/m{layout.micro_batches}@1x1"
    together = QUICK if run in QUICK else RUNS  # the quick suite does no more than it needs
    is_used = any(USED in other and network_of(other) == network for other in together)
    return f"{network}{USED * is_used}/alone@1x1"


def together(ranks, kind):
    """Return the weights that the ranks have, by path."""
    have = [weights(results, kind) for results in reversed(ranks)]
    return {path: weight for own in have for path, weight in own.items()}


each_run = each(RUNS, LONG, lambda run: [alone(run)])
each_used = each(USED_RUNS, LONG, lambda run: [alone(run)])
each_generating = each(
    [run for run in USED_RUNS if network_of(run) != "deep_bert"], LONG, lambda run: [alone(run)]
)


@each_run
def test_losses_and_weights_are_those_of_one_process(run, ranks_of):
    ranks, (expected,) = ranks_of(run), ranks_of(alone(run))
    assert len(set(expected["losses"])) == STEPS
    assert together(ranks, "final").keys() == weights(expected, "final").keys()
    found = {name: value for rank in reversed(ranks) for name, value in rank.items()}
    found = differences(found, expected, network_of(run))
    assert found["loss"] <= PARITY_LOSS
    assert found["weights"] <= PARITY_WEIGHTS, found["where"]


@each([run for run in RUNS if "moe" in run], LONG, lambda run: [alone(run)])
def test_experts_take_the_tokens_that_they_take_in_one_process(run, ranks_of):
    (expected,) = ranks_of(alone(run))
    for rank in ranks_of(run):
        np.testing.assert_array_equal(rank["taken"], expected["taken"])


@each_run
def test_initial_weights_do_not_depend_on_the_layout(run, ranks_of):
    (expected,) = ranks_of(alone(run))
    assert_same(together(ranks_of(run), "initial"), weights(expected, "initial"))


@each([run for run in RUNS if Run.of(run).layout.ranks > 1], LONG)
def test_ranks_agree_to_the_last_bit(run, ranks_of):
    ranks = ranks_of(run)
    common = together(ranks, "final")
    for rank in ranks:
        np.testing.assert_array_equal(rank["losses"], ranks[0]["losses"])
        for path, weight in weights(rank, "final").items():
            np.testing.assert_array_equal(weight, common[path], err_msg=path)


@each_used
def test_evaluation_and_prediction_are_those_of_one_process(run, ranks_of):
    (expected,) = ranks_of(alone(run))
    for rank in ranks_of(run):
        np.testing.assert_allclose(rank["evaluation"], expected["evaluation"], rtol=PARITY_LOSS)
        np.testing.assert_allclose(rank["logits"], expected["logits"], rtol=0, atol=PARITY_LOGITS)


@each_generating
@pytest.mark.parametrize("search", ["greedy", "beam", "drawn", "ruled"])
def test_translations_are_those_of_one_process(run, search, ranks_of):
    (expected,) = ranks_of(alone(run))
    for rank in ranks_of(run):
        np.testing.assert_array_equal(rank[search], expected[search])


@each_used
def test_weights_saved_by_the_job_load_in_one_process(run, ranks_of):
    trained = together(ranks_of(run), "final")
    model, _ = make(network_of(run))
    Trainer(model).load_weights(weights_file(ranks_of.folder, network_of(run), Run.of(run).layout))
    assert_same(trained, {weight.path: weight.numpy() for weight in model.weights})


@each_used
def test_weights_saved_by_one_process_load_in_the_job(run, ranks_of):
    expected = weights(ranks_of(alone(run))[0], "final")
    for rank in ranks_of(run):
        loaded = weights(rank, "loaded")
        assert loaded.keys() == weights(rank, "final").keys()
        assert_same(loaded, {path: expected[path] for path in loaded})
