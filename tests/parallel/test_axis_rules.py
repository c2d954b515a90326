"""Weights name their dimensions, one table shards them, and unknown names raise."""

import pytest
import tensorflow as tf

from dtransformer import TransformerOpParallelConfig, parallel_config
from dtransformer.layers import Layer, Linear, RMSNorm
from dtransformer.models import TranslationTransformer
from dtransformer.parallel.mesh.axis_rules import LOGICAL_AXES, check_axes, constrain, rules


@pytest.mark.parametrize(
    "axes",
    [(), ("batch",), (None,), ("embed", "mlp"), ("batch", None, "heads", "head_dim"), ["vocab"]],
)
def test_accepts_logical_axes(axes):
    check_axes(axes, len(axes), "a weight")


@pytest.mark.parametrize(
    "axes, rank, words",
    [
        (("embed",), 2, ["2 dimensions", "embed"]),
        (("embed", "mlp"), 1, ["1 dimensions", "embed", "mlp"]),
        ((), 1, ["1 dimensions"]),
        (("hidden",), 1, ["'hidden'", *LOGICAL_AXES]),
        (("batch", 0), 2, ["0", *LOGICAL_AXES]),
    ],
)
def test_rejects_unknown_axes(axes, rank, words):
    with pytest.raises(ValueError) as caught:
        check_axes(axes, rank, "the weight head/kernel")
    assert "the weight head/kernel" in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "fields, sharded",
    [
        ({}, {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}),
        ({"vocab_emb_dp": False}, {"vocab_rows": "model"}),
        ({"sequence_parallel": True}, {"length": "model"}),
        (
            {"context_parallel": 2},
            dict.fromkeys(["length", "inner_length", "length_shards"], "context"),
        ),
        ({"parallel_rules": {"mlp": None, "states": "model"}}, {"mlp": None, "states": "model"}),
    ],
)
def test_rules_follow_the_config(fields, sharded):
    common = {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}
    expected = {**dict.fromkeys(LOGICAL_AXES), **common, **sharded}
    assert rules(TransformerOpParallelConfig(model_parallel=2, **fields)) == expected


def test_parallel_rules_add_a_logical_axis():
    class States(Layer):
        def build(self, shape):
            self.kernel = self.add_weight((shape[-1], 6), axes=("embed", "states"), name="kernel")

        def call(self, x):
            return constrain(x @ self.kernel, ("batch", "states"))

    with pytest.raises(ValueError, match="'states'.*parallel_rules="):
        States()(tf.ones((2, 4)))
    with parallel_config(parallel_rules={"states": "model"}):
        layer = States()
        assert layer(tf.ones((2, 4))).shape == (2, 6)
    assert layer.kernel.logical_axes == ("embed", "states")


def test_constrain_without_a_mesh_returns_its_input():
    x = tf.ones((2, 3, 4))
    assert constrain(x, ("batch", "length", "embed")) is x
    assert constrain(x, ("batch", None, "mlp")) is x


@pytest.mark.parametrize("axes", [("batch", "embed"), ("batch", "length", "hidden")])
def test_constrain_rejects_wrong_axes_without_a_mesh(axes):
    """One process must find errors that otherwise appear only on a mesh."""
    with pytest.raises(ValueError, match="an activation"):
        constrain(tf.ones((2, 3, 4)), axes)
    with pytest.raises(ValueError, match="an activation"):
        tf.function(lambda x: constrain(x, axes))(tf.ones((2, 3, 4)))


def test_weights_declare_logical_axes():
    class Scale(Layer):
        def build(self, shape):
            self.scale = self.add_weight((shape[-1],), "ones", axes=("norm",), name="scale")

        def call(self, x):
            return x * self.scale

    layer = Scale()
    layer(tf.ones((2, 4)))
    assert layer.scale.logical_axes == ("norm",)
    with pytest.raises(ValueError, match="kernel.*2 dimensions"):
        layer.add_weight((3, 4), axes=("embed",), name="kernel")
    with pytest.raises(ValueError, match="kernel.*hidden"):
        layer.add_weight((3,), axes=("hidden",), name="kernel")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shared_embeddings": True, "tied_head": True, "head_bias": True, "positions": "learned"},
        {"post_layernorm_residual": True, "encoder_layers": 0},
    ],
)
def test_every_weight_names_all_dimensions(options):
    sizes = {"hidden_size": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    model = TranslationTransformer(11, **{**sizes, **options})
    model.build()
    assert model.variables
    for variable in model.variables:
        assert len(variable.logical_axes) == len(variable.shape), variable.path
        assert set(variable.logical_axes) <= {*LOGICAL_AXES, None}, variable.path


@pytest.mark.parametrize(
    "layer, expected",
    [
        (Linear(4, parallel="column"), {"kernel": (None, "mlp"), "bias": ("mlp",)}),
        (Linear(4, parallel="row"), {"kernel": ("mlp", None), "bias": (None,)}),
        (Linear(4, parallel=None), {"kernel": (None, None), "bias": (None,)}),
        (RMSNorm(), {"gamma": ("norm",)}),
    ],
)
def test_logical_axes_of_single_layers(layer, expected):
    layer(tf.ones((2, 4)))
    assert {v.name: v.logical_axes for v in layer.variables} == expected


def test_logical_axes_of_transformer_weights():
    model = TranslationTransformer(
        11, hidden_size=8, num_heads=2, encoder_layers=1, decoder_layers=1, positions="learned"
    )
    model.build()
    to_heads, heads = ("embed", "heads", "head_dim"), ("heads", "head_dim")
    expected = {
        "attention/query_kernel": to_heads,
        "attention/key_kernel": to_heads,
        "attention/value_kernel": to_heads,
        "attention/query_bias": heads,
        "attention/output_kernel": ("heads", "head_dim", "embed"),
        "attention/output_bias": ("embed",),
        "feed_forward/mapping_kernel": ("embed", "mlp"),
        "feed_forward/mapping_bias": ("mlp",),
        "feed_forward/projection_kernel": ("mlp", "embed"),
        "feed_forward/projection_bias": ("embed",),
        "attention_norm/gamma": ("norm",),
        "attention_norm/beta": ("norm",),
        "final_norm/gamma": ("norm",),
        "target_embedding/table": ("vocab_rows", "embed"),
        "target_positions/table": ("position", "embed"),
        "head/kernel": ("embed", "vocab"),
    }
    for ending, axes in expected.items():
        logical_axes = [v.logical_axes for v in model.variables if v.path.endswith(f"{ending}")]
        assert logical_axes and set(logical_axes) == {axes}, ending
