"""Rules decide the sharding of weights, and users may override them."""

import keras
import numpy as np

import dtransformer
from dtransformer import layers
from dtransformer.parallel.mesh.axis_rules import relayout
from dtransformer.parallel.mesh.batch import local_value, put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.tensor_parallel.linear import column_parallel, row_parallel
from harness.networks import translation_model
from harness.tolerances import PARITY_LOSS
from tests.doc_pages import ROOT, blocks, replaced
from tests.on_mesh import (
    HIDDEN,
    VOCAB_SIZE,
    losses,
    losses_without_mesh,
    make_trainer,
    network,
    on_mesh,
    raises,
    start,
    stop,
)


@on_mesh
def test_shard_method_overrides_rules_of_one_layer():
    expected = losses_without_mesh()
    start()
    model = translation_model(VOCAB_SIZE, hidden_size=HIDDEN, num_heads=4)
    block = model.transformer.encoder.blocks[0]
    block.feed_forward.shard(mlp=None)
    model.build()
    trainer = make_trainer(model)
    np.testing.assert_allclose(losses(trainer), expected, rtol=PARITY_LOSS)
    assert not any(block.feed_forward.mapping_kernel.specs)
    assert any(model.transformer.decoder.blocks[0].feed_forward.mapping_kernel.specs)
    report = trainer.communication_report()
    assert not report.get_layer("encoder/block_0/feed_forward")
    assert len(report.get_layer("decoder/block_0/feed_forward")) == 2
    raises(ValueError, ["before `build`"], lambda: block.feed_forward.shard(mlp=None))
    raises(ValueError, ["'mpl'"], lambda: layers.FeedForward(8, 8).shard(mpl=None))
    raises(ValueError, ["'stage'"], lambda: layers.FeedForward(8, 8).shard(mlp="stage"))


@on_mesh
def test_parallel_rules_override_the_defaults():
    expected = losses_without_mesh()
    start(parallel_rules={"mlp": None, "vocab": None})
    model = network()
    np.testing.assert_allclose(losses(make_trainer(model)), expected, rtol=PARITY_LOSS)
    sharded_axes = {
        name for v in model.variables for name, axis in zip(v.logical_axes, v.specs) if axis
    }
    assert sharded_axes == {"heads"}


class Doubling(layers.Layer):
    """Layer of two matrix products whose inner features have a custom logical axis."""

    def build(self, shape):
        self.first = self.add_weight((shape[-1], 8), axes=("embed", "states"), name="first")
        self.second = self.add_weight((8, shape[-1]), axes=("states", "embed"), name="second")

    def call(self, x):
        (states,) = column_parallel(x, [self.first], ("states",))
        return row_parallel(2 * states, self.second, ("states",))


@on_mesh
def test_layer_with_a_custom_logical_axis():
    x = np.random.default_rng(0).normal(size=(4, 8, 16)).astype("float32")
    rules = {"parallel_rules": {"states": "model"}}
    with dtransformer.parallel_config(**rules):
        expected = Doubling(name="doubling")(x)
    start(**rules)
    layer = Doubling(name="doubling")
    layer.build(x.shape)
    assert layer.first.specs == (None, "model") and layer.second.specs == ("model", None)
    run = MeshFunction(lambda x: relayout(layer(x), (None,) * 3), layer.variables)
    actual = local_value(run(put_replicated(x)))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


WITHOUT_DROPOUT = {
    "causal=True)": "causal=True, hidden_dropout_rate=0.0, attention_dropout_rate=0.0)",
    "4 * hidden_size)": "4 * hidden_size, dropout_rate=0.0)",
    "batch_size=4,": "batch_size=4, shuffle=False,",
    "dtransformer.init": "# ",
}


@on_mesh
def test_docs_patterns_match_one_device_on_a_mesh():
    code = "\n".join(blocks(ROOT / "docs/patterns.md", "python")[:5])
    code = replaced(code, WITHOUT_DROPOUT)
    exec(code, reference := {})
    keras.utils.clear_session()  # equal layer names give equal weights
    start()
    exec(code, sharded := {})
    actual, expected = (names["history"]["loss"] for names in (sharded, reference))
    np.testing.assert_allclose(actual, expected, rtol=PARITY_LOSS)
    assert any(any(v.specs) for v in sharded["network"].get_layer("block_1").weights)


@on_mesh
def test_layer_of_the_sharding_guide_matches_one_device_on_a_mesh():
    code = "\n".join(blocks(ROOT / "docs/sharding-guide.md", "python"))
    code = replaced(code, {"dtransformer.init()": ""})
    exec(code, reference := {})
    for fields in ({"sequence_parallel": True}, {"model_parallel": 1, "context_parallel": 2}):
        keras.utils.clear_session()  # equal layer names give equal weights
        start(**fields)
        exec(code, sharded := {})
        np.testing.assert_allclose(sharded["losses"], reference["losses"], rtol=PARITY_LOSS)
        first, last = sharded["network"].layers[-1].weights
        expected = "model" if "sequence_parallel" in fields else None
        assert first.specs == (None, expected, None) and last.specs == (expected, None, None)


@on_mesh
def test_rejects_invalid_rules():
    start(parallel_rules={"embed": "model"})
    raises(ValueError, ["query_kernel", "sharded twice", "'model'"], network)
    stop()
    start(parallel_rules={"positoin": None})
    raises(ValueError, ["'positoin'", "no weight"], lambda: losses(make_trainer(network())))
    stop()
    start(model_parallel=4, parallel_rules={"norm": "model", "heads": None})
    layer = layers.LayerNorm()
    raises(ValueError, ["gamma", "(30,)", "'norm'", "4 shards"], lambda: layer.build((None, 30)))


@on_mesh
def test_rejects_heads_that_shards_do_not_divide():
    start(model_parallel=4)
    raises(ValueError, ["model_parallel=4", "num_heads=2"], lambda: network(num_heads=2))
