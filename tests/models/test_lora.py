"""Adapters start without effect, are trained alone, and can be merged, saved and loaded.

`pretrained/test_adapters.py` compares their results with PyTorch.
"""

import json

import keras
import numpy as np
import pytest

import dtransformer
from dtransformer import parallel_config
from dtransformer.errors import InputError
from dtransformer.models import (
    CausalLM,
    TranslationTransformer,
    add_lora,
    load_lora,
    merge_lora,
    save_lora,
    save_pretrained,
)
from dtransformer.reports.throughput import tokens_and_flops
from dtransformer.trainers import Trainer
from tests.models.test_freezing import IDS, build_network, make_trainer, train
from tests.on_mesh import on_mesh, start
from tests.tolerances import BLOCKS

LLAMA = {
    "positions": "rotary",
    "norm": "rms_norm",
    "gated": True,
    "use_bias": False,
    "tied_head": False,
    "embedding_scale": 1.0,
    "num_kv_heads": 1,
    "hidden_act": "silu",
}


def network_with_lora(targets="*kernel", kind="lora", **options):
    network = build_network(**{**LLAMA, **options})
    add_lora(network, rank=2, alpha=6, targets=targets, kind=kind)
    return network


def network_with_lora_and_dora(**options):
    network = network_with_lora("*feed_forward/*kernel", **options)
    add_lora(network, rank=2, alpha=6, targets=["*attention/*kernel", "head/*"], kind="dora")
    return network


def change_adapters(network):
    """Set the trainable weights to random values, because new adapters do not change outputs."""
    rng = np.random.default_rng(0)
    for weight in network.trainable_weights:
        weight.assign_add(rng.normal(0, 0.1, weight.shape).astype("float32"))


def get_logits(network):
    return np.asarray(network(IDS[:, :-1]))


def test_new_adapters_do_not_change_outputs():
    expected = get_logits(build_network(**LLAMA))  # Some processors compute other products.
    for make in (network_with_lora, network_with_lora_and_dora):
        np.testing.assert_allclose(get_logits(make()), expected, rtol=0, atol=BLOCKS["float32"])


def test_factors_depend_on_the_seed_and_their_paths_only():
    attention, other_attention = (
        network_with_lora(targets).blocks.blocks[1].attention for targets in ("*l", "*query_k*")
    )
    a, b = attention.query_kernel.low_rank.a, attention.query_kernel.low_rank.b
    assert a.shape == (16, 2) and b.shape == (2, 2, 8) and not b.numpy().any()
    assert np.abs(a.numpy()).max() <= 16**-0.5 and np.abs(a.numpy()).std() > 0.05
    np.testing.assert_array_equal(a.numpy(), other_attention.query_kernel.low_rank.a.numpy())
    dtransformer.set_seed(1)
    assert (
        network_with_lora().blocks.blocks[1].attention.query_kernel.low_rank.a.numpy() != a.numpy()
    ).all()


def test_only_factors_are_trained():
    network = network_with_lora()
    before = {weight.path: weight.numpy() for weight in network.weights}
    trainer = make_trainer(network)
    losses = train(trainer)
    assert losses[-1] < losses[0]
    changed = {path for path, x in before.items() if (get_weight(network, path) != x).any()}
    assert changed == {path for path in before if "_lora_" in path}
    factors = sum(before[path].nbytes for path in changed)
    assert trainer.memory_report()["optimizer states"].measured == 2 * factors


def get_weight(network, path):
    return next(weight.numpy() for weight in network.weights if weight.path == path)


def test_frozen_kernels_save_a_third_of_the_flops():
    """Attention cores have no weights, so their FLOPs stay the same."""
    all_trained, with_adapters = (
        tokens_and_flops(network, IDS[:, :-1], IDS[:, 1:])[1]
        for network in (build_network(**LLAMA), network_with_lora())
    )
    assert 2 / 3 < with_adapters / all_trained < 0.75


def test_freeze_others_false_trains_all_weights():
    network = build_network(**LLAMA)
    add_lora(network, freeze_others=False)
    assert len(network.trainable_variables) == len(network.variables)
    before = get_logits(network)
    train(make_trainer(network), 1)
    assert (get_logits(network) != before).any()


def test_recompute_does_not_change_losses():
    losses = []
    for recompute in (False, True):
        with parallel_config(recompute=recompute):
            losses.append(train(make_trainer(network_with_lora())))
    assert losses[0] == losses[1]


def test_16_bit_network_has_32_bit_factors():
    network = network_with_lora(dtype="bfloat16")
    assert {w.dtype for w in network.trainable_variables} == {"float32"}
    assert {w.dtype for w in network.non_trainable_variables} == {"bfloat16"}
    losses = train(make_trainer(network), 5)
    assert losses[-1] < losses[0]


