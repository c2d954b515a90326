"""Promise: ranks on one host reduce through shared memory, and get what NumPy computes.

The kernels take the places of TensorFlow's own, so that they are called here by TensorFlow's names.
"""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer import parallel_config
from dtransformer.parallel import job
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.host_collectives.library import library_path
from dtransformer.trainers import Trainer
from tests.shared_runs import on_ranks

LAYOUT, DEVICES = "mp2@2x1", 2
DATA_PARALLEL = "dp2@2x1"
GROUP = 77  # a number that DTensor gives to no group
DTYPES = ("float32", "float64", "int32", "int64", "float16", "bfloat16")


def values(device, shape=(5, 7), dtype="float32"):
    """Return what a device sends; every rank can say what all devices do."""
    return tf.cast(np.random.default_rng(device).normal(size=shape) * 8, dtype)


def everyones(**options):
    return [values(device, **options) for device in range(DEVICES)]


def reduced(x, operation, merge_op="Add", final_op="Id"):
    return tf.raw_ops.CollectiveReduceV2(
        input=x, group_size=DEVICES, group_key=GROUP, instance_key=operation, ordering_token=[],
        merge_op=merge_op, final_op=final_op,
    )  # fmt: skip


def on_own_device(function):
    """Return what a compiled function of the number of this rank's device gives."""
    return tf.function(lambda: function(dtransformer.rank()))()


@on_ranks(LAYOUT)
def test_sums_are_those_of_numpy_in_the_order_of_devices():
    assert library_path().exists()
    for number, dtype in enumerate(DTYPES):
        expected, *others = everyones(dtype=dtype)
        for other in others:
            expected = expected + other
        result = on_own_device(lambda d: reduced(values(d, dtype=dtype), number))
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, expected)


@on_ranks(LAYOUT)
def test_other_reductions():
    merges = {"Mul": np.prod, "Min": np.min, "Max": np.max}
    for number, (merge_op, expected) in enumerate(merges.items()):
        result = on_own_device(lambda d: reduced(values(d), 20 + number, merge_op))
        np.testing.assert_allclose(result, expected(everyones(), axis=0), rtol=1e-6)
    mean = on_own_device(lambda d: reduced(values(d), 24, final_op="Div"))
    np.testing.assert_allclose(mean, np.mean(everyones(), axis=0), rtol=1e-4, atol=1e-6)


@on_ranks(LAYOUT)
def test_tensors_of_all_sizes():
    for number, shape in enumerate([(), (0, 3), (1,), (2047,), (2049, 3), (1 << 20,)]):
        result = on_own_device(lambda d: reduced(values(d, shape), 30 + number))
        np.testing.assert_allclose(result, np.sum(everyones(shape=shape), axis=0), atol=2e-5)


@on_ranks(LAYOUT)
def test_what_is_sent_keeps_its_value():
    def twice(device):
        x = values(device) + 1
        total = reduced(x, 40)
        with tf.control_dependencies([total]):
            return tf.identity(x)

    x = on_own_device(twice)
    np.testing.assert_array_equal(x, values(dtransformer.rank()) + 1)


@on_ranks(LAYOUT)
def test_turns_of_a_loop_and_operations_side_by_side_are_told_apart():
    def loop(device):
        x = values(device)
        total = tf.zeros_like(x)
        for turn in tf.range(20.0):
            each = [reduced(x * (turn * 3 + k), 50 + k) for k in range(3)]
            total += each[0] + 2 * each[1] + 4 * each[2]
        return total

    loop = tf.autograph.to_graph(loop)
    factor = sum((t * 3) + 2 * (t * 3 + 1) + 4 * (t * 3 + 2) for t in range(20))
    expected = factor * np.sum(everyones(), axis=0)
    for _ in range(3):  # the same operations again
        result = on_own_device(loop)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-1)


