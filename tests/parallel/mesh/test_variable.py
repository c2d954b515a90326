"""A variable on a mesh acts as one tensor, and each device stores one shard."""

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer import layers
from dtransformer.parallel.mesh.axis_rules import make_layout
from dtransformer.parallel.mesh.batch import put_sharded
from dtransformer.parallel.mesh.variable import packed
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import get_local_shards
from tests.on_mesh import (
    HIDDEN,
    make_trainer,
    network,
    on_mesh,
    raises,
    start,
    stop,
)


@on_mesh
def test_each_device_stores_only_its_shards():
    start(model_parallel=4, vocab_emb_dp=False)
    model = network()
    plan = make_trainer(model).plan()
    for row, variable in zip(plan.rows, model.variables):
        for shard in variable.shards:
            assert shard.numpy().nbytes == row.bytes_per_device, row
        assert len(variable.shards) == row.num_shards
    sharded_bytes = sum(v.numpy().nbytes for v in model.variables if any(v.specs))
    replicated_bytes = sum(v.numpy().nbytes for v in model.variables if not any(v.specs))
    assert plan.bytes_per_device == sharded_bytes / 4 + replicated_bytes
    table = next(row for row in plan.rows if row.path.endswith("source_embedding/table"))
    assert table.shape == (64, HIDDEN) and table.sharded_over == ("model", None)
    assert f"{plan.bytes_per_device:,} bytes" in str(plan)


@on_mesh
def test_initial_weights_depend_only_on_seed_and_name():
    expected = {v.path: v.numpy() for v in network().variables}
    for fields in ({}, {"vocab_emb_dp": False}, {"model_parallel": 4}):
        start(**fields)
        for v in network().variables:
            without_padding = tuple(slice(size) for size in expected[v.path].shape)
            np.testing.assert_array_equal(v.numpy()[without_padding], expected[v.path], v.path)
        stop()


@on_mesh
def test_packed_shards_match_dtensor_pack():
    start(model_parallel=4)
    layer = layers.FeedForward(HIDDEN, 4 * HIDDEN)
    layer.build((None, None, HIDDEN))
    for variable, num_shards in ((layer.mapping_kernel, 4), (layer.projection_bias, 1)):
        shards = [shard.numpy() for shard in variable.shards]
        assert len(shards) == num_shards
        tensor = packed(variable)
        assert tensor.device == dtensor.device_name()
        assert dtensor.fetch_layout(tensor) == make_layout(variable.specs)
        parts = dtensor.unpack(tensor)
        packed_by_dtensor = dtensor.pack(parts, make_layout(variable.specs))
        assert (packed_by_dtensor.shape, packed_by_dtensor.dtype) == (tensor.shape, tensor.dtype)
        for i, device in enumerate(job.mesh().local_devices()):
            assert parts[i].device == device
            np.testing.assert_array_equal(parts[i], shards[i % num_shards])


@on_mesh
def test_sharded_variable_is_read_and_assigned_unsharded():
    start(model_parallel=4)
    layer = layers.FeedForward(HIDDEN, 4 * HIDDEN)
    layer.build((None, None, HIDDEN))
    kernel = layer.mapping_kernel
    assert kernel.shape == (HIDDEN, 4 * HIDDEN) and len(kernel.shards) == 4
    assert kernel.shards[0].shape == (HIDDEN, HIDDEN)
    value = np.random.default_rng(0).normal(size=kernel.shape).astype("float32")
    kernel.assign(value)
    np.testing.assert_array_equal(kernel.numpy(), value)
    np.testing.assert_array_equal(np.asarray(kernel), value)
    np.testing.assert_array_equal(kernel.shards[2].numpy(), value[:, 2 * HIDDEN : 3 * HIDDEN])
    assert get_local_shards([kernel]) == kernel.shards
    put_sharded(value)
    raises(RuntimeError, ["through its Trainer"], tf.function(lambda: kernel.value + 0))
