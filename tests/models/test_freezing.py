"""Frozen weights are used and saved, but need no gradients, optimizer states or reductions."""

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


def build_network(**options):
    network = CausalLM(50, **{**SIZES, **options})
    network.build()
    return network


def make_trainer(network, optimizer=None):
    trainer = Trainer(network)
    trainer.compile(optimizer or keras.optimizers.AdamW(1e-2), CrossEntropyLoss())
    return trainer


def train(trainer, steps=3):
    step = lambda: trainer.train_on_batch(IDS[:, :-1], IDS[:, 1:], return_dict=True)
    return [float(step()["loss"]) for _ in range(steps)]


def test_only_weights_that_are_not_frozen_change():
    network = build_network(tied_head=False)
    paths = freeze(network, FROZEN)
    assert len(paths) == 2 + 2 * 16 and paths[:2] == ["embedding/table", "positions/table"]
    before = {weight.path: weight.numpy() for weight in network.weights}
    trainer = make_trainer(network)
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


def test_losses_match_keras_layers_that_are_not_trainable():
    frozen, by_layer = build_network(), build_network()
    freeze(frozen, ["blocks/block_1/*"])
    by_layer.blocks.blocks[1].trainable = False
    assert train(make_trainer(frozen)) == train(make_trainer(by_layer))


def test_recompute_does_not_change_losses():
    losses = []
    for recompute in (False, True):
        with parallel_config(recompute=recompute):
            network = build_network()
            freeze(network, ["blocks/block_0/*", "*/attention/(query|value)_kernel"])
            losses.append(train(make_trainer(network)))
    assert losses[0] == losses[1]


def test_checkpoint_contains_frozen_weights(tmp_path):
    network, restored = build_network(name="one"), build_network(name="two", hidden_act="relu")
    freeze(network, FROZEN)
    trainer = make_trainer(network)
    train(trainer)
    trainer.save(tmp_path / "saved")
    restored.set_weights([0 * weight for weight in restored.get_weights()])
    freeze(restored, FROZEN)
    make_trainer(restored).restore(tmp_path / "saved")
    for value, expected in zip(restored.get_weights(), network.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_pattern_without_matches_raises_an_error():
    with pytest.raises(
        ValueError, match="'blocks/block_7/.*' matches no weight. Existing weights are .*/"
    ):
        freeze(build_network(), ["embedding/*", "blocks/block_7/*"])
    with pytest.raises(ValueError, match="has no weights yet"):
        freeze(CausalLM(50, **SIZES), "embedding/*")


def test_freezing_after_compile_raises_an_error():
    network = build_network()
    trainer = make_trainer(network)
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


def test_mixed_precision_keeps_float32_variables():
    network = build_network(dtype="mixed_bfloat16")
    freeze(network, FROZEN)
    assert np.isfinite(train(make_trainer(network))).all()
    assert {weight.dtype for weight in network.variables} == {"float32"}


@on_mesh
def test_frozen_blocks_send_no_gradients_on_a_mesh():
    start(data_parallel=2, model_parallel=2)
    network = build_network(tied_head=False)
    freeze(network, FROZEN)
    trainer = make_trainer(network, keras.optimizers.SGD(0.1))
    train(trainer, 1)
    report = trainer.communication_report()
    for index in range(2):
        block_collectives = report.get_layer(f"blocks/block_{index}")
        assert {c.backward for c in block_collectives} == {False}
    assert not report.get_layer("embedding")
    for block, elements in report.formula.items():
        over_model = [c for c in report.get_layer(block) if c.over == "model"]
        assert elements == sum(c.elements for c in over_model) == report.summed_elements(block)


@on_ranks("dp2@2x1")
def test_gradients_of_frozen_weights_are_not_reduced():
    """Compare the elements sent in a ring of two ranks. Level 3 still all-gathers frozen weights."""
    for level, saved in {0: 1.0, 2: 1.0, 3: 0.5}.items():
        sent = {}
        with parallel_config(optimizer_shard=level, parallel_optimizer_threshold=0):
            for patterns in ((), "blocks/block_[01]/*"):
                network = build_network()
                frozen = freeze(network, patterns)
                trainer = make_trainer(network, keras.optimizers.SGD(1e-2, momentum=0.9))
                assert np.isfinite(train(trainer, 1)).all()
                sent[patterns] = elements_sent(trainer)
                report = trainer.memory_report()
                for row in ("weights", "optimizer states"):
                    assert report[row].planned == report[row].measured, (level, row)
        sizes = {weight.path: np.prod(weight.shape) for weight in network.variables}
        expected = saved * sum(sizes[f"causal_lm/{path}"] for path in frozen)
        assert abs(sent[()] - sent[patterns] - expected) < 0.03 * expected, (level, sent, expected)
