"""Adapters in bfloat16: unbiased small updates, saved files, every layout, and clear refusals."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

import dtransformer
from dtransformer.models import add_lora, load_lora, merge_lora, save_lora
from dtransformer.models.lora import adapted_kernels, get_adapters
from tests.models.test_freezing import IDS, build_network, make_trainer
from tests.models.test_lora import LLAMA, get_logits
from tests.on_mesh import on_mesh, start
from tests.shared_runs import parametrize_runs

TASKS = {}  # Multi-rank runs of this file.
STEPS = 10
SMALL = {**LLAMA, "num_layers": 1, "num_kv_heads": 2}
FORMS = [{}, {"kind": "dora", "dropout": 0.1}]


def adapted_network(dtype="bfloat16", **options):
    dtransformer.set_seed(3)
    network = build_network(**SMALL)
    add_lora(network, rank=4, targets="*_kernel", dtype=dtype, **options)
    return network


def train(network, steps=STEPS, rate=1e-2):
    trainer = make_trainer(network, keras.optimizers.AdamW(rate, epsilon=1e-6))

    def step():
        return trainer.train_on_batch(IDS[:, :-1], IDS[:, 1:], return_dict=True)["step_loss"]

    return [float(step()) for _ in range(steps)], trainer


def networks_of_both_types(**options):
    """Return networks with equal bfloat16 and float32 factors."""
    networks = [adapted_network(dtype, **options) for dtype in ("bfloat16", "float32")]
    kernels, float32_kernels = map(adapted_kernels, networks)
    for path, kernel in float32_kernels.items():
        kernel.low_rank.a.assign(kernels[path].low_rank.a)
    return networks


def factor_values(network):
    factors = [x for k in adapted_kernels(network).values() for x in k.low_rank.factors.values()]
    return np.concatenate([np.float32(factor.numpy()).ravel() for factor in factors])


@pytest.mark.parametrize("options", FORMS, ids=["lora", "dora"])
def test_losses_follow_float32_adapters(options):
    network, float32_network = networks_of_both_types(**options)
    expected, _ = train(float32_network)
    losses, trainer = train(network)
    assert {weight.dtype for weight in network.trainable_variables} == {"bfloat16"}
    moments = {x.dtype for x in trainer.optimizer.variables if len(x.shape) > 1}
    assert moments == {"float32"}
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=0.02)
    assert losses != expected


def first_factors(network):
    factors = [kernel.low_rank.a for kernel in adapted_kernels(network).values()]
    return np.concatenate([np.float32(factor.numpy()).ravel() for factor in factors])


def test_updates_below_the_precision_of_bfloat16_are_not_lost():
    """A factor near 0.2 has a precision of 2⁻¹⁰, so rounding to nearest loses each step of 1e-5."""
    changes = []
    for network in networks_of_both_types():
        before = first_factors(network)
        train(network, 60, rate=1e-5)
        changes.append(first_factors(network) - before)
    actual, expected = changes
    assert np.abs(expected).max() < 2**-9
    direction = np.sign(expected)
    mean, expected_mean = (np.mean(change * direction) for change in (actual, expected))
    assert abs(mean - expected_mean) < 0.3 * expected_mean


def test_states_and_factors_are_bfloat16_together():
    with dtransformer.parallel_config(optimizer_state_dtype="bfloat16"):
        losses, trainer = train(adapted_network())
    moments = {x.dtype for x in trainer.optimizer.variables if len(x.shape) > 1}
    assert moments == {"bfloat16"}
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("options", FORMS, ids=["lora", "dora"])
def test_saved_and_merged_factors_give_equal_logits(tmp_path, options):
    network = adapted_network(**options)
    _, trainer = train(network, 3)
    expected = get_logits(network)
    folder = save_lora(network, tmp_path / "adapters", "dtransformer")
    assert {x.dtype.name for x in load_file(folder / "adapter_model.safetensors").values()} == {
        "bfloat16"
    }
    for dtype in ("bfloat16", "float32"):
        loaded = build_network(**SMALL)
        loaded.set_weights(adapted_base(network))
        load_lora(loaded, folder, dtype=dtype)
        assert {weight.dtype for weight in loaded.trainable_variables} == {dtype}
        np.testing.assert_allclose(get_logits(loaded), expected, rtol=0, atol=1e-6)
    network.save(tmp_path / "network.keras")
    restored = keras.saving.load_model(tmp_path / "network.keras")
    np.testing.assert_array_equal(get_logits(restored), expected)
    trainer.save(tmp_path / "run.checkpoint")
    other = adapted_network(**options)
    other_trainer = train(other, 1)[1]
    other_trainer.restore(tmp_path / "run.checkpoint")
    np.testing.assert_array_equal(factor_values(other), factor_values(network))
    next_losses = [train_once(x) for x in (trainer, other_trainer)]
    assert next_losses[0] == next_losses[1]
    np.testing.assert_array_equal(factor_values(other), factor_values(network))
    expected = get_logits(network)
    merge_lora(network)
    np.testing.assert_allclose(get_logits(network), expected, rtol=0, atol=1e-5)


def train_once(trainer):
    return float(trainer.train_on_batch(IDS[:, :-1], IDS[:, 1:], return_dict=True)["step_loss"])


def adapted_base(network):
    """Return the weights of a network without its adapters."""
    factors = {
        id(x) for k in adapted_kernels(network).values() for x in k.low_rank.factors.values()
    }
    return [weight.numpy() for weight in network.weights if id(weight) not in factors]


@on_mesh
def test_meshes_follow_one_process():
    expected, _ = train(adapted_network())
    for fields in ({"model_parallel": 2}, {"data_parallel": 2, "optimizer_shard": 3}):
        start(**fields, **({"parallel_optimizer_threshold": 0} if len(fields) > 1 else {}))
        losses, _ = train(adapted_network())
        np.testing.assert_allclose(losses, expected, rtol=5e-3)


def losses_on_ranks(folder, layout):
    dtransformer.set_seed(3)
    network = build_network(**LLAMA)  # Two stages need two blocks.
    add_lora(network, rank=4, targets="*_kernel", dtype="bfloat16")
    losses, _ = train(network)
    merge_lora(network)
    return {"losses": losses}


TASKS["losses_on_ranks"] = losses_on_ranks
TASK = "tests.models.test_lora_bfloat16:losses_on_ranks"
RUNS = [f"{TASK}/{x}" for x in ("dp2@2x1+shard1", "dp2@2x1+shard3", "pp2m2-1f1b@2x1")]


@parametrize_runs(RUNS, RUNS, lambda run: [f"{TASK}/alone@1x1"])
def test_ranks_follow_one_process(run, rank_results):
    (expected,) = rank_results(f"{TASK}/alone@1x1")
    for rank in rank_results(run):
        np.testing.assert_allclose(rank["losses"], expected["losses"], rtol=5e-3)


def test_unsupported_choices_raise_errors():
    with pytest.raises(ValueError, match="`dtype` of adapters must be one of float32, bfloat16"):
        adapted_network("float16")
    network = adapted_network()
    averages = keras.optimizers.AdamW(use_ema=True)
    with pytest.raises(ValueError, match="use_ema=True"):
        make_trainer(network, averages).train_on_batch(IDS[:, :-1], IDS[:, 1:])
    with pytest.raises(ValueError, match="cannot round updates to bfloat16"):
        make_trainer(network, keras.optimizers.Nadam()).train_on_batch(IDS[:, :-1], IDS[:, 1:])
    assert get_adapters(network)
    assert tf.as_dtype(network.trainable_variables[0].dtype) == tf.bfloat16
