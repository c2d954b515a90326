"""Quantized kernels: formats against NumPy, memory, training with adapters, layouts and export."""

import functools
import importlib.util
import subprocess
import sys
import types
from statistics import NormalDist

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer import TransformerOpParallelConfig, parallel_config
from dtransformer.errors import InputError
from dtransformer.models import (
    CausalLM,
    EncoderDecoderLM,
    MaskedLM,
    add_lora,
    from_pretrained,
    load_lora,
    merge_lora,
    quantize,
    save_lora,
    save_pretrained,
)
from dtransformer.models.lora import adapted_kernels
from dtransformer.parallel.ops import block_quantization
from dtransformer.parallel.ops.block_quantization import BLOCK_SIZE, NF4_VALUES, BlockLayout
from dtransformer.parallel.tensor_parallel.linear import column_parallel
from dtransformer.parallel.tensor_parallel.quantized_kernel import get_quantized_kernels
from dtransformer.parallel.tracing.two_passes import TwoPasses
from dtransformer.planner.shape import QUANTIZED_BYTES
from dtransformer.runs import needs
from tests.models.test_freezing import make_trainer
from tests.models.test_lora import LLAMA, change_adapters
from tests.on_mesh import on_mesh, start
from tests.tolerances import TRAINING_16_BIT

# Columns, rows, and both kinds of attention kernels.
KERNELS = {
    "columns": ((128, 48), 1, ("embed", "mlp")),
    "rows": ((48, 128), 1, ("mlp", "embed")),
    "heads": ((64, 4, 24), 1, ("embed", "heads", "head_dim")),
    "output": ((4, 24, 192), 2, ("heads", "head_dim", "embed")),
}
IDS = np.random.default_rng(0).integers(1, 61, (8, 17)).astype("int32")
STEPS = 20
GROUP_FEATURES = 4


def make_layout(kind, name):
    return BlockLayout.from_kernel(kind, *KERNELS[name], name)


def random_kernel(shape):
    kernel = np.random.default_rng(1).normal(0, 0.02, shape).astype("float32")
    kernel.reshape(-1)[:200] = 0  # also blocks of zeros in some layouts
    return kernel


def build_network(kind=None, targets="*_kernel", adapters=True, **options):
    """Return a small Llama, in a quantized format if `kind` is set, with adapters."""
    dtransformer.set_seed(3)
    sizes = {"hidden_size": 64, "num_heads": 4, "num_layers": 2, "ffn_hidden_size": 128}
    network = CausalLM(61, **{**LLAMA, **sizes, "num_kv_heads": 2, "dropout_rate": 0.0, **options})
    if kind is None:
        network.build()
    else:
        with quantize(kind, targets):
            network.build()
    if adapters:
        add_lora(network, rank=4, targets="*_kernel")
    return network


def train(network, steps=STEPS):
    trainer = make_trainer(network, keras.optimizers.AdamW(1e-2, epsilon=1e-6))

    def step():
        return trainer.train_on_batch(IDS[:, :-1], IDS[:, 1:], return_dict=True)["step_loss"]

    return [float(step()) for _ in range(steps)], trainer


@functools.cache
def losses_of(kind=None):
    """Return the losses of all steps with a format, or without quantization."""
    return train(build_network(kind))[0]


def get_logits(network):
    return np.asarray(network(IDS[:, :-1]))


def test_nf4_values_are_the_published_quantiles():
    """Appendix E of the paper: quantiles of N(0, 1) with 8 positive and 7 negative values and 0."""
    tail = 0.9677083
    quantiles = lambda count: [NormalDist().inv_cdf(p) for p in np.linspace(tail, 0.5, count)[:-1]]
    values = np.array(sorted([*quantiles(9), 0.0, *(-x for x in quantiles(8))]))
    np.testing.assert_allclose(NF4_VALUES, values / values.max(), rtol=0, atol=2e-7)
    assert NF4_VALUES[[0, 7, 15]].tolist() == [-1, 0, 1]
    assert NF4_VALUES[8] == np.float32(0.07958029955625534)


