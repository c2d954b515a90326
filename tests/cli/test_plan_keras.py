"""`dtransformer plan` counts the bytes per device of a Keras model."""

import json

import pytest

from dtransformer.cli import main
from harness.keras_networks import HIDDEN, VOCAB_SIZE

GPT = ["plan", "--model", "harness.keras_networks:gpt"]
PARAMETERS = 107_836


def test_plan_counts_the_weights_of_each_degree(capsys):
    assert main([*GPT, "--devices", "4", "--json"]) == 0
    rows = {row["model_parallel"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == [1, 2, 4]
    alone = rows[1]
    assert alone["weights"] == 4 * PARAMETERS and alone["states"] == 2 * alone["weights"]
    assert alone["states_sharded"] == alone["states"] / 4
    # The table, the classifier, five norms and four biases of projections are replicated.
    replicated = 2 * VOCAB_SIZE * HIDDEN + VOCAB_SIZE + 5 * 2 * HIDDEN + 4 * HIDDEN
    assert rows[4]["weights"] == 4 * replicated + PARAMETERS - replicated
    assert rows[2]["sharded_fraction"] == pytest.approx(1 - replicated / PARAMETERS)
    assert rows[2]["weights"] < 0.55 * alone["weights"]


def test_plan_lists_the_replicated_weights(capsys):
    assert main([*GPT, "--devices", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"{PARAMETERS:,} parameters" in printed
    assert "embeddings: 3,840 (replicated: no rule)" in printed


def test_muon_has_two_states_for_all_weights_except_matrices(capsys):
    states = {}
    for optimizer in ("lion", "muon", "adamw"):
        assert main([*GPT, "--devices", "1", "--json", "--optimizer", optimizer]) == 0
        states[optimizer] = json.loads(capsys.readouterr().out)[0]["states"]
    # Dense kernels are matrices: two of each block's feed-forward layer, and the classifier.
    matrices = 2 * 2 * 4 * HIDDEN**2 + VOCAB_SIZE * HIDDEN
    assert states["lion"] == 4 * PARAMETERS
    assert states["muon"] == states["adamw"] - 4 * matrices


@pytest.mark.parametrize(
    "options, words",
    [
        (["--model", "harness.keras_networks:gtp", "--devices", "2"], "gtp"),
        (["--model", "no_module:gpt", "--devices", "2"], "no_module"),
        (["--model", "os:getcwd", "--devices", "2"], "os:getcwd returned"),
        ([*GPT[1:]], "--devices"),
        ([*GPT[1:], "--devices", "2", "--yaml", "x.yaml"], "--yaml"),
    ],
)
def test_wrong_options_are_errors(options, words, capsys):
    assert main(["plan", *options]) == 2
    assert words in capsys.readouterr().err
