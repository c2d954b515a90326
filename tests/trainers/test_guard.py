"""A guard skips gradient spikes, stops after several, and is resumed with its norms."""

import itertools

import keras
import numpy as np
import pytest

from dtransformer import parallel_config
from dtransformer.trainers import ModelCheckpoint, SpikeGuard, Trainer
from tests.shared_runs import on_ranks

RATE = 0.01
WARM = 16  # Steps before the guard acts.


def make_trainer(guard=None, optimizer=None):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    network = keras.Sequential([keras.Input((4,)), *layers])
    trainer = Trainer(network)
    trainer.compile(optimizer or keras.optimizers.Adam(RATE), "mse", guard=guard)
    return trainer


def rows(scales):
    """Return one batch of four rows per scale. The scale multiplies the labels."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(scales), 4, 4)).astype("float32")
    y = x.sum(-1, keepdims=True) * np.reshape(scales, (-1, 1, 1))
    return x.reshape(-1, 4), y.reshape(-1, 1).astype("float32")


def fit(trainer, scales, **options):
    record = []
    keep_logs = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: record.append(logs)
    )
    x, y = rows(scales)
    callbacks = [keep_logs, *options.pop("callbacks", [])]
    trainer.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks, **options)
    return record


def test_spikes_are_skipped_and_counted():
    ordinary = [1.0] * (WARM + 4)
    trainer = make_trainer(SpikeGuard(8.0))
    logs = fit(trainer, [*ordinary, 1e4, np.nan, 1.0])
    assert [x["skipped_spikes"] for x in logs[-4:]] == [0, 1, 2, 2]
    assert [x["spikes_in_a_row"] for x in logs[-4:]] == [0, 1, 2, 0]
    assert np.isfinite(trainer.get_weights()[0]).all()
    assert int(trainer.optimizer.iterations) == len(ordinary) + 1


def test_skipped_steps_change_neither_weights_nor_states():
    ordinary = [1.0] * (WARM + 4)
    guarded = make_trainer(SpikeGuard(8.0))
    fit(guarded, [*ordinary, 1e4, 1e5])
    expected = make_trainer()
    fit(expected, ordinary)
    pairs = zip(guarded.optimizer.variables, expected.optimizer.variables, strict=True)
    for variable, other_variable in pairs:
        np.testing.assert_array_equal(variable, other_variable)
    np.testing.assert_array_equal(guarded.get_weights()[0], expected.get_weights()[0])


def test_first_steps_are_never_spikes():
    logs = fit(make_trainer(SpikeGuard(1.01)), [1.0, 1e3] * (WARM // 2))
    assert logs[-1]["skipped_spikes"] == 0


def test_limit_is_a_multiple_of_the_median():
    trainer = make_trainer(SpikeGuard(3.0), keras.optimizers.SGD(0.0))
    logs = fit(trainer, [1.0] * 30)
    norms = [x["gradient_norm"] for x in logs]
    skipped = [b["skipped_spikes"] - a["skipped_spikes"] for a, b in itertools.pairwise(logs)]
    accepted = norms[:WARM]
    for norm, is_skipped in zip(norms[WARM:], skipped[WARM - 1 :], strict=True):
        expected = norm > 3 * sorted(accepted)[(len(accepted) - 1) // 2]
        assert bool(is_skipped) == expected
        accepted += [] if expected else [norm]


def test_training_stops_and_saves_after_several_spikes(tmp_path, capsys):
    trainer = make_trainer(SpikeGuard(8.0, stop_after=3))
    scales = [*[1.0] * (WARM + 4), *[1e4] * 6]
    logs = fit(trainer, scales, callbacks=[ModelCheckpoint(tmp_path)])
    assert len(logs) == WARM + 4 + 3
    assert "spike or not finite in 3 steps in a row" in capsys.readouterr().err
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_norms_are_resumed(tmp_path):
    ordinary = [1.0] * (WARM + 4)
    trainer = make_trainer(SpikeGuard(8.0))
    fit(trainer, ordinary)
    trainer.save(tmp_path / "x")
    resumed = make_trainer(SpikeGuard(8.0))
    resumed.restore(tmp_path / "x")
    assert fit(resumed, [1e4])[-1]["skipped_spikes"] == 1
    without_guard = make_trainer()
    without_guard.restore(tmp_path / "x")


def test_checkpoints_without_a_guard_are_restored(tmp_path):
    trainer = make_trainer()
    fit(trainer, [1.0])
    trainer.save(tmp_path / "x")
    guarded = make_trainer(SpikeGuard())
    guarded.restore(tmp_path / "x")
    assert fit(guarded, [1e4])[-1]["skipped_spikes"] == 0


def test_overflows_of_a_dynamic_loss_scale_are_no_spikes():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE), initial_scale=2.0)
    trainer = make_trainer(SpikeGuard(8.0), optimizer)
    logs = fit(trainer, [*[1.0] * (WARM + 4), np.inf, 1e4, 1.0])
    assert [x["skipped_steps"] for x in logs[-3:]] == [1, 1, 1]
    assert [x["skipped_spikes"] for x in logs[-3:]] == [0, 1, 1]


def test_micro_batches_are_guarded_together():
    with parallel_config(micro_batch_num=2):
        logs = fit(make_trainer(SpikeGuard(8.0)), [*[1.0] * (WARM + 4), 1e4])
    assert logs[-1]["skipped_spikes"] == 1


def check_on_ranks():
    """Ranks skip the same steps, so their weights equal a fit without the spikes."""
    ordinary = [1.0] * (WARM + 4)
    guarded = make_trainer(SpikeGuard(8.0))
    logs = fit(guarded, [*ordinary, 1e4, np.nan])
    assert logs[-1]["skipped_spikes"] == 2
    expected = make_trainer()
    fit(expected, ordinary)
    for value, expected_value in zip(guarded.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected_value)


@on_ranks("dp2@2x1+shard2")
def test_data_ranks_skip_the_same_steps():
    check_on_ranks()


@pytest.mark.long
@on_ranks("dp2@2x1+shard3")
def test_weight_shards_are_unchanged_by_spikes():
    check_on_ranks()


@pytest.mark.long
@on_ranks("mp2@2x1")
def test_ranks_of_a_mesh_skip_the_same_steps():
    check_on_ranks()


@pytest.mark.long
@on_ranks("pp2m2-1f1b@2x1")
def test_stages_skip_the_same_steps():
    check_on_ranks()


def test_configs_set_a_guard():
    from dtransformer.errors import InputError
    from dtransformer.runs.config import load_config

    assert load_config(None, ["task=chat"]).training.guard is None
    config = load_config(None, ["task=chat", "training.guard={skip_spikes: 4, stop_after: 2}"])
    assert (config.training.guard.skip_spikes, config.training.guard.stop_after) == (4, 2)
    for setting, message in (("{skip: 4}", "unknown key `skip`"), ("{skip_spikes: 1}", "greater")):
        with pytest.raises(InputError, match=message):
            load_config(None, ["task=chat", f"training.guard={setting}"])


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"stop_after": 0}])
def test_wrong_options_raise_an_error(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SpikeGuard(**options)
