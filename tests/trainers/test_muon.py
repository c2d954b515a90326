"""Muon orthogonalizes the momentum of all hidden matrices, as `torch.optim.Muon` does for 2-D ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import SequenceHead
from dtransformer.models import CausalLM, add_lora
from dtransformer.trainers import Muon, Trainer
from dtransformer.trainers.optimizer.checks import check_elementwise
from dtransformer.trainers.optimizer.update_group import UpdateGroup

VOCAB, STEPS = 19, 4
IDS = np.random.default_rng(0).integers(0, VOCAB, (8, 6)).astype("int32")


def language_model(**options):
    keras.utils.set_random_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 4, "num_layers": 2, "max_length": 6, "gated": True}
    network = CausalLM(VOCAB, **{"tied_head": False, **sizes, **options})
    network.build()
    return network


def random_gradients(weights, seed=0):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=weight.shape), "float32") for weight in weights]


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_match_torch_in_float32(shape, adjust_lr_fn, nesterov, monkeypatch):
    torch = pytest.importorskip("torch", reason="the reference environment has PyTorch")
    # PyTorch computes Newton–Schulz in bfloat16, and normalizes the result in place.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())
    value = np.random.default_rng(1).normal(size=shape).astype("float32")
    weight = keras.Variable(value, name="kernel")
    # PyTorch stores kernels as [outputs, inputs].
    reference = torch.nn.Parameter(torch.tensor(value.T.copy()))
    options = {"nesterov": nesterov, "weight_decay": 0.1}
    optimizer = Muon(0.05, **options, rms_rate=None if adjust_lr_fn == "original" else 0.2)
    torch_optimizer = torch.optim.Muon([reference], lr=0.05, **options, adjust_lr_fn=adjust_lr_fn)
    for step in range(STEPS):
        (gradient,) = random_gradients([weight], step)
        optimizer.apply([gradient], [weight])
        reference.grad = torch.tensor(gradient.numpy().T.copy())
        torch_optimizer.step()
    assert np.abs(weight.numpy() - value).max() > 0.01
    np.testing.assert_allclose(weight.numpy(), reference.detach().numpy().T, rtol=1e-4, atol=1e-5)


def test_bfloat16_products_are_as_close_to_float32_as_in_torch():
    torch = pytest.importorskip("torch", reason="the reference environment has PyTorch")
    gradient = np.random.default_rng(0).normal(size=(24, 16)).astype("float32")
    orthogonalize = Muon().zeropower_via_newtonschulz5
    expected = orthogonalize(tf.constant(gradient), 5).numpy()
    error = np.linalg.norm(orthogonalize(tf.constant(gradient), 5, "bfloat16") - expected)
    reference = torch.nn.Parameter(torch.zeros(24, 16))
    reference.grad = torch.tensor(gradient)
    torch.optim.Muon([reference], lr=1.0).step()
    torch_update = -reference.detach().numpy() / np.sqrt(24 / 16)
    torch_error = np.linalg.norm(torch_update - expected)
    assert 0 < error < 1.5 * torch_error < 0.05 * np.linalg.norm(expected)


def test_singular_values_become_close_to_one():
    orthogonalize = Muon().zeropower_via_newtonschulz5
    matrices = orthogonalize(tf.random.stateless_normal((3, 12, 20), (0, 0)), 5)
    values = tf.linalg.svd(matrices, compute_uv=False).numpy()
    assert 0.6 < values.min() and values.max() < 1.3
    np.testing.assert_array_equal(orthogonalize(tf.zeros((2, 3)), 5), np.zeros((2, 3)))


def test_weights_of_the_library_become_matrices_by_their_axes():
    network = language_model(moe_config={"expert_num": 3}, moe_every=2, num_kv_heads=2)
    optimizer = Muon()
    shapes = {
        path.split("/", 2)[-1]: shape
        for path, shape in (
            (w.path, optimizer.matrix_shape(w)) for w in network.trainable_variables
        )
        if shape is not None
    }
    attention = {"query": (16, 16), "key": (16, 8), "value": (16, 8), "output": (16, 16)}
    dense = {"mapping": (16, 64), "gate": (16, 64), "projection": (64, 16)}
    expected = {}
    for block in ("block_0", "block_1"):
        expected |= {f"{block}/attention/{name}_kernel": x for name, x in attention.items()}
    names = sorted(shapes)
    experts = [name for name in names if len(shapes[name]) == 3]
    others = {name: shapes[name] for name in names if name not in experts}
    expected |= {f"block_0/feed_forward/{name}_kernel": x for name, x in dense.items()}
    assert others == expected
    assert sorted(shapes[name] for name in experts) == sorted((3, *x) for x in dense.values())


def test_tables_heads_and_adapters_are_updated_with_adamw():
    network = language_model()
    add_lora(network, rank=2)
    optimizer = Muon()
    trained = {w.path: optimizer.matrix_shape(w) for w in network.trainable_variables}
    assert len(trained) == 8 and not any(trained.values())
    head = SequenceHead(3, hidden_act="tanh")
    head.build((None, 6, 8))
    shapes = {w.path: optimizer.matrix_shape(w) for w in head.trainable_variables}
    assert [path for path, shape in shapes.items() if shape] == [head.pooler.kernel.path]


def test_excluded_weights_and_groups_are_updated_with_adamw():
    network = language_model()
    kernels = [w for w in network.trainable_variables if w.name == "query_kernel"]
    kernels[0].update_group = UpdateGroup(uses_adamw=True)
    assert Muon().matrix_shape(kernels[0]) is None
    assert Muon(exclude_layers=["block_1/attention"]).matrix_shape(kernels[1]) is None
    assert Muon(exclude_layers=["block_0"]).matrix_shape(kernels[1]) == (16, 16)


def test_kernels_with_three_dimensions_are_updated_as_matrices():
    network = language_model(moe_config={"expert_num": 3}, moe_every=2)
    weights = network.trainable_variables
    optimizer = Muon(0.1, weight_decay=0.1)
    parts = {}  # A weight -> its matrices, each with an optimizer.
    for weight in weights:
        shape = optimizer.matrix_shape(weight)
        if shape is not None:
            matrices = weight.numpy().reshape(-1, *shape[-2:])
            parts[weight.path] = [keras.Variable(x, name="kernel") for x in matrices]
    optimizers = {path: [Muon(0.1, weight_decay=0.1) for _ in x] for path, x in parts.items()}
    for step in range(STEPS):
        gradients = random_gradients(weights, step)
        optimizer.apply(gradients, weights)
        for weight, gradient in zip(weights, gradients):
            for i, matrix in enumerate(parts.get(weight.path, [])):
                part = tf.reshape(gradient, [-1, *matrix.shape])[i]
                optimizers[weight.path][i].apply([part], [matrix])
    assert len(parts) == 14
    for weight in weights:
        if weight.path in parts:
            expected = np.stack([matrix.numpy() for matrix in parts[weight.path]])
            actual = weight.numpy().reshape(expected.shape)
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_other_weights_match_adamw_with_a_separate_learning_rate():
    value = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    weight, reference = (keras.Variable(value, name="embeddings") for _ in range(2))
    optimizer = Muon(0.1, adam_lr_ratio=0.2, adam_weight_decay=0.06, adam_beta_2=0.95)
    adamw = keras.optimizers.AdamW(0.02, weight_decay=0.3, beta_2=0.95)
    for step in range(STEPS):
        gradients = random_gradients([weight], step)
        optimizer.apply(gradients, [weight])
        adamw.apply(gradients, [reference])
    np.testing.assert_allclose(weight.numpy(), reference.numpy(), rtol=1e-5)


def test_groups_set_the_weight_decay_of_all_weights():
    network = language_model()
    for weight in network.trainable_variables:
        weight.update_group = UpdateGroup(weight_decay=0.0)
    before = network.get_weights()
    trainer = Trainer(network)
    trainer.compile(Muon(0.1, weight_decay=5.0, adam_weight_decay=5.0), lambda y, x: 0.0 * x)
    trainer.train_on_batch(IDS, IDS)
    for actual, expected in zip(network.get_weights(), before, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_shared_functions_update_as_separate_calls(jit_compile):
    """Kernels of equal shapes have different inputs: [embed, heads, d] and [heads, d, embed]."""
    options = {"hidden_size": 4, "num_heads": 4, "head_dim": 4}
    optimizer = lambda: Muon(0.02, weight_decay=0.1, global_clipnorm=0.1, use_ema=True)
    networks = [language_model(**options) for _ in range(2)]
    shapes = {Muon().matrix_shape(w) for w in networks[0].weights if w.shape == (4, 4, 4)}
    assert shapes == {(4, 16), (16, 4)}
    trainers = [Trainer(network) for network in networks]
    trainers[0].compile(optimizer(), jit_compile=jit_compile)
    trainers[1].compile(optimizer(), run_eagerly=True)
    for trainer in trainers:
        for _ in range(3):
            trainer.train_on_batch(IDS, IDS)
    for actual, expected in zip(*(network.get_weights() for network in networks), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


def test_training_resumes_bit_for_bit(tmp_path):
    def make_trainer():
        trainer = Trainer(language_model())
        inner = Muon(0.01, use_ema=True, global_clipnorm=0.5)
        trainer.compile(keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2))
        return trainer

    def train(trainer):
        return [trainer.train_on_batch(IDS, IDS)[0] for _ in range(3)]

    trainer = make_trainer()
    train(trainer)
    trainer.save(tmp_path / "checkpoint")
    restored = make_trainer()
    restored.restore(tmp_path / "checkpoint")
    losses = train(trainer)
    assert train(restored) == losses and len(set(losses)) == 3
    for actual, expected in zip(restored.optimizer.variables, trainer.optimizer.variables):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy(), err_msg=actual.path)


def test_matrices_have_one_state_and_other_weights_two():
    network = language_model()
    trainer = Trainer(network)
    optimizer = Muon(0.01)
    trainer.compile(optimizer)
    trainer.train_on_batch(IDS, IDS)
    expected = sum(
        4 * np.prod(w.shape) * (2 if optimizer.matrix_shape(w) is None else 1)
        for w in network.trainable_variables
    )
    rows = {row.what: row for row in trainer.memory_report().rows}
    assert rows["optimizer states"].planned == rows["optimizer states"].measured == expected


def test_flat_shards_raise_an_error_with_the_fix():
    with pytest.raises(ValueError, match="Muon computes with full weights.*partition='whole'"):
        check_elementwise(Muon())


def test_config_restores_the_optimizer():
    optimizer = Muon(0.1, exclude_layers=["head"], ns_steps=3, momentum=0.8)
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(copy) is Muon and copy.get_config() == optimizer.get_config()
