"""Position biases match formulas and published values."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.layers import MultiHeadAttention, QKNorm, Rotary
from dtransformer.layers.position_bias import alibi, distance_ranges, relative_bias


def bias_block(bias, s, t, first_query=0, first_key=0, stride=1):
    return bias.block(bias.tensors, first_query, s, first_key, t, stride).numpy()


@pytest.mark.parametrize("num_heads, slopes", [(4, [4, 16, 64, 256]), (3, [16, 256, 4])])
def test_alibi_slopes_match_the_paper(num_heads, slopes):
    bias = bias_block(alibi(num_heads), 3, 5)
    for head, slope in enumerate(slopes):
        expected = [[-abs(i - j) / slope for j in range(5)] for i in range(3)]
        np.testing.assert_allclose(bias[head], expected, rtol=1e-6)


def test_distance_ranges_match_t5():
    """T5's ranges: eight with one distance each, then eight logarithmic ones up to 128."""
    ranges = distance_ranges(16, 128)
    assert ranges[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert [ranges[x] for x in (11, 12, 15, 16, 22, 23, 64, 90, 91, 127, 128)] == [
        8, 9, 9, 10, 10, 11, 14, 14, 15, 15, 15,
    ]  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "first_query, s, first_key, t, stride",
    [(0, 6, 0, 6, 1), (4, 3, 2, 9, 1), (7, 1, 0, 8, 1), (1, 4, 3, 5, 3), (0, 2, 0, 1, 4)],
)
def test_relative_bias_matches_table_look_up(causal, first_query, s, first_key, t, stride):
    table = np.random.default_rng(0).normal(size=(8, 2))
    bias = relative_bias(tf.constant(table), 5, causal)
    bias = bias_block(bias, s, t, first_query, first_key, stride)
    ranges = distance_ranges(8 if causal else 4, 5)
    for i in range(s):
        for j in range(t):
            distance = first_key + j - first_query - stride * i
            if causal:
                index = ranges[min(max(-distance, 0), 5)]
            else:
                index = ranges[min(abs(distance), 5)] + 4 * (distance > 0)
            np.testing.assert_allclose(bias[:, i, j], table[index])


def test_gradient_has_static_shapes():
    """DTensor needs static shapes on a mesh, also in shared block functions without constants."""

    @tf.function(autograph=False)
    def of_block(table):
        bias = relative_bias(table, 8, causal=True)
        return bias.block(bias.tensors, 0, 6, 0, 6)

    @tf.function(autograph=False)
    def gradient(table):
        with tf.GradientTape() as tape:
            tape.watch(table)
            bias = of_block(table)
        return tape.gradient(bias, table)

    graph = gradient.get_concrete_function(tf.TensorSpec([4, 2])).graph.as_graph_def()
    ops = {node.op for function in graph.library.function for node in function.node_def}
    assert "Sum" in ops and not ops & {"Shape", "Tile", "BroadcastTo", "BroadcastGradientArgs"}


@pytest.mark.parametrize("max_distance", [0, 3])
def test_invalid_max_distance_raises(max_distance):
    with pytest.raises(ValueError, match="relative_max_distance"):
        distance_ranges(8, max_distance)


@pytest.mark.parametrize(
    "options",
    [
        {"alibi": True},
        {"window": 2, "rotary": Rotary(100.0)},
        {"qk_norm": QKNorm("rms_norm"), "query_scale": 1.0, "num_kv_heads": 2},
        {"soft_cap": 1.5},
        {"relative_max_distance": 5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_cached_decoding_with_positions_matches_full_sequence(options):
    """One position per step, after a prompt of two positions."""
    layer = MultiHeadAttention(16, 4, causal=True, **options)
    x = tf.constant(np.random.default_rng(1).normal(size=(2, 6, 16)), "float32")
    table = tf.random.stateless_normal((8, 4), [1, 2])
    options_of_call = {"position_table": table} if "relative_max_distance" in options else {}
    expected = layer(x, x, x, **options_of_call)

    start, cache = layer.prefill(x[:, :2], capacity=4, **options_of_call)
    parts = [start]
    for place in range(2, 6):
        y, cache = layer.decode_step(x[:, place : place + 1], cache, **options_of_call)
        parts.append(y)
    np.testing.assert_allclose(tf.concat(parts, axis=1), expected, rtol=0, atol=2e-6)

    prompt = x[:1, :2]
    _, cache = layer.prefill(prompt, capacity=1, num_hypotheses=2, **options_of_call)
    new = tf.stack([x[0, 2], x[1, 2]])[:, None]
    visible = tf.constant([[[True, False], [False, True]]])
    y, _ = layer.decode_step(new, cache, visible, **options_of_call)
    both = tf.concat([tf.repeat(prompt, 2, axis=0), new], axis=1)
    np.testing.assert_allclose(
        y, layer(both, both, both, **options_of_call)[:, 2:], rtol=0, atol=2e-6
    )