def reference_blocks(layout, kernel):
    """Return the blocks [blocks, features, 64] of a kernel."""
    matrix = kernel.reshape(np.prod(layout.shape[: layout.num_inputs]), -1)
    matrix = matrix if layout.along_inputs else matrix.T
    return matrix.reshape(-1, BLOCK_SIZE, matrix.shape[1]).swapaxes(1, 2)


@pytest.mark.parametrize("kind", block_quantization.KINDS)
@pytest.mark.parametrize("name", KERNELS)
def test_formats_match_a_reference_in_numpy(kind, name):
    layout = make_layout(kind, name)
    kernel = random_kernel(layout.shape)
    parts = block_quantization.quantize(layout, kernel)
    assert {part: array.shape for part, array in parts.items()} == layout.part_shapes
    values = NF4_VALUES if kind == "nf4" else np.arange(-127, 128, dtype="float32") / 127
    blocks = reference_blocks(layout, kernel)
    num_blocks, num_features = blocks.shape[:2]
    expected = np.empty_like(blocks)
    for first in range(0, num_features, GROUP_FEATURES):
        group = blocks[:, first : first + GROUP_FEATURES]
        maxima = np.abs(group).max(-1)
        mean = np.float32(maxima.mean(dtype="float64"))
        scale = np.abs(maxima - mean).max() / 127
        stored = mean + scale * np.rint((maxima - mean) / (scale or 1))
        for row in range(num_blocks):
            for column in range(group.shape[1]):
                fractions = group[row, column] / (maxima[row, column] or 1)
                nearest = np.abs(fractions[:, None] - values).argmin(1)
                expected[row, first + column] = values[nearest] * stored[row, column]
    result = block_quantization.dequantize(layout, parts).numpy()
    np.testing.assert_allclose(reference_blocks(layout, result), expected, rtol=0, atol=1e-7)
    error = np.abs(result - kernel).max() / np.abs(kernel).max()
    assert error < {"nf4": 0.16, "int8": 0.006}[kind]


@pytest.mark.parametrize("kind", block_quantization.KINDS)
def test_large_kernels_take_the_published_bytes(kind):
    layout = BlockLayout.from_kernel(kind, (4096, 14336), 1, ("embed", "mlp"), "kernel")
    shapes = layout.part_shapes
    num_bytes = sum(np.prod(shapes[name]) for name in ("codes", "absmax"))
    num_bytes += sum(4 * np.prod(shapes[name]) for name in ("scale", "offset"))
    assert num_bytes / np.prod(layout.shape) == QUANTIZED_BYTES[kind]
    assert round(QUANTIZED_BYTES[kind], 3) == {"nf4": 0.516, "int8": 1.016}[kind]


def test_variables_and_reports_have_half_a_byte_per_parameter():
    network = build_network("nf4", hidden_size=256, ffn_hidden_size=512, num_layers=1)
    kernels = get_quantized_kernels(network)
    assert [kernel.name for kernel in kernels] == [
        *("query_kernel", "key_kernel", "value_kernel", "output_kernel"),
        *("mapping_kernel", "gate_kernel", "projection_kernel"),
    ]
    stored = sum(part.numpy().nbytes for kernel in kernels for part in kernel.parts.values())
    elements = sum(np.prod(kernel.shape) for kernel in kernels)
    assert 0.516 < stored / elements < 0.525
    everything = sum(weight.numpy().nbytes for weight in network.weights)
    assert not any(weight.path.endswith("query_kernel") for weight in network.weights)
    _, trainer = train(network, 1)
    report = trainer.memory_report()
    assert report["weights"].planned == report["weights"].measured == everything