@on_ranks(LAYOUT)
def test_a_rank_that_is_far_ahead_waits():
    """More tensors are under way, 5000, than there is room for: 4096, `kRingSize` of exchange.h."""
    turns = tf.range(5000.0)

    def many(device):
        if dtransformer.rank():
            time.sleep(1)
        x = values(device)
        return tf.map_fn(lambda k: reduced(x + k, 1000), turns, parallel_iterations=len(turns))

    # A `tf.function` would begin one when the one before has ended.
    result = tf.compat.v1.wrap_function(lambda: many(dtransformer.rank()), [])()
    expected = np.sum(everyones(), axis=0) + DEVICES * turns.numpy()[:, None, None]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-3)


@on_ranks(LAYOUT)
def test_all_to_all_gives_each_device_what_is_for_it():
    def exchange(device):
        return tf.raw_ops.CollectiveAllToAllV2(
            input=values(device, (DEVICES, 6)), group_size=DEVICES, group_key=GROUP,
            instance_key=70, ordering_token=[],
        )  # fmt: skip

    result = on_own_device(exchange)
    expected = [x[dtransformer.rank()] for x in everyones(shape=(DEVICES, 6))]
    np.testing.assert_array_equal(result, expected)


@on_ranks(LAYOUT)
def test_gathered_tensors_are_in_the_order_of_devices():
    def gather(device):
        return tf.raw_ops.CollectiveGatherV2(
            input=values(device, (3, 6)), group_size=DEVICES, group_key=GROUP, instance_key=72,
            ordering_token=[],
        )  # fmt: skip

    np.testing.assert_array_equal(on_own_device(gather), np.concatenate(everyones(shape=(3, 6))))


@on_ranks(LAYOUT)
def test_slices_that_are_not_one_for_each_device():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"one slice for each of 2.*\[3,6\]"):
        tf.raw_ops.CollectiveAllToAllV2(
            input=tf.ones([3, 6]), group_size=2, group_key=GROUP, instance_key=71,
            ordering_token=[],
        )  # fmt: skip


@on_ranks(LAYOUT)
def test_tensors_that_do_not_belong_together():
    with pytest.raises(tf.errors.InvalidArgumentError, match="differs in size, type or purpose"):
        reduced(tf.ones([2 + dtransformer.rank()]), 80)


@on_ranks(LAYOUT)
def test_a_step_that_fails_on_one_rank_ends_on_all():
    """The failing rank gets its own error; nobody waits for what will never come."""

    def fails():
        time.sleep(0.5)  # what is summed has been announced then
        raise ValueError("out of luck")

    def step(device):
        total = reduced(values(device), 90)
        if device == 1:  # not stateful: it does not wait for the sum
            total += tf.numpy_function(fails, [], "float32", stateful=False)
        return total

    if dtransformer.rank() == 0:
        time.sleep(2)
    expected = [tf.errors.AbortedError, tf.errors.InvalidArgumentError][dtransformer.rank()]
    with pytest.raises(expected, match=["start the job again", "out of luck"][dtransformer.rank()]):
        on_own_device(step)
    for _ in range(2):
        with pytest.raises(tf.errors.AbortedError, match="start the job again"):
            on_own_device(lambda device: reduced(values(device), 91))


@on_ranks(LAYOUT)
def test_a_new_mesh_after_a_failed_step():
    result = on_own_device(lambda device: reduced(values(device), 92))
    np.testing.assert_array_equal(result, everyones()[0] + everyones()[1])