def test_merged_kernels_give_the_same_outputs():
    network = network_with_lora_and_dora()
    prompts = [[5, 9], [7]]
    base = network.generate(prompts, max_new_tokens=5).numpy()
    change_adapters(network)
    expected, generated = get_logits(network), network.generate(prompts, max_new_tokens=5).numpy()
    assert (generated != base).any()
    assert len(merge_lora(network)) == 7 * 3 + 1
    np.testing.assert_allclose(get_logits(network), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(network.generate(prompts, max_new_tokens=5).numpy(), generated)
    assert len(network.weights) == len(build_network(**LLAMA).weights)
    with pytest.raises(ValueError, match="`merge_lora` needs a network with adapters"):
        merge_lora(network)
    add_lora(network)  # A merged network accepts new adapters.


def test_keras_configs_and_files_contain_adapters(tmp_path):
    network = network_with_lora_and_dora()
    change_adapters(network)
    copy = CausalLM.from_config(network.get_config())
    copy.build()
    copy.set_weights(network.get_weights())
    np.testing.assert_array_equal(get_logits(copy), get_logits(network))
    network.save(tmp_path / "network.keras")
    loaded = keras.models.load_model(tmp_path / "network.keras")
    np.testing.assert_array_equal(get_logits(loaded), get_logits(network))


def test_adapters_are_saved_and_loaded(tmp_path):
    network = network_with_lora_and_dora()
    change_adapters(network)
    save_lora(network, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 4 * sum(np.prod(w.shape) for w in network.trainable_variables) + 10000
    loaded = build_network(**LLAMA)
    assert len(load_lora(loaded, tmp_path)) == 7 * 3 + 1
    np.testing.assert_array_equal(get_logits(loaded), get_logits(network))
    load_lora(loaded, tmp_path)  # Loading replaces existing adapters.
    with pytest.raises(
        InputError, match="not match the network's adapters: .* has rank 8, alpha 16.0, kind lora"
    ):
        fresh = build_network(**LLAMA)
        add_lora(fresh)
        load_lora(fresh, tmp_path)
    with pytest.raises(InputError, match="Factor A .* expected .*adapters belong to this network"):
        load_lora(build_network(**{**LLAMA, "hidden_size": 32}), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["kernels"].popitem()
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="do not match: only one of them has"):
        load_lora(build_network(**LLAMA), tmp_path)
    next(iter(config["kernels"].values()))["kin"] = "lora"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="is damaged: kernels.*kin"):
        load_lora(build_network(**LLAMA), tmp_path)
    with pytest.raises(InputError, match="does not exist. Pass a folder with adapter_config.json"):
        load_lora(build_network(**LLAMA), tmp_path / "nowhere")


def test_encoder_decoder_has_adapters_in_cross_attention():
    network = TranslationTransformer(50, hidden_size=16, num_heads=2, encoder_layers=1)
    network.build()
    paths = add_lora(network, rank=2)
    assert any("cross" in path or "memory" in path for path in paths), paths


def test_invalid_arguments_raise_errors(tmp_path):
    network = build_network(**LLAMA)
    for arguments, words in (
        ({"targets": "*/gamma"}, "gamma cannot have a low-rank adapter"),
        ({"targets": "embedding/*"}, "embedding/table cannot have"),
        (
            {"targets": "*/quer_kernel"},
            r"matches no weight. Existing weights are \*attention/query_kernel,",
        ),
        ({"targets": ["q_proj"]}, r"In this library, use '\*attention/query_kernel'"),
        ({"rank": 0}, "rank must be an integer of at least 1"),
        ({"alpha": 0}, "`alpha` must be a positive number"),
        ({"kind": "vera"}, "`kind` must be one of lora, dora, got 'vera'"),
    ):
        with pytest.raises(ValueError, match=words):
            add_lora(network, **arguments)
    with pytest.raises(ValueError, match="`save_lora` needs a network with adapters"):
        save_lora(network, tmp_path)
    add_lora(network)
    with pytest.raises(ValueError, match="has an adapter already"):
        add_lora(network)
    with pytest.raises(InputError, match="The network has adapters. Save them with `save_lora`"):
        save_pretrained(network, tmp_path / "folder", family="llama")


def test_adapters_of_keras_layers_are_trained():
    inputs = keras.Input((4,))
    dense = keras.layers.Dense(3, name="dense")
    network = keras.Model(inputs, dense(inputs))
    dense.enable_lora(2)
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.1), "mse")
    kernel = dense._kernel.numpy()
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    losses = [float(trainer.train_on_batch(x, x[:, :3])) for _ in range(3)]
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(dense._kernel.numpy(), kernel)


@on_mesh
def test_adapter_communication_matches_the_formula():
    start(data_parallel=2, model_parallel=2)
    network = network_with_lora("*attention/*kernel", kind="dora", num_kv_heads=2)
    trainer = make_trainer(network, keras.optimizers.SGD(0.1))
    train(trainer, 1)
    report = trainer.communication_report()
    for block, elements in report.formula.items():
        assert elements == report.summed_elements(block), block
    over_data = [c for c in report.get_layer("blocks") if c.over == "data"]
    largest = max(np.prod(w.shape) for w in network.trainable_variables)
    assert max(c.elements for c in over_data) <= largest, "gradients of factors alone"
    specs = {row.path.split("/", 3)[-1]: row.sharded_over for row in trainer.plan().rows}
    assert specs["attention/query_kernel_lora_a"] == (None, None)
    assert specs["attention/query_kernel_lora_b"] == (None, "model", None)
    assert specs["attention/output_kernel_lora_a"] == ("model", None, None)
    assert specs["attention/output_kernel_lora_b"] == (None, None)
    assert specs["attention/query_kernel_lora_m"] == ("model", None)
    assert specs["attention/output_kernel_lora_m"] == (None,)
