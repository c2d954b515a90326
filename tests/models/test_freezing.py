"""Promise: frozen weights are computed with and saved, and cost nothing of what training costs."""

import keras
import numpy as np
import pytest

from dtransformer import parallel_config
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM, freeze, unfreeze
from dtransformer.trainers import Trainer
from harness.measure import elements_sent
from tests.on_mesh import on_mesh, start
from tests.shared_runs import on_ranks

SIZES = {"hidden_size": 16, "num_heads": 2, "num_layers": 3, "dropout_rate": 0.0}
FROZEN = ["embedding/*", "positions/table", "blocks/block_[01]/*"]
IDS = np.random.default_rng(0).integers(4, 50, (8, 9))


def network_of(**options):
    network = CausalLM(50, **{**SIZES, **options})
    network.build()
    return network


def trainer_of(network, optimizer=None):
    trainer = Trainer(network)
    trainer.compile(optimizer or keras.optimizers.AdamW(1e-2), CrossEntropyLoss())
    return trainer


def train(trainer, steps=3):
    step = lambda: trainer.train_on_batch(IDS[:, :-1], IDS[:, 1:], return_dict=True)
    return [float(step()["loss"]) for _ in range(steps)]


def test_frozen_weights_stay_and_the_others_learn():
    network = network_of(tied_head=False)
    paths = freeze(network, FROZEN)
    assert len(paths) == 2 + 2 * 16 and paths[:2] == ["embedding/table", "positions/table"]
    before = {weight.path: weight.numpy() for weight in network.weights}
    trainer = trainer_of(network)
    losses = train(trainer)
    assert losses[-1] < losses[0]
    for weight in network.weights:
        changed = (weight.numpy() != before[weight.path]).any()
        assert changed == (weight.path.removeprefix("causal_lm/") not in paths), weight.path
    trained = sum(weight.numpy().nbytes for weight in network.trainable_weights)
    report = trainer.memory_report()
    assert report["gradients"].planned == report["gradients"].measured == trained
    assert report["optimizer states"].planned == report["optimizer states"].measured == 2 * trained
    everything = sum(weight.numpy().nbytes for weight in network.weights)
    assert report["weights"].planned == report["weights"].measured == everything


def test_losses_are_those_of_a_keras_layer_that_is_not_trainable():
    frozen, by_layer = network_of(), network_of()
    freeze(frozen, ["blocks/block_1/*"])
    by_layer.blocks.blocks[1].trainable = False
    assert train(trainer_of(frozen)) == train(trainer_of(by_layer))


def test_recompute_changes_nothing():
    losses = []
    for recompute in (False, True):
        with parallel_config(recompute=recompute):
            network = network_of()
            freeze(network, ["blocks/block_0/*", "*/attention/(query|value)_kernel"])
            losses.append(train(trainer_of(network)))
    assert losses[0] == losses[1]


def test_a_checkpoint_has_frozen_weights(tmp_path):
    network, other = network_of(name="one"), network_of(name="two", hidden_act="relu")
    freeze(network, FROZEN)
    trainer = trainer_of(network)
    train(trainer)
    trainer.save(tmp_path / "saved")
    other.set_weights([0 * weight for weight in other.get_weights()])
    freeze(other, FROZEN)
    trainer_of(other).restore(tmp_path / "saved")
    for found, expected in zip(other.get_weights(), network.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_matches_nothing_is_told():
    with pytest.raises(
        ValueError, match="'blocks/block_7/.*' matches no weight. Existing weights are .*/"
    ):
        freeze(network_of(), ["embedding/*", "blocks/block_7/*"])
    with pytest.raises(ValueError, match="has no weights yet"):
        freeze(CausalLM(50, **SIZES), "embedding/*")


def test_what_comes_too_late_is_told():
    network = network_of()
    trainer = trainer_of(network)
    train(trainer, 1)
    freeze(network, "embedding/*")
    with pytest.raises(
        ValueError, match="embedding/table was added, removed, frozen or unfrozen after"
    ):
        train(trainer, 1)
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    train(trainer, 1)
    freeze(network, "*")
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    with pytest.raises(ValueError, match="All weights of the network are frozen"):
        train(trainer, 1)
    unfreeze(network)
    assert len(network.trainable_variables) == len(network.variables)


def test_mixed_precision_keeps_its_types():
    network = network_of(dtype="mixed_bfloat16")
    freeze(network, FROZEN)
    assert np.isfinite(train(trainer_of(network))).all()
    assert {weight.dtype for weight in network.variables} == {"float32"}


@on_mesh
def test_on_a_mesh_nothing_is_sent_for_what_is_frozen():
    start(data_parallel=2, model_parallel=2)
    network = network_of(tied_head=False)
    freeze(network, FROZEN)
    trainer = trainer_of(network, keras.optimizers.SGD(0.1))
    train(trainer, 1)
    report = trainer.communication_report()
    for number in range(2):
        of_block = report.of_layer(f"blocks/block_{number}")
        assert {c.backward for c in of_block} == {False}
    assert not report.of_layer("embedding")
    for block, elements in report.formula.items():
        over_model = [c for c in report.of_layer(block) if c.over == "model"]
        assert elements == sum(c.elements for c in over_model) == report.summed_elements(block)


@on_ranks("dp2@2x1")
def test_gradients_of_frozen_weights_are_not_reduced():
    """Of what is sent for a weight, by a ring of two: at level 3 it is still all-gathered."""
    for level, saved in {0: 1.0, 2: 1.0, 3: 0.5}.items():
        sent = {}
        with parallel_config(optimizer_shard=level, parallel_optimizer_threshold=0):
            for patterns in ((), "blocks/block_[01]/*"):
                network = network_of()
                frozen = freeze(network, patterns)
                trainer = trainer_of(network, keras.optimizers.SGD(1e-2, momentum=0.9))
                assert np.isfinite(train(trainer, 1)).all()
                sent[patterns] = elements_sent(trainer)
                report = trainer.memory_report()
                for row in ("weights", "optimizer states"):
                    assert report[row].planned == report[row].measured, (level, row)
        sizes = {weight.path: np.prod(weight.shape) for weight in network.variables}
        expected = saved * sum(sizes[f"causal_lm/{path}"] for path in frozen)
        assert abs(sent[()] - sent[patterns] - expected) < 0.03 * expected, (level, sent, expected)