def test_dequantized_kernels_are_not_stored_until_the_backward_pass():
    layer = build_network("nf4", adapters=False).blocks.blocks[0].feed_forward
    kernels = [layer.mapping_kernel, layer.gate_kernel]

    def saved_sizes(kernels):
        def compute(inputs, constants, weights):
            return [tf.add_n(column_parallel(inputs[0], kernels, ("mlp",)))], []

        passes = TwoPasses(compute, [tf.zeros([2, 3, 64])], [], [tf.zeros([])], [False])
        _, saved = (
            tf.function(lambda x: passes.forward([x], [], [tf.zeros([])]))
            .get_concrete_function(tf.TensorSpec([2, 3, 64]))
            .structured_outputs
        )
        return [x.shape.num_elements() for x in saved if x.dtype.is_floating]

    assert 64 * 128 in saved_sizes([tf.zeros([64, 128]) + tf.random.normal([64, 128])])
    assert 64 * 128 not in saved_sizes(kernels)


@pytest.mark.parametrize("kind, tolerance", [("nf4", 0.015), ("int8", 0.005)])
def test_losses_follow_adapters_of_the_unquantized_network(kind, tolerance):
    expected, losses = losses_of(), losses_of(kind)
    assert losses[-1] < 0.2 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=tolerance * expected[0])
    assert not np.array_equal(losses, expected)


def test_recompute_does_not_change_losses():
    with parallel_config(TransformerOpParallelConfig(recompute=True)):
        losses, _ = train(build_network("nf4"), 3)
    np.testing.assert_allclose(losses, losses_of("nf4")[:3], rtol=1e-6)


def test_16_bit_products_follow_float32():
    losses, _ = train(build_network("nf4", dtype="mixed_bfloat16"), 3)
    np.testing.assert_allclose(losses, losses_of("nf4")[:3], rtol=TRAINING_16_BIT["mixed_bfloat16"])


def test_merged_kernels_have_the_type_of_other_weights():
    network = build_network("nf4", dtype="bfloat16")
    expected = get_logits(network)
    merge_lora(network)
    assert {weight.dtype for weight in network.weights} == {"bfloat16"}
    np.testing.assert_allclose(get_logits(network), expected, rtol=0, atol=5e-2)


@on_mesh
def test_meshes_give_the_losses_of_one_process():
    expected, _ = train(build_network("nf4"))
    layouts = (
        {"model_parallel": 2},
        {"data_parallel": 2, "optimizer_shard": 3, "parallel_optimizer_threshold": 0},
    )
    for fields in layouts:
        start(**fields)
        losses, trainer = train(build_network("nf4"))
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        specs = {row.path.split("/", 3)[-1]: row.sharded_over for row in trainer.plan().rows}
        assert specs["attention/query_kernel_codes"][2] == "model"
        assert specs["attention/output_kernel_codes"][0] == "model"
        assert ("data" in specs["attention/query_kernel_codes"]) == ("data_parallel" in fields)
        report = trainer.communication_report()
        for block, elements in report.formula.items():
            assert elements == report.summed_elements(block), block


def test_partial_selection_and_frozen_weights():
    network = build_network("nf4", "*attention/(query|value)_kernel")
    kernels = get_quantized_kernels(network)
    assert {kernel.name for kernel in kernels} == {"query_kernel", "value_kernel"}
    assert all("lora" in weight.path for weight in network.trainable_variables)
    losses, _ = train(network, 5)
    assert losses[-1] < losses[0]


def test_merged_and_saved_networks_have_equal_logits(tmp_path):
    network = build_network("nf4")
    change_adapters(network)
    expected = get_logits(network)
    save_lora(network, tmp_path / "adapters", "llama")
    base = build_network("nf4", adapters=False)
    load_lora(base, tmp_path / "adapters")
    np.testing.assert_array_equal(get_logits(base), expected)
    paths = list(adapted_kernels(network))
    assert merge_lora(network) == paths
    assert not get_quantized_kernels(network)
    np.testing.assert_allclose(get_logits(network), expected, rtol=0, atol=1e-5)
    loaded = from_pretrained(save_pretrained(network, tmp_path / "merged", "llama"))
    np.testing.assert_allclose(get_logits(loaded), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "kind, stacks, inputs",
    [
        (MaskedLM, {"num_layers": 1}, {"tokens": IDS}),
        (
            EncoderDecoderLM,
            {"encoder_layers": 1, "decoder_layers": 1},
            {"source": IDS, "target": IDS},
        ),
    ],
)
def test_encoders_and_pairs_have_quantized_kernels(kind, stacks, inputs):
    with quantize("nf4"):
        network = kind(61, hidden_size=64, num_heads=4, max_length=32, **stacks)
        network.build()
    add_lora(network, rank=2, targets="*_kernel")
    assert len(get_quantized_kernels(network)) == len(adapted_kernels(network)) >= 6
    logits = lambda: tf.nest.flatten(network(inputs))[0]
    expected = logits()
    merge_lora(network)
    np.testing.assert_allclose(logits(), expected, rtol=0, atol=1e-5)


