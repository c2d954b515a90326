"""Configs store settings made after construction, and the placement function."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import FeedForward, TransformerEncoder, TransformerEncoderLayer
from dtransformer.models import CausalLM
from dtransformer.parallel.config.config import TransformerRecomputeConfig

SIZES = {"hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 16}


@keras.saving.register_keras_serializable("tests")
def place_all_on_stage_0(network, layer_id, offset, parallel_config, layers):
    network.pipeline_stage = 0
    network.set_comm_fusion(7)


def restored_from_config(layer):
    return type(layer).from_config(layer.get_config())


def test_default_settings_are_not_stored():
    assert "settings" not in TransformerEncoder(2, **SIZES).get_config()


def test_sharding_rules_survive_config_round_trip():
    assert restored_from_config(FeedForward(8, 16).shard(mlp=None))._sharding_rules == {"mlp": None}
    encoder = TransformerEncoder(2, **SIZES)
    encoder.blocks[1].attention.shard(heads=None)
    restored = restored_from_config(encoder)
    assert restored.blocks[1].attention._sharding_rules == {"heads": None}
    assert not restored.blocks[0].attention._sharding_rules


@pytest.mark.parametrize("select", [(), ("attention", "norm")])
def test_recompute_survives_config_round_trip(select):
    config = TransformerRecomputeConfig(recompute=not select, select=select)
    model = CausalLM(10, hidden_size=8, num_heads=2, num_layers=2)
    model.blocks.blocks[1].recompute(config)
    first, second = restored_from_config(model).blocks.blocks
    assert second.recompute_config == config and not first.recompute_config.recompute
    assert second.attention.is_recomputed == bool(select)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransformerEncoder(2, **SIZES, lambda_func=place_all_on_stage_0),
        lambda: CausalLM(
            10, hidden_size=8, num_heads=2, num_layers=2, lambda_func=place_all_on_stage_0
        ),
    ],
)
def test_lambda_func_survives_config_round_trip(make):
    restored = restored_from_config(make())
    blocks = getattr(restored, "blocks", restored)
    assert [block.comm_fusion for block in getattr(blocks, "blocks", blocks)] == [7, 7]


def test_settings_survive_keras_file(tmp_path):
    inputs = keras.Input((3, 8))
    encoder = TransformerEncoder(
        2, **SIZES, lambda_func=place_all_on_stage_0, hidden_act=keras.layers.ReLU
    )
    encoder.blocks[0].recompute(True)
    encoder.shard(mlp=None)
    model = keras.Model(inputs, encoder(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    restored = loaded.layers[-1]
    assert restored.blocks[0].comm_fusion == 7 and restored.blocks[0].recompute_config.recompute
    assert restored.blocks[1].feed_forward._sharding_rules == {"mlp": None}
    x = tf.random.normal((2, 3, 8))
    np.testing.assert_array_equal(loaded(x), model(x))


def test_unregistered_lambda_func_raises_on_load(tmp_path):
    inputs = keras.Input((3, 8))
    place = lambda network, **_: None
    model = keras.Model(inputs, TransformerEncoder(2, **SIZES, lambda_func=place)(inputs))
    model.save(tmp_path / "model.keras")
    with pytest.raises((TypeError, ValueError), match="lambda"):
        keras.saving.load_model(tmp_path / "model.keras")


def test_activation_may_be_a_layer_class():
    x = tf.random.normal((2, 3, 8))
    layer = TransformerEncoderLayer(**SIZES, hidden_act=keras.layers.LeakyReLU)
    copy, expected = restored_from_config(layer), layer(x)
    copy.build(x.shape)
    copy.set_weights(layer.get_weights())
    np.testing.assert_array_equal(copy(x), expected)
