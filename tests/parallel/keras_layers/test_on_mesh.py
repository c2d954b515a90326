"""On a mesh the weights of Keras' layers are sharded in place, with unchanged values."""

import contextlib
import functools
import io

import keras
import numpy as np

from dtransformer.layers import Linear
from dtransformer.models import CausalLM
from dtransformer.parallel.mesh.variable import MeshVariable
from dtransformer.trainers import Trainer
from harness.keras_networks import HIDDEN, gpt, make_batch
from harness.tolerances import PARITY_LOSS
from tests.on_mesh import on_mesh, raises, start, stop

QUERY = "multi_head_attention.*/query/kernel"


def named_gpt():
    keras.utils.set_random_seed(0)
    keras.backend.clear_session()  # Layer names, and therefore paths, start from the beginning.
    return gpt()


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss)
    return model


def losses(model, steps=2):
    inputs, labels = make_batch("gpt")
    fit = compiled(model).fit(inputs, labels, 8, epochs=steps, shuffle=False, verbose=0)
    return fit.history["loss"]


@functools.cache
def results_without_mesh():
    """Return the initial weights and losses of `named_gpt`. Call it before a mesh starts."""
    network = named_gpt()
    return network.get_weights(), losses(network)


def predicted_line(network, x):
    """Predict twice and return the lines that are printed."""
    trainer = Trainer(network)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _ in range(2):
            trainer.predict(x, verbose=0)
    return printed.getvalue().splitlines()


def keras_network(middle):
    embedding = keras.layers.Embedding(10, 8)  # 80 parameters
    norm = keras.layers.LayerNormalization()  # 16 parameters
    return keras.Sequential([keras.Input((6,)), embedding, norm, middle])


@on_mesh
def test_one_line_prints_the_share_of_sharded_parameters():
    x = np.ones((4, 6), "int32")
    start(model_parallel=2)
    (line,) = predicted_line(keras_network(keras.layers.Dense(4)), x)  # 36 parameters
    assert line.startswith("model_parallel=2 shards 0.0% of the 132 parameters")
    (line,) = predicted_line(keras_network(keras.layers.Dense(16)), x)  # 144 parameters
    assert "shards 60.0% of the 240 parameters" in line
    (line,) = predicted_line(keras_network(Linear(4)), x)
    assert "shards 27.2% of the 132 parameters" in line
    assert not predicted_line(CausalLM(10, hidden_size=8, num_heads=2, num_layers=1), x)


@on_mesh
def test_the_plan_shows_layouts_and_rules_before_and_after_the_first_step():
    start(model_parallel=2)
    network = named_gpt()
    trainer = Trainer(network)
    before = {row.path: row for row in trainer.plan().rows}
    assert not any(isinstance(v, MeshVariable) for v in network.variables)
    trainer.predict(make_batch("gpt")[0], verbose=0)
    assert {row.path: row for row in trainer.plan().rows} == before
    query = before["multi_head_attention/query/kernel"]
    assert (query.rule, query.sharded_over) == ("attention heads", (None, "model", None))
    assert query.bytes_per_device == HIDDEN * HIDDEN * 4 // 2
    table = before["embedding/embeddings"]
    assert (table.rule, table.sharded_over) == ("replicated: no rule", (None, None))
    for variable in network.variables:
        shards = getattr(variable, "shards", [variable])
        assert shards[0].numpy().nbytes == before[variable.path].bytes_per_device
    total = sum(row.bytes_per_device for row in before.values())
    assert total < 0.55 * 4 * network.count_params()


