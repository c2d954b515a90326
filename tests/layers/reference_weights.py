"""Random inputs, masks and weights for comparisons with the reference.

Every number is a multiple of 1/64 below 4, which float32, bfloat16 and float16 represent exactly.
Differences from the reference therefore come only from the layer's arithmetic. Weights are nested
dictionaries with the attribute names of the Keras layers.
"""

import numpy as np


def numbers(rng, *shape, scale=1.0):
    """Normal numbers, rounded to multiples of 1/64 in [-3.9, 3.9]."""
    return np.clip(np.round(rng.normal(0.0, scale, shape) * 64) / 64, -3.9375, 3.9375)


def padding_mask(rng, batch, length):
    """[b, t] of 0/1 with at least one 1 in every row."""
    lengths = rng.integers(1, length + 1, batch)
    return (np.arange(length) < lengths[:, None]).astype(np.int32)


def attention_mask(rng, batch, queries, keys):
    """Return 0/1 masks `[b, s, t]`. The last query of the first row sees no key."""
    mask = (rng.random((batch, queries, keys)) < 0.6).astype(np.int32)
    mask[0, -1] = 0
    return mask


def linear(rng, inputs, outputs, use_bias=True):
    weights = {"kernel": numbers(rng, inputs, outputs, scale=inputs**-0.5)}
    if use_bias:
        weights["bias"] = numbers(rng, outputs, scale=0.5)
    return weights


def layer_norm(rng, hidden):
    return {**rms_norm(rng, hidden), "beta": numbers(rng, hidden, scale=0.5)}


def rms_norm(rng, hidden):
    return {"gamma": 1.0 + numbers(rng, hidden, scale=0.25)}


def attention(rng, hidden, heads):
    size = hidden // heads
    weights = {}
    for name in ("query", "key", "value"):
        weights[f"{name}_kernel"] = numbers(rng, hidden, heads, size, scale=hidden**-0.5)
        weights[f"{name}_bias"] = numbers(rng, heads, size, scale=0.5)
    weights["output_kernel"] = numbers(rng, heads, size, hidden, scale=hidden**-0.5)
    weights["output_bias"] = numbers(rng, hidden, scale=0.5)
    return weights


def feed_forward(rng, hidden, inner):
    return {
        "mapping_kernel": numbers(rng, hidden, inner, scale=hidden**-0.5),
        "mapping_bias": numbers(rng, inner, scale=0.5),
        "projection_kernel": numbers(rng, inner, hidden, scale=inner**-0.5),
        "projection_bias": numbers(rng, hidden, scale=0.5),
    }


def encoder_layer(rng, hidden, heads, inner):
    return {
        "attention_norm": layer_norm(rng, hidden),
        "attention": attention(rng, hidden, heads),
        "feed_forward_norm": layer_norm(rng, hidden),
        "feed_forward": feed_forward(rng, hidden, inner),
    }


def decoder_layer(rng, hidden, heads, inner):
    return {
        "self_attention_norm": layer_norm(rng, hidden),
        "self_attention": attention(rng, hidden, heads),
        "cross_attention_norm": layer_norm(rng, hidden),
        "cross_attention": attention(rng, hidden, heads),
        "feed_forward_norm": layer_norm(rng, hidden),
        "feed_forward": feed_forward(rng, hidden, inner),
    }


def stack(rng, block, layers, hidden, heads, inner, final_norm):
    """`block` is encoder_layer or decoder_layer; a final norm in pre-norm stacks only."""
    weights = {"blocks": [block(rng, hidden, heads, inner) for _ in range(layers)]}
    if final_norm:
        weights["final_norm"] = layer_norm(rng, hidden)
    return weights


def leaves(tree, path=""):
    """Yield pairs of a path, such as "blocks.0.attention.query_kernel", and an array."""
    if isinstance(tree, np.ndarray):
        return [(path, tree)]
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    pairs = []
    for key, value in items:
        pairs += leaves(value, f"{path}.{key}" if path else str(key))
    return pairs
