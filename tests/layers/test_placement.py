"""Blocks are placed on pipeline stages, evenly or by `lambda_func`."""

import pytest

import dtransformer
from dtransformer import parallel_config
from dtransformer.layers import (
    Transformer,
    TransformerDecoder,
    TransformerEncoder,
)
from dtransformer.models import TranslationTransformer


@pytest.mark.parametrize("encoder_layers, decoder_layers", [(3, 2), (1, 1), (0, 4)])
def test_lambda_func_is_called_once_per_block(encoder_layers, decoder_layers):
    calls = []
    Transformer(
        encoder_layers, decoder_layers, 12, 3, 7, lambda_func=lambda **call: calls.append(call)
    )
    total = encoder_layers + decoder_layers
    expected = [(index, 0) for index in range(encoder_layers)]
    expected += [(index, encoder_layers) for index in range(decoder_layers)]
    assert [(call["layer_id"], call["offset"]) for call in calls] == expected
    assert len({id(call["network"]) for call in calls}) == total
    for call in calls:
        assert set(call) == {"network", "layer_id", "offset", "parallel_config", "layers"}
        assert call["layers"] == total
        assert call["parallel_config"] is dtransformer.get_parallel_config()
    kinds = [type(call["network"]).__name__ for call in calls]
    assert (
        kinds
        == ["TransformerEncoderLayer"] * encoder_layers
        + ["TransformerDecoderLayer"] * decoder_layers
    )


@pytest.mark.parametrize(
    "layers, chunks, sizes",
    [
        (48, 13, [2, *[4] * 11, 2]),
        (80, 21, [2, *[4] * 19, 2]),
        (6, 3, [2, 2, 2]),
        (48, 3, [16, 16, 16]),
        (48, 4, [8, 16, 16, 8]),
        (9, 4, [1, 3, 3, 2]),
        (50, 13, [3, *[4] * 11, 3]),
        (48, 25, [1, *[2] * 23, 1]),
        (4, 3, [1, 1, 2]),
        (8, 2, [4, 4]),
        (5, 5, [1] * 5),
        (7, 5, [2, 1, 1, 1, 2]),
    ],
)
def test_chunks_of_a_single_stage_minimize_compile_time(layers, chunks, sizes):
    fields = {"pipeline_schedule": "interleaved", "pipeline_chunks": chunks}
    with parallel_config(**fields):
        network = TransformerEncoder(layers, 12, 3, 7)
    places = [block.pipeline_stage for block in network.blocks]
    assert places == [chunk for chunk, size in enumerate(sizes) for _ in range(size)]


def test_lambda_func_places_blocks():
    def place(network, layer_id, offset, parallel_config, layers):
        network.pipeline_stage = int(layer_id + offset >= 1)
        network.set_comm_fusion(layers - layer_id)

    with parallel_config(pipeline_stage=2):
        sizes = {"hidden_size": 12, "num_heads": 3, "encoder_layers": 1, "decoder_layers": 2}
        model = TranslationTransformer(11, lambda_func=place, **sizes)
    blocks = [*model.transformer.encoder.blocks, *model.transformer.decoder.blocks]
    assert [block.pipeline_stage for block in blocks] == [0, 1, 1]
    assert [block.comm_fusion for block in blocks] == [3, 3, 2]


@pytest.mark.parametrize(
    "encoder_layers, decoder_layers, stages, groups, expected_stages, expected_groups",
    [
        (1, 1, 1, 4, [0, 0], [1, 2]),
        (6, 6, 1, 4, [0] * 12, [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]),
        (6, 6, 4, 4, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3),
        (4, 4, 2, 2, [0] * 4 + [1] * 4, [1] * 4 + [2] * 4),
        (3, 4, 3, 4, [0, 0, 1, 1, 2, 2, 2], [1, 2, 3, 4, 5, 6, 7]),
        (2, 1, 3, 1, [0, 1, 2], [1, 1, 1]),
        (0, 5, 2, 3, [0, 0, 1, 1, 1], [1, 2, 3, 4, 5]),
    ],
)
def test_blocks_are_spread_evenly_by_default(
    encoder_layers, decoder_layers, stages, groups, expected_stages, expected_groups
):
    with parallel_config(pipeline_stage=stages, gradient_aggregation_group=groups):
        network = Transformer(encoder_layers, decoder_layers, 12, 3, 7)
    blocks = [*network.encoder.blocks, *network.decoder.blocks]
    layers_, group_size = len(blocks), max(len(blocks) // groups, 1)
    per_stage = max(layers_ // stages, 1)
    # The specification's formula and its result.
    assert expected_stages == [min(n // per_stage, stages - 1) for n in range(layers_)]
    assert expected_groups == [n // group_size + 1 for n in range(layers_)]
    assert [block.pipeline_stage for block in blocks] == expected_stages
    assert [block.comm_fusion for block in blocks] == expected_groups


@pytest.mark.parametrize(
    "make",
    [
        lambda: Transformer(1, 2, 12, 3, 7),
        lambda: TransformerEncoder(3, 12, 3, 7),
        lambda: TransformerDecoder(3, 12, 3, 7),
        lambda: TranslationTransformer(11, encoder_layers=2, decoder_layers=1),
    ],
)
def test_more_stages_than_blocks_raises(make):
    with parallel_config(pipeline_stage=4):
        with pytest.raises(ValueError, match="pipeline_stage=4.*has 3"):
            make()
    with parallel_config(pipeline_stage=3):
        make()


@pytest.mark.parametrize(
    "stages, words",
    [
        ([1, 0, 1, 1], ["block_1", "stage 0", "stage 1"]),  # Within the encoder.
        ([0, 0, 1, 0], ["block_1", "stage 0", "stage 1"]),  # Within the decoder.
        ([0, 1, 0, 0], ["block_0", "stage 0", "stage 1"]),  # From encoder to decoder.
        ([0, 0, 1, 2], ["block_1", "stage 2", "0 to 1"]),
        ([-1, 0, 1, 1], ["block_0", "stage -1", "0 to 1"]),
    ],
)
def test_invalid_stages_raise(stages, words):
    def place(network, layer_id, offset, parallel_config, layers):
        network.pipeline_stage = stages[layer_id + offset]

    with parallel_config(pipeline_stage=2), pytest.raises(ValueError) as caught:
        Transformer(2, 2, 12, 3, 7, lambda_func=place)
    assert all(word in str(caught.value) for word in words)
