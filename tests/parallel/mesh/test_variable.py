"""Promise: a variable on a mesh is one tensor, of which a device holds its shard."""

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from dtransformer import layers
from dtransformer.parallel.mesh.axis_rules import make_layout
from dtransformer.parallel.mesh.batch import put_sharded
from dtransformer.parallel.mesh.variable import packed
from dtransformer.parallel.runtime import job
from dtransformer.parallel.weights.sharded_variable import own_shards
from tests.on_mesh import (
    HIDDEN,
    network,
    on_mesh,
    raises,
    start,
    stop,
    trainer_of,
)


@on_mesh
def test_a_device_holds_its_shards_only():
    start(model_parallel=4, vocab_emb_dp=False)
    model = network()
    plan = trainer_of(model).plan()
    for row, variable in zip(plan.rows, model.variables):
        for shard in variable.shards:
            assert shard.numpy().nbytes == row.bytes_per_device, row
        assert len(variable.shards) == row.num_shards
    cut = sum(v.numpy().nbytes for v in model.variables if any(v.specs))
    kept_whole = sum(v.numpy().nbytes for v in model.variables if not any(v.specs))
    assert plan.bytes_per_device == cut / 4 + kept_whole
    table = next(row for row in plan.rows if row.path.endswith("source_embedding/table"))
    assert table.shape == (64, HIDDEN) and table.sharded_over == ("model", None)
    assert f"{plan.bytes_per_device:,} in all" in str(plan)


@on_mesh
def test_first_weights_depend_on_seed_and_name_only():
    alone = {v.path: v.numpy() for v in network().variables}
    for fields in ({}, {"vocab_emb_dp": False}, {"model_parallel": 4}):
        start(**fields)
        for v in network().variables:
            true = tuple(slice(size) for size in alone[v.path].shape)
            np.testing.assert_array_equal(v.numpy()[true], alone[v.path], v.path)
        stop()


@on_mesh
def test_shards_are_packed_as_dtensor_packs_them():
    start(model_parallel=4)
    layer = layers.FeedForward(HIDDEN, 4 * HIDDEN)
    layer.build((None, None, HIDDEN))
    for variable, number in ((layer.mapping_kernel, 4), (layer.projection_bias, 1)):
        shards = [shard.numpy() for shard in variable.shards]
        assert len(shards) == number
        found = packed(variable)
        assert found.device == dtensor.device_name()
        assert dtensor.fetch_layout(found) == make_layout(variable.specs)
        on_devices = dtensor.unpack(found)
        again = dtensor.pack(on_devices, make_layout(variable.specs))
        assert (again.shape, again.dtype) == (found.shape, found.dtype)
        for i, device in enumerate(job.mesh().local_devices()):
            assert on_devices[i].device == device
            np.testing.assert_array_equal(on_devices[i], shards[i % number])


@on_mesh
def test_a_variable_on_the_mesh_is_read_and_set_as_a_whole():
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
    assert own_shards([kernel]) == kernel.shards
    put_sharded(value)
    raises(RuntimeError, ["through its Trainer"], tf.function(lambda: kernel.value + 0))
