"""Promise: adapters begin as nothing, learn alone, and come and go without a trace.

Their numbers are held to PyTorch's in `pretrained/test_adapters.py`.
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
from tests.models.test_freezing import IDS, network_of, train, trainer_of
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


def adapted(targets="*kernel", kind="lora", **options):
    network = network_of(**{**LLAMA, **options})
    add_lora(network, rank=2, alpha=6, targets=targets, kind=kind)
    return network


def adapted_in_two_ways(**options):
    network = adapted("*feed_forward/*kernel", **options)
    add_lora(network, rank=2, alpha=6, targets=["*attention/*kernel", "head/*"], kind="dora")
    return network


def logits_of(network):
    return np.asarray(network(IDS[:, :-1]))


def test_first_outputs_are_those_without_adapters():
    expected = logits_of(network_of(**LLAMA))  # by other products on some processors
    for make in (adapted, adapted_in_two_ways):
        np.testing.assert_allclose(logits_of(make()), expected, rtol=0, atol=BLOCKS["float32"])


def test_factors_depend_on_the_seed_and_their_paths_only():
    one, other = (adapted(targets).blocks.blocks[1].attention for targets in ("*l", "*query_k*"))
    a, b = one.query_kernel.low_rank.a, one.query_kernel.low_rank.b
    assert a.shape == (16, 2) and b.shape == (2, 2, 8) and not b.numpy().any()
    assert np.abs(a.numpy()).max() <= 16**-0.5 and np.abs(a.numpy()).std() > 0.05
    np.testing.assert_array_equal(a.numpy(), other.query_kernel.low_rank.a.numpy())
    dtransformer.set_seed(1)
    assert (adapted().blocks.blocks[1].attention.query_kernel.low_rank.a.numpy() != a.numpy()).all()


def test_only_factors_learn():
    network = adapted()
    before = {weight.path: weight.numpy() for weight in network.weights}
    trainer = trainer_of(network)
    losses = train(trainer)
    assert losses[-1] < losses[0]
    changed = {path for path, x in before.items() if (network_weight(network, path) != x).any()}
    assert changed == {path for path in before if "_lora_" in path}
    factors = sum(before[path].nbytes for path in changed)
    assert trainer.memory_report()["optimizer states"].measured == 2 * factors


def network_weight(network, path):
    return next(weight.numpy() for weight in network.weights if weight.path == path)


def test_flop_are_a_third_less_beside_frozen_kernels():
    """But for the attention cores', which have no weights."""
    all_trained, beside = (
        tokens_and_flops(network, IDS[:, :-1], IDS[:, 1:])[1]
        for network in (network_of(**LLAMA), adapted())
    )
    assert 2 / 3 < beside / all_trained < 0.75


def test_weights_that_are_not_frozen_learn_too():
    network = network_of(**LLAMA)
    add_lora(network, freeze_others=False)
    assert len(network.trainable_variables) == len(network.variables)
    before = logits_of(network)
    train(trainer_of(network), 1)
    assert (logits_of(network) != before).any()


def test_recompute_changes_nothing():
    losses = []
    for recompute in (False, True):
        with parallel_config(recompute=recompute):
            losses.append(train(trainer_of(adapted())))
    assert losses[0] == losses[1]


def test_a_base_in_16_bits_has_factors_in_32():
    network = adapted(dtype="bfloat16")
    assert {w.dtype for w in network.trainable_variables} == {"float32"}
    assert {w.dtype for w in network.non_trainable_variables} == {"bfloat16"}
    losses = train(trainer_of(network), 5)
    assert losses[-1] < losses[0]