@on_ranks(DATA_PARALLEL)
def test_the_data_parallel_group_takes_them_in_place_of_horovod():
    group = job.data_parallel_group()
    assert group.host_key is not None
    both = {"a": everyones(), "b": everyones(shape=(2, 3))}

    @tf.function
    def step(a, b):
        return {
            "sum": transport.all_reduce(a, "Sum", group, "sum"),
            "max": transport.all_reduce(a, "Max", group, "max"),
            "together": transport.all_reduce_together([a, 2 * a], group, "together"),
            "gather": transport.all_gather(a, group, "gather"),
            "to_all": transport.all_to_all(b, group, "to_all"),
            "scatter": transport.reduce_scatter(b, group, "scatter"),
            "scalar": transport.all_reduce(tf.reduce_sum(b), "Sum", group, "scalar"),
        }

    rank = dtransformer.rank()
    result = step(both["a"][rank], both["b"][rank])
    assert "HorovodAll" not in str(
        step.get_concrete_function(*[x[0] for x in both.values()]).graph.as_graph_def()
    )
    total = both["a"][0] + both["a"][1]
    expected = {
        "sum": total,
        "max": np.maximum(*both["a"]),
        "together": [total, 2 * total],
        "gather": np.stack(both["a"]),
        "to_all": np.stack([x[rank] for x in both["b"]]),
        "scatter": (both["b"][0] + both["b"][1])[rank],
        "scalar": tf.reduce_sum(both["b"][0]) + tf.reduce_sum(both["b"][1]),
    }
    tf.nest.map_structure(np.testing.assert_array_equal, result, expected)


@on_ranks(DATA_PARALLEL)
def test_types_that_the_kernels_do_not_have():
    group, rank = job.data_parallel_group(), dtransformer.rank()
    for dtype in ("bfloat16", "int8", "bool"):
        x = tf.cast([rank, 1], dtype)
        np.testing.assert_array_equal(
            transport.all_gather(x, group, f"gather_{dtype}"), tf.cast([[0, 1], [1, 1]], dtype)
        )
    x = tf.cast([1.5, 2 + rank], "bfloat16")
    np.testing.assert_array_equal(transport.all_reduce(x, "Sum", group, "sum"), [3, 5])


def _fit_what_ends(config):
    """Train, evaluate and predict twice, each until TensorFlow finds that there is no batch."""
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    data = tf.data.Dataset.from_tensor_slices(
        (values(dtransformer.rank(), (12, 4)), np.zeros(12, "i"))
    )
    data = data.batch(4, drop_remainder=True).filter(lambda *_: True)  # shapes are constants
    with parallel_config(**config):
        trainer = Trainer(keras.Sequential([keras.Input((4,)), *layers]))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer.compile("sgd", loss)
        history = trainer.fit(data, epochs=2, validation_data=data, verbose=0, shard=False)
        outputs = [trainer.predict(data, verbose=0, shard=False) for _ in range(2)]
    losses = history.history["val_loss"]
    assert losses[1] < losses[0]
    assert [x.shape[-1] for x in outputs] == [3, 3]


@on_ranks(DATA_PARALLEL)
def test_data_of_unknown_length_end_between_steps():
    _fit_what_ends({})


@on_ranks(DATA_PARALLEL)
def test_data_of_unknown_length_end_between_steps_whose_weights_are_gathered():
    _fit_what_ends({"optimizer_shard": 3, "parallel_optimizer_threshold": 0, "micro_batch_num": 2})


@on_ranks(DATA_PARALLEL)
def test_two_operations_of_one_name_at_once():
    """No order says which of the other rank's belongs to which."""
    group = job.data_parallel_group()
    if dtransformer.rank():
        time.sleep(1)

    @tf.custom_gradient
    def total(x):
        return tf.identity(x), lambda dy: transport.all_reduce(dy, "Sum", group, "of_one_name")

    inner = tf.function(total)
    x = tf.ones([3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.function(lambda x: inner(x) + inner(2 * x))(x)
    with pytest.raises(tf.errors.OpError, match=r"of the same name|start the job again"):
        tape.gradient(y, x)


@on_ranks(DATA_PARALLEL)
def test_sums_go_on_after_a_layout_that_is_refused():
    with pytest.raises(ValueError, match="model_parallel"):
        dtransformer.init(dtransformer.TransformerOpParallelConfig(model_parallel=3))
    group = job.data_parallel_group()
    total = transport.all_reduce(tf.constant(2.0), "Sum", group, "after_a_refusal")
    assert float(total) == 4
