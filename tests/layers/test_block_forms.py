"""Block patterns set the window, positions, experts and norms of each block."""

import numpy as np
import pytest
import tensorflow as tf

from dtransformer.block_forms import PLACEMENTS, get_block_arguments, has_experts, shortest_pattern
from dtransformer.layers import TransformerDecoder, TransformerEncoder

BLOCK = {"hidden_size": 8, "num_heads": 2, "ffn_hidden_size": 12, "causal": True}
NO_DROPOUT = {"attention_dropout_rate": 0.0, "hidden_dropout_rate": 0.0}


def test_block_pattern_repeats():
    arguments = {"window": 7, "block_pattern": [{"window": 3}, {}, {"window": None}]}
    windows = [get_block_arguments(arguments, i)["window"] for i in range(7)]
    assert windows == [3, 7, None, 3, 7, None, 3]
    assert get_block_arguments({"window": 7}, 2)["window"] == 7


@pytest.mark.parametrize(
    "every, pattern, expected",
    [
        (1, None, [True, True, True, True]),
        (2, None, [False, True, False, True]),
        (1, [{"experts": False}, {}, {}, {}], [False, True, True, True]),
        (2, [{"experts": True}, {}], [True, True, True, True]),
    ],
)
def test_moe_every_and_pattern_select_expert_blocks(every, pattern, expected):
    arguments = {"moe_every": every, "block_pattern": pattern}
    assert [has_experts(arguments, i) for i in range(4)] == expected


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_shortest_finds_the_period(period):
    pattern = [{"window": i + 1} for i in range(period)]
    assert shortest_pattern([pattern[i % period] for i in range(11)]) == pattern
    assert shortest_pattern([]) == []


def test_stack_with_pattern_equals_separate_blocks():
    """A stack with a pattern equals separate blocks applied in sequence."""
    pattern = [{"window": 2, "rotary_base": 100.0}, {"rotary_base": None}]
    stack = TransformerEncoder(3, **BLOCK, **NO_DROPOUT, rotary_base=9.0, block_pattern=pattern)
    x = tf.random.stateless_normal((2, 6, 8), (1, 2))
    y, expected = stack(x), x
    for i in range(3):
        options = {"rotary_base": 9.0, **pattern[i % 2]}
        alone = TransformerEncoder(1, **BLOCK, **NO_DROPOUT, **options)
        alone.build((None, None, 8))
        for weight, value in zip(alone.blocks[0].weights, stack.blocks[i].weights, strict=True):
            weight.assign(value)
        expected = alone.blocks[0](expected)
    np.testing.assert_allclose(y, stack.final_norm(expected), rtol=1e-5, atol=1e-6)
    restored = TransformerEncoder.from_config(stack.get_config())
    assert [block.arguments for block in restored.blocks] == [b.arguments for b in stack.blocks]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_pattern": []}, "`block_pattern` is empty"),
        (
            {"block_pattern": [{"hidden_size": 3}]},
            "`block_pattern` has the key 'hidden_size', expected keys",
        ),
        ({"block_pattern": [{"experts": True}]}, "has no experts"),
        (
            {"norm_placement": "both"},
            "`norm_placement` must be one of pre, post, output, sandwich, para",
        ),
        (
            {"norm_placement": "pre", "post_layernorm_residual": True},
            "contradicts `norm_placement='pre'`",
        ),
    ],
)
def test_invalid_block_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        TransformerEncoder(2, **BLOCK, **options)


def test_decoder_rejects_parallel_norm_placement():
    with pytest.raises(ValueError, match="Decoder blocks do not support norm_placement='parallel'"):
        TransformerDecoder(1, **BLOCK, norm_placement="parallel")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_norm_placements_match_their_formulas(placement):
    """Compares each placement with its formula, using the block's sublayers."""
    options = {"norm": "rms_norm", "norm_placement": placement, "residual_scale": 0.5}
    stack = TransformerEncoder(1, **BLOCK, **NO_DROPOUT, **options)
    x = tf.random.stateless_normal((2, 5, 8), (1, 2))
    y, block = stack(x), stack.blocks[0]
    for weight in block.weights:
        if "norm" in weight.path:
            weight.assign(
                tf.random.stateless_uniform(weight.shape, (3, len(weight.path)), 0.5, 2.0)
            )
    y = stack(x)
    attend = lambda x: block.attention(x, x, x)
    if block.placement.is_parallel:
        attention_norm = block.attention_norm
        norm = getattr(block, "feed_forward_norm", attention_norm)
        assert (norm is attention_norm) == (placement == "parallel_one_norm")
        x += 0.5 * (attend(attention_norm(x)) + block.feed_forward(norm(x)))
        np.testing.assert_allclose(y, stack.final_norm(x), rtol=1e-5, atol=1e-6)
        return
    for name, apply in {"attention": attend, "feed_forward": block.feed_forward}.items():
        norm = getattr(block, f"{name}_norm")
        x = {
            "pre": lambda: x + 0.5 * apply(norm(x)),
            "post": lambda: norm(x + 0.5 * apply(x)),
            "output": lambda: x + 0.5 * norm(apply(x)),
            "sandwich": lambda: x + 0.5 * getattr(block, f"{name}_output_norm")(apply(norm(x))),
        }[placement]()
    assert (stack.final_norm is None) == (placement == "post")
    expected = x if placement == "post" else stack.final_norm(x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