@on_mesh
def test_a_layout_map_replaces_the_default_rules():
    initial, expected = results_without_mesh()
    layouts = {QUERY: (None, "model", None), "embedding/embeddings": ("data", "model")}
    start(data_parallel=2, model_parallel=2, layout_map=layouts)
    network = named_gpt()
    network.set_weights(initial)
    trainer = Trainer(network)
    np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
    sharded = {row.path: row for row in trainer.plan().rows if any(row.sharded_over)}
    assert list(sharded) == [
        "embedding/embeddings",
        "multi_head_attention/query/kernel",
        "multi_head_attention_1/query/kernel",
    ]
    table = sharded["embedding/embeddings"]
    assert table.rule == "layout_map 'embedding/embeddings'"
    assert table.sharded_over == ("data", "model") and table.num_shards == 4
    (shards,) = {len(v.shards) for v in network.variables if v.path == table.path}
    assert shards == 4


@on_mesh
def test_wrong_layout_maps_are_errors_before_the_first_step():
    def check(words, layouts, network=named_gpt, **fields):
        start(layout_map=layouts, **fields)
        trainer = compiled(Trainer(network()))
        raises(ValueError, words, lambda: trainer.train_on_batch(*make_batch("gpt")))
        stop()

    check(
        ["'qery/kernel'", "matches no weight", "multi_head_attention/query/kernel"],
        {"qery/kernel": (None, "model", None)},
    )
    check(
        ["multi_head_attention/query/kernel", "several patterns"],
        {"query": (None, "model", None), "kernel": (None, "model", None)},
    )
    check(
        ["multi_head_attention/query/bias", "(4, 16)", "has 1 axes for 2 dimensions"],
        {"attention/query/bias": ("model",)},
    )

    def own_network():
        network = CausalLM(10, hidden_size=8, num_heads=2, num_layers=1)
        network.build()
        return network

    check(
        ["query_kernel", "logical axes", "`parallel_rules`"],
        {"query_kernel": (None, "model", None)},
        own_network,
    )


@on_mesh
def test_an_axis_that_does_not_divide_a_weight_is_an_error():
    start(model_parallel=4, layout_map={"dense/kernel": (None, "model")})
    x = keras.Input((8,))
    trainer = Trainer(keras.Model(x, keras.layers.Dense(6, name="dense")(x)))
    words = ["dense/kernel", "(8, 6)", "dimension 1 has 6 elements", "'model' has 4 shards"]
    raises(ValueError, words, trainer.plan)
    raises(ValueError, words, lambda: trainer.predict(np.ones((4, 8)), verbose=0))


@on_mesh
def test_default_rules_replicate_what_the_axis_does_not_divide():
    start(model_parallel=4)
    x = keras.Input((6, 8))
    trainer = Trainer(keras.Model(x, keras.layers.MultiHeadAttention(2, 4)(x, x)))
    rows = trainer.plan().rows
    assert not any(axis for row in rows for axis in row.sharded_over)
    assert rows[0].rule == (
        "replicated: dimension 1 has 2 elements, but the mesh axis 'model' has 4 shards"
    )


@on_mesh
def test_adapters_of_keras_are_sharded_like_their_kernels():
    def adapted():
        network = named_gpt()
        for layer in network.layers:
            if isinstance(layer, keras.layers.Dense):
                layer.enable_lora(4)
        return network

    network = adapted()
    initial = network.get_weights()
    expected = losses(network)
    start()
    network = adapted()
    network.set_weights(initial)
    trainer = Trainer(network)
    np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
    layouts = {row.path: row.sharded_over for row in trainer.plan().rows}
    assert layouts["dense/lora_kernel_a"] == (None, None)
    assert layouts["dense/lora_kernel_b"] == (None, "model")
    assert layouts["dense_1/lora_kernel_a"] == ("model", None)
    assert layouts["dense_1/lora_kernel_b"] == (None, None)


@on_mesh
def test_the_embedding_is_sharded_by_rows_if_requested():
    initial, expected = results_without_mesh()
    start(vocab_emb_dp=False)
    network = named_gpt()
    network.set_weights(initial)
    trainer = Trainer(network)
    np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
    rows = {row.path: row for row in trainer.plan().rows}
    assert rows["embedding/embeddings"].sharded_over == ("model", None)
