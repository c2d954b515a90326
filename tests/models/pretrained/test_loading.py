"""A rank loads only its shards, needs little more memory, and draws no initial values."""

import gc
import math
import pathlib
import tempfile
import tracemalloc

import numpy as np
import pytest

from dtransformer import parallel_config
from dtransformer.layers import initializers
from dtransformer.models import CausalLM, from_pretrained, save_pretrained
from dtransformer.parallel.collectives.objects import all_gather_json
from dtransformer.parallel.weights.sharded_variable import get_local_shards
from tests.on_mesh import on_mesh, start
from tests.shared_runs import on_ranks

LLAMA = {
    "hidden_size": 128,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 3,
    "ffn_hidden_size": 512,
    "positions": "rotary",
    "norm": "rms_norm",
    "gated": True,
    "use_bias": False,
    "tied_head": False,
    "embedding_scale": 1.0,
    "hidden_act": "silu",
}
VOCAB_SIZE = 4001
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_bfloat16"])


def save_llama(tmp_path):
    network = CausalLM(VOCAB_SIZE, **LLAMA, dtype="bfloat16")
    network.build()
    save_pretrained(network, tmp_path / "model", family="llama")
    return tmp_path / "model", {w.path: w.numpy() for w in network.weights}


def check_loading(folder, expected, dtype="bfloat16"):
    """Load a folder and check the values and the peak memory."""
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's defaults. The test suite raises them.
    tracemalloc.start()
    try:
        network = from_pretrained(folder, dtype=dtype)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.set_threshold(*thresholds)
    for weight in network.weights:
        value = expected[weight.path]
        actual = np.asarray(weight.numpy())[tuple(slice(size) for size in value.shape)]
        np.testing.assert_array_equal(actual.astype("float32"), value.astype("float32"))
    shards = [(math.prod(x.shape), x.value.dtype.size) for x in get_local_shards(network.weights)]
    shard_bytes = sum(count * size for count, size in shards)
    largest_bytes = VOCAB_SIZE * LLAMA["hidden_size"] * shards[0][1]
    keras_objects = 7 * 2**18  # Keras layers, including the copy that provides shapes.
    assert peak < shard_bytes + 1.1 * largest_bytes + keras_objects, (
        peak,
        shard_bytes,
        largest_bytes,
    )


@DTYPES
def test_one_device_loads_without_extra_memory_or_initial_values(dtype, tmp_path, monkeypatch):
    folder, expected = save_llama(tmp_path)
    draw = lambda *args, **kwargs: pytest.fail("an initial value was drawn")
    monkeypatch.setattr(initializers.FlattenedInitializer, "__call__", draw)
    check_loading(folder, expected, dtype)


@on_mesh
def test_mesh_loads_only_local_shards():
    """The mesh also pads the vocabulary."""
    with tempfile.TemporaryDirectory() as parent:
        folder, expected = save_llama(pathlib.Path(parent))
        start(model_parallel=2, vocab_emb_dp=False)
        for dtype in ("float32", "bfloat16"):
            check_loading(folder, expected, dtype)


@on_ranks("dp2@2x1")
def test_zero_3_ranks_load_only_local_shards():
    with tempfile.TemporaryDirectory() as parent:
        folder, expected = save_llama(pathlib.Path(all_gather_json(parent, "folder")[0]))
        for dtype in ("float32", "bfloat16"):
            with parallel_config(optimizer_shard=3, parallel_optimizer_threshold=0):
                check_loading(folder, expected, dtype)
        all_gather_json(0, "loaded")


def test_ntk_scaling_is_saved_as_a_larger_rotary_base(tmp_path):
    network = CausalLM(50, **LLAMA, rotary_scaling={"type": "ntk", "factor": 4.0})
    network.build()
    save_pretrained(network, tmp_path / "model", family="llama")
    loaded = from_pretrained(tmp_path / "model")
    assert loaded.arguments["rotary_scaling"] is None
    ids = np.arange(40)[None] % 50
    np.testing.assert_allclose(loaded(ids), network(ids), rtol=0, atol=1e-6)