def test_quantized_networks_without_adapters_are_saved_dequantized(tmp_path):
    network = build_network("int8", adapters=False)
    folder = save_pretrained(network, tmp_path / "model", "llama")
    loaded = from_pretrained(folder)
    np.testing.assert_allclose(get_logits(loaded), get_logits(network), rtol=0, atol=1e-5)


def test_kernels_are_quantized_while_they_are_loaded(tmp_path):
    plain = build_network(adapters=False)
    folder = save_pretrained(plain, tmp_path / "model", "llama")
    with quantize("nf4"):
        loaded = from_pretrained(folder)
    quantized = build_network("nf4", adapters=False)
    np.testing.assert_array_equal(get_logits(loaded), get_logits(quantized))
    for actual, expected in zip(loaded.weights, quantized.weights, strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())


REFERENCE = """
import sys, numpy as np, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.tensor(np.load(sys.argv[2]))
with torch.no_grad():
    np.save(sys.argv[3], model(ids.long()).logits.numpy())
"""


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers and PyTorch: pip install -e '.[reference]'",
)
def test_transformers_computes_the_logits_of_the_merged_folder(tmp_path):
    network = build_network("nf4")
    change_adapters(network)
    expected = get_logits(network)
    merge_lora(network)
    folder = save_pretrained(network, tmp_path / "merged", "llama")
    np.save(tmp_path / "ids.npy", IDS[:, :-1])
    arguments = [folder, tmp_path / "ids.npy", tmp_path / "logits.npy"]
    subprocess.run([sys.executable, "-c", REFERENCE, *arguments], check=True, timeout=300)
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), expected, rtol=0, atol=1e-5)


def test_checkpoints_and_keras_files_contain_codes(tmp_path):
    network = build_network("nf4")
    _, trainer = train(network, 2)
    trainer.save(tmp_path / "run.checkpoint")
    restored = build_network("nf4")
    _, other = train(restored, 1)
    other.restore(tmp_path / "run.checkpoint")
    for actual, expected in zip(restored.weights, network.weights, strict=True):
        np.testing.assert_array_equal(actual.numpy(), expected.numpy())
    network.save(tmp_path / "network.keras")
    loaded = keras.saving.load_model(tmp_path / "network.keras")
    np.testing.assert_array_equal(get_logits(loaded), get_logits(network))


def test_invalid_choices_raise_errors():
    with pytest.raises(ValueError, match="`kind` must be one of nf4, int8, got 'fp4'"):
        build_network("fp4")
    with pytest.raises(ValueError, match="matches no kernel"):
        build_network("nf4", "*attention/kernel")
    with pytest.raises(ValueError, match="has 32 inputs, but nf4 needs a multiple of 64"):
        build_network("nf4", hidden_size=32)


def test_memory_check_of_a_folder_counts_the_format(tmp_path, monkeypatch):
    file = types.SimpleNamespace(stat=lambda: types.SimpleNamespace(st_size=2**30))
    folder = types.SimpleNamespace(glob=lambda pattern: [file])
    monkeypatch.setattr(needs, "free_memory", lambda: 2**28)
    needs.check_published(folder, "nf4")
    with pytest.raises(InputError, match="needs at least 1.0 GiB"):
        needs.check_published(folder)
