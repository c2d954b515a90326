"""Checks on the mesh of one process with four devices: a program that tests launch.

    python -m tests.distributed.mesh_checks FILE [CHECK ...]

Each check starts its own mesh; what it raises is written to FILE, None where it holds.
"""

import json
import sys
import traceback
import unittest.mock

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer import TransformerRecomputeConfig, layers
from dtransformer.layers import CrossEntropyLoss
from dtransformer.parallel import job
from dtransformer.parallel.dtensor.batch import local_value, put_replicated, put_sharded
from dtransformer.parallel.dtensor.function import MeshFunction
from dtransformer.parallel.dtensor.layouts import relayout
from dtransformer.parallel.sharded_variable import own_shards
from dtransformer.parallel.tensor_parallel.linear import column_parallel, row_parallel
from dtransformer.trainers import Trainer
from tests.distributed.jobs import translation_model
from tests.tolerances import PARITY_LOSS

B, S, T, H, V = 8, 12, 16, 32, 62
CHECKS = {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def start(devices=4, **fields):
    fields = {"model_parallel": 4, **fields}
    dtransformer.init(dtransformer.TransformerOpParallelConfig(**fields), local_devices=devices)


def stop():
    dtransformer.shutdown()
    dtransformer.set_parallel_config(dtransformer.TransformerOpParallelConfig())
    dtransformer.set_seed(0)


def network(**options):
    model = translation_model(
        V, **{"hidden_size": H, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 1, **options}
    )
    model.build()
    return model


def batch(rows=B, s=S, t=T):
    rng = np.random.default_rng(0)
    source, target, labels = (rng.integers(4, V, (rows, n), "int32") for n in (s, t, t))
    return {"source": source, "target": target}, labels


def trainer_of(model, optimizer=None, **options):
    trainer = Trainer(model)
    loss = CrossEntropyLoss(0.1, ignore_id=0)
    trainer.compile(optimizer or keras.optimizers.AdamW(1e-2), loss, **options)
    return trainer


def losses(trainer, steps=3, **shape):
    return [
        float(trainer.train_on_batch(*batch(**shape), return_dict=True)["step_loss"])
        for _ in range(steps)
    ]


def report_after_a_step(model_options=None, **fields):
    start(**fields)
    trainer = trainer_of(network(**(model_options or {})))
    losses(trainer, steps=1)
    return trainer.communication_report()


def found(report, layer):
    """The layer's collectives as a sorted list of (pass, kind, entries)."""
    return sorted(
        ("backward" if c.backward else "forward", c.kind, c.elements)
        for c in report.of_layer(layer)
    )


SOURCE, TARGET = B * S * H, B * T * H  # entries of the residual streams


@check
def blocks_send_what_the_theory_says():
    report = report_after_a_step({"encoder_layers": 2, "decoder_layers": 2})
    for number in range(2):
        for stack, parts, entries in (("encoder", 2, SOURCE), ("decoder", 3, TARGET)):
            block = f"{stack}/block_{number}"
            assert found(report, block) == [
                *[("backward", "all-reduce", entries)] * parts,
                *[("forward", "all-reduce", entries)] * parts,
            ]
            assert report.formula[block] == report.summed_elements(block) == 2 * parts * entries
    # The gradient of the memory is added up over the decoder's blocks, and sent once.
    assert [c.elements for c in report.of_layer("AddN")] == [SOURCE]
    expected = {"loss", "accuracy", "head", "encoder", "decoder", "AddN"}
    assert {c.layer.split("/")[0] for c in report.collectives} == expected
    for part in ("loss", "accuracy"):
        assert report.of_layer(part)
        assert all(c.elements == B * T for c in report.of_layer(part)), part
    assert found(report, "head") == [("backward", "all-reduce", TARGET)]
    assert {(c.over, c.group_size) for c in report.collectives} == {("model", 4)}
    sent = sum(c.bytes_sent for c in report.of_layer("encoder/block_0"))
    assert sent == 4 * SOURCE * 4 * 2 * 3 // 4, "a ring of four sends 2·3/4 of each"
    assert "encoder/block_0/attention" in str(report) and "by the theory" in str(report)


@check
def under_sequence_parallelism_no_large_all_reduce_is_left():
    report = report_after_a_step(sequence_parallel=True, vocab_emb_dp=False)
    large = [c for c in report.collectives if c.sent_as == "all-reduce" and c.elements > B * T]
    assert not large, large
    kinds = [entry[:2] for entry in found(report, "encoder/block_0")]
    assert kinds.count(("forward", "all-to-all")) == 4, "to gather and to scatter, twice"
    assert kinds.count(("backward", "all-to-all")) == 4
    # The norms' gains and offsets, and the biases after the sums: vectors of h.
    small = [entry for entry in found(report, "encoder/block_0") if entry[1] == "all-reduce"]
    assert {entry[2] for entry in small} == {H}
    volume = report.summed_elements("encoder/block_0") - sum(entry[2] for entry in small)
    assert volume == 4 * SOURCE, "as many bytes as all-reduces"


@check
def a_table_cut_by_rows_sends_one_sum_a_look_up():
    report = report_after_a_step(vocab_emb_dp=False)
    assert found(report, "source_embedding") == [("forward", "all-reduce", SOURCE)]
    assert found(report, "target_embedding") == [("forward", "all-reduce", TARGET)]


@check
def a_device_holds_its_slices_only():
    start(vocab_emb_dp=False)
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
    assert table.shape == (64, H) and table.sharded_over == ("model", None)
    assert f"{plan.bytes_per_device:,} in all" in str(plan)


@check
def first_weights_depend_on_seed_and_name_only():
    alone = {v.path: v.numpy() for v in network().variables}
    for fields in ({}, {"vocab_emb_dp": False}, {"model_parallel": 2}):
        start(**fields)
        for v in network().variables:
            true = tuple(slice(size) for size in alone[v.path].shape)
            np.testing.assert_array_equal(v.numpy()[true], alone[v.path], v.path)
        stop()


@check
def a_layer_can_be_cut_by_rules_of_its_own():
    expected = losses(trainer_of(network()))
    start()
    model = translation_model(V, hidden_size=H, num_heads=4)
    block = model.transformer.encoder.blocks[0]
    block.feed_forward.shard(mlp=None)
    model.build()
    trainer = trainer_of(model)
    np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
    assert not any(block.feed_forward.mapping_kernel.specs)
    assert any(model.transformer.decoder.blocks[0].feed_forward.mapping_kernel.specs)
    report = trainer.communication_report()
    assert not report.of_layer("encoder/block_0/feed_forward")
    assert len(report.of_layer("decoder/block_0/feed_forward")) == 2
    _raises(ValueError, ["before build"], lambda: block.feed_forward.shard(mlp=None))
    _raises(ValueError, ["'mpl'"], lambda: layers.FeedForward(8, 8).shard(mpl=None))
    _raises(ValueError, ["'stage'"], lambda: layers.FeedForward(8, 8).shard(mlp="stage"))


@check
def rows_of_the_table_are_the_users():
    expected = losses(trainer_of(network()))
    start(parallel_rules={"mlp": None, "vocab": None})
    model = network()
    np.testing.assert_allclose(losses(trainer_of(model)), expected, rtol=PARITY_LOSS)
    cut = {name for v in model.variables for name, axis in zip(v.logical_axes, v.specs) if axis}
    assert cut == {"heads"}


class Doubling(layers.Layer):
    """Two products with features between them that have a logical axis of their own."""

    def build(self, shape):
        self.first = self.add_weight((shape[-1], 8), axes=("embed", "states"), name="first")
        self.second = self.add_weight((8, shape[-1]), axes=("states", "embed"), name="second")

    def call(self, x):
        (states,) = column_parallel(x, [self.first], ("states",))
        return row_parallel(2 * states, self.second, ("states",))


@check
def a_layer_with_a_logical_axis_of_its_own():
    x = np.random.default_rng(0).normal(size=(4, 8, 16)).astype("float32")
    rules = {"parallel_rules": {"states": "model"}}
    with dtransformer.parallel_config(**rules):
        expected = Doubling(name="doubling")(x)
    start(**rules)
    layer = Doubling(name="doubling")
    layer.build(x.shape)
    assert layer.first.specs == (None, "model") and layer.second.specs == ("model", None)
    run = MeshFunction(lambda x: relayout(layer(x), (None,) * 3), layer.variables)
    found = local_value(run(put_replicated(x)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@check
def wrong_rules_are_refused():
    start(parallel_rules={"embed": "model"})
    _raises(ValueError, ["query_kernel", "sharded twice", "'model'"], network)
    stop()
    start(parallel_rules={"positoin": None})
    _raises(ValueError, ["'positoin'", "no weight"], lambda: losses(trainer_of(network())))
    stop()
    start(parallel_rules={"norm": "model", "heads": None})
    odd = layers.LayerNorm()
    _raises(ValueError, ["gamma", "(30,)", "'norm'", "4 shards"], lambda: odd.build((None, 30)))


@check
def heads_that_are_not_divisible_are_refused():
    start()
    _raises(ValueError, ["model_parallel=4", "num_heads=2"], lambda: network(num_heads=2))


@check
def dropout_on_the_mesh():
    start(sequence_parallel=True)
    one, two = (losses(trainer_of(network(dropout_rate=0.3)), steps=2) for _ in range(2))
    assert one == two, "the seed decides"
    dry = losses(trainer_of(network()), steps=1)[0]
    assert one[0] != dry and abs(one[0] - dry) < 0.5 * dry


@check
def mixed_precision_on_the_mesh():
    expected = losses(trainer_of(network(dtype="mixed_bfloat16")), steps=2)
    start()
    model = network(dtype="mixed_bfloat16")
    np.testing.assert_allclose(losses(trainer_of(model), steps=2), expected, rtol=1e-2)
    assert {v.dtype for v in model.variables} == {"float32"}


@check
def an_overflow_skips_the_step_on_every_slice():
    start()
    model = network(dtype="mixed_float16")
    trainer = trainer_of(model)
    losses(trainer, steps=1)
    trainer.optimizer.dynamic_scale.assign(2.0**60)
    before = [v.numpy() for v in model.variables]
    losses(trainer, steps=1)
    for v, old in zip(model.variables, before):
        np.testing.assert_array_equal(v.numpy(), old, v.path)
    assert float(trainer.optimizer.dynamic_scale) == 2.0**59


@check
def optimizers_clip_by_the_norms_of_the_whole():
    for options in ({"global_clipnorm": 0.1}, {"clipnorm": 0.05}, {"clipvalue": 0.01}):
        optimizer = lambda: keras.optimizers.SGD(0.5, momentum=0.9, **options)
        expected = losses(trainer_of(network(), optimizer()))
        start(vocab_emb_dp=False)
        np.testing.assert_allclose(
            losses(trainer_of(network(), optimizer())), expected, rtol=PARITY_LOSS, err_msg=options
        )
        stop()


@check
def micro_batches_on_the_mesh():
    expected = losses(trainer_of(network()))
    start(micro_batch_num=2)
    trainer = trainer_of(network())
    np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
    report = trainer.communication_report()
    # Twice two forward and two backward, of half the rows each.
    assert len(found(report, "encoder/block_0")) == 8
    assert report.formula["encoder/block_0"] == 4 * B * S * H
    stop()


@check
def recompute_on_the_mesh():
    options = {"dropout_rate": 0.1}
    start()
    expected = losses(trainer_of(network(**options)))
    stop()
    for config, sums in (
        (TransformerRecomputeConfig(recompute=True), 5),
        (TransformerRecomputeConfig(recompute=True, mp_comm_recompute=False), 4),
        (TransformerRecomputeConfig(recompute=True, recompute_slice_activation=True), 5.5),
        (TransformerRecomputeConfig(select=("attention", "feed_forward", "norm")), 4),
    ):
        start(recompute=config)
        trainer = trainer_of(network(**options))
        np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
        report = trainer.communication_report()
        assert report.formula["encoder/block_0"] == sums * B * S * H
        assert report.summed_elements("encoder/block_0") == sums * B * S * H
        stop()


@check
def updates_of_large_networks_are_compiled_on_every_device():
    decay = keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.5)
    for optimizer in (
        lambda: keras.optimizers.AdamW(decay, weight_decay=0.1),
        lambda: keras.optimizers.SGD(0.5, momentum=0.9),
        lambda: keras.optimizers.Nadam(1e-2),  # has a number that all weights share
    ):
        expected = losses(trainer_of(network(), optimizer()))
        start()
        with unittest.mock.patch("dtransformer.trainers.trainer._LARGE_NETWORK", 0):
            trainer = trainer_of(network(), optimizer())
            np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
        assert int(trainer.optimizer.iterations.numpy()) == 3
        stop()


@check
def an_optimizer_of_whole_weights_is_refused():
    start()
    model = network()
    _raises(ValueError, ["Lamb", "AdamW"], lambda: trainer_of(model, keras.optimizers.Lamb()))
    _raises(ValueError, ["run_eagerly"], lambda: trainer_of(model, run_eagerly=True))


@check
def a_trainer_without_init_is_refused():
    dtransformer.set_parallel_config(dtransformer.TransformerOpParallelConfig(model_parallel=4))
    _raises(RuntimeError, ["dtransformer.init"], lambda: Trainer(network()))
    stop()


class Classifier(keras.Model):
    """Plain Keras layers, one of them with a state, around a layer that is cut."""

    def __init__(self):
        super().__init__(name="classifier")
        self.embedding = keras.layers.Embedding(V, H)
        self.norm = keras.layers.BatchNormalization()
        self.sharded = layers.FeedForward(H, 4 * H, dropout_rate=0.0, name="sharded")
        self.dense = keras.layers.Dense(V, kernel_regularizer="l2")

    def call(self, inputs, training=False):
        x = self.norm(self.embedding(inputs["target"]), training=training)
        return self.dense(self.sharded(x, training=training))


@check
def plain_keras_layers_beside_ours():
    def run():
        keras.utils.set_random_seed(1)
        model = Classifier()
        trainer = Trainer(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer.compile(keras.optimizers.SGD(0.1), loss, metrics=["sparse_categorical_accuracy"])
        inputs, labels = batch()
        data = tf.data.Dataset.from_tensors((inputs, labels)).repeat(3)
        history = trainer.fit(data, verbose=0, epochs=2).history
        moving = [v.numpy() for v in model.norm.non_trainable_variables]
        return history, moving, trainer.predict(inputs, verbose=0)

    history, moving, outputs = run()
    start()
    mesh_history, mesh_moving, mesh_outputs = run()
    for name in ("loss", "sparse_categorical_accuracy"):
        np.testing.assert_allclose(mesh_history[name], history[name], rtol=1e-4, err_msg=name)
    for mesh_value, value in zip(mesh_moving, moving):
        np.testing.assert_allclose(mesh_value, value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mesh_outputs, outputs, rtol=1e-3, atol=1e-4)


@check
def rows_that_the_data_axis_does_not_divide():
    expected = losses(trainer_of(network()), rows=7)
    outputs = trainer_of(network()).predict(batch(rows=7)[0], verbose=0)
    start(model_parallel=2)
    np.testing.assert_allclose(losses(trainer_of(network()), rows=7), expected, rtol=PARITY_LOSS)
    found = trainer_of(network()).predict(batch(rows=7)[0], verbose=0)
    assert found.shape == outputs.shape
    np.testing.assert_allclose(found, outputs, atol=1e-4)


@check
def single_layers_by_columns_and_rows():
    x = np.random.default_rng(0).normal(size=(4, 8, 16)).astype("float32")
    parts = [("column", "row"), ("row", "column"), (None, None)]

    def outputs(kinds, rank):
        first, second = (
            layers.Linear(16, parallel=kind, name=f"l{i}") for i, kind in enumerate(kinds)
        )
        first.build((None, 16)), second.build((None, 16))

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = second(tf.nn.tanh(first(x)))
                loss = tf.reduce_sum(y * y)
            return y, tape.gradient(loss, x)

        inputs = x if rank == 3 else x[:, 0]
        if job.mesh() is None:
            return run(tf.constant(inputs))
        pinned = lambda x: [relayout(part, (None,) * rank) for part in run(x)]
        read = [*first.variables, *second.variables]
        return [
            local_value(part) for part in MeshFunction(pinned, read, True)(put_replicated(inputs))
        ]

    for rank in (2, 3):
        alone = [outputs(kinds, rank) for kinds in parts]
        start()
        for kinds, expected in zip(parts, alone):
            for part, wanted in zip(outputs(kinds, rank), expected):
                np.testing.assert_allclose(part, wanted, rtol=1e-4, atol=1e-5)
        stop()


@check
def a_variable_on_the_mesh_is_read_and_set_as_a_whole():
    start()
    layer = layers.FeedForward(H, 4 * H)
    layer.build((None, None, H))
    kernel = layer.mapping_kernel
    assert kernel.shape == (H, 4 * H) and len(kernel.shards) == 4
    assert kernel.shards[0].shape == (H, H)
    value = np.random.default_rng(0).normal(size=kernel.shape).astype("float32")
    kernel.assign(value)
    np.testing.assert_array_equal(kernel.numpy(), value)
    np.testing.assert_array_equal(np.asarray(kernel), value)
    np.testing.assert_array_equal(kernel.shards[2].numpy(), value[:, 2 * H : 3 * H])
    assert own_shards([kernel]) == kernel.shards
    put_sharded(value)
    _raises(RuntimeError, ["through its Trainer"], tf.function(lambda: kernel.value + 0))


def _raises(error, words, function):
    try:
        function()
    except error as caught:
        for word in words:
            assert word in str(caught), f"{word!r} is not in: {caught}"
    else:
        raise AssertionError(f"no {error.__name__} with {words}")


def main(path, *names):
    results = {}
    for name in names or CHECKS:
        try:
            CHECKS[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
            print(name, results[name], flush=True)
        stop()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