def test_merged_kernels_give_what_adapters_gave():
    network = adapted_in_two_ways()
    prompts = [[5, 9], [7]]
    base = network.generate(prompts, max_new_tokens=5).numpy()
    train(trainer_of(network, keras.optimizers.AdamW(0.1)))
    expected, generated = logits_of(network), network.generate(prompts, max_new_tokens=5).numpy()
    assert (generated != base).any()
    assert len(merge_lora(network)) == 7 * 3 + 1
    np.testing.assert_allclose(logits_of(network), expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(network.generate(prompts, max_new_tokens=5).numpy(), generated)
    assert len(network.weights) == len(network_of(**LLAMA).weights)
    with pytest.raises(ValueError, match="`merge_lora` needs a network with adapters"):
        merge_lora(network)
    add_lora(network)  # they may come again


def test_configs_and_files_of_keras_keep_adapters(tmp_path):
    network = adapted_in_two_ways()
    trainer = trainer_of(network)
    train(trainer)
    copy = CausalLM.from_config(network.get_config())
    copy.build()
    copy.set_weights(network.get_weights())
    np.testing.assert_array_equal(logits_of(copy), logits_of(network))
    network.save(tmp_path / "network.keras")
    loaded = keras.models.load_model(tmp_path / "network.keras")
    np.testing.assert_array_equal(logits_of(loaded), logits_of(network))


def test_adapters_in_a_folder_of_their_own(tmp_path):
    network = adapted_in_two_ways()
    train(trainer_of(network))
    save_lora(network, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size < 4 * sum(np.prod(w.shape) for w in network.trainable_variables) + 10000
    other = network_of(**LLAMA)
    assert len(load_lora(other, tmp_path)) == 7 * 3 + 1
    np.testing.assert_array_equal(logits_of(other), logits_of(network))
    load_lora(other, tmp_path)  # again, onto those that are there
    with pytest.raises(
        InputError, match="not match the network's adapters: .* has rank 8, alpha 16.0, kind lora"
    ):
        fresh = network_of(**LLAMA)
        add_lora(fresh)
        load_lora(fresh, tmp_path)
    with pytest.raises(InputError, match="Factor A .* expected .*adapters belong to this network"):
        load_lora(network_of(**{**LLAMA, "hidden_size": 32}), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["kernels"].popitem()
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="do not match: only one of them has"):
        load_lora(network_of(**LLAMA), tmp_path)
    next(iter(config["kernels"].values()))["kin"] = "lora"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="is damaged: kernels.*kin"):
        load_lora(network_of(**LLAMA), tmp_path)
    with pytest.raises(InputError, match="does not exist. Pass a folder with adapter_config.json"):
        load_lora(network_of(**LLAMA), tmp_path / "nowhere")


def test_a_network_of_two_stacks():
    network = TranslationTransformer(50, hidden_size=16, num_heads=2, encoder_layers=1)
    network.build()
    paths = add_lora(network, rank=2)
    assert any("cross" in path or "memory" in path for path in paths), paths


def test_what_cannot_be_is_told(tmp_path):
    network = network_of(**LLAMA)
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


def test_adapters_of_keras_own_layers_are_trained():
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
def test_adapters_send_what_the_theory_says():
    start(data_parallel=2, model_parallel=2)
    network = adapted("*attention/*kernel", kind="dora", num_kv_heads=2)
    trainer = trainer_of(network, keras.optimizers.SGD(0.1))
    train(trainer, 1)
    report = trainer.communication_report()
    for block, elements in report.formula.items():
        assert elements == report.summed_elements(block), block
    over_data = [c for c in report.of_layer("blocks") if c.over == "data"]
    largest = max(np.prod(w.shape) for w in network.trainable_variables)
    assert max(c.elements for c in over_data) <= largest, "gradients of factors alone"
    specs = {row.path.split("/", 3)[-1]: row.sharded_over for row in trainer.plan().rows}
    assert specs["attention/query_kernel_lora_a"] == (None, None)
    assert specs["attention/query_kernel_lora_b"] == (None, "model", None)
    assert specs["attention/output_kernel_lora_a"] == ("model", None, None)
    assert specs["attention/output_kernel_lora_b"] == (None, None)
    assert specs["attention/query_kernel_lora_m"] == ("model", None)
    assert specs["attention/output_kernel_lora_m"] == (None,)
