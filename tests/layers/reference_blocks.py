"""Attention, feed-forward layer, encoder and decoder in NumPy float64.

Functions return `(output, backward)` as in reference.py. Weights are nested dictionaries whose keys
are the attribute names of the Keras layers.
"""

import math

import numpy as np

from tests.layers import reference


def attention(query, key, value, weights, mask=None):
    """Multi-head attention (Vaswani et al., 2017, section 3.2).

    Query `[b, s, h]`, key and value `[b, t, h]` -> `[b, s, h]`. `mask` is `[b, t]`, `[b, s, t]` or
    `[b, 1, t]`, nonzero where the query may attend to the key.
    """
    scale = 1.0 / math.sqrt(weights["query_kernel"].shape[-1])
    q, q_backward = _heads(query, weights["query_kernel"], weights["query_bias"])
    k, k_backward = _heads(key, weights["key_kernel"], weights["key_bias"])
    v, v_backward = _heads(value, weights["value_kernel"], weights["value_bias"])
    scores = scale * np.einsum("bsnd,btnd->bnst", q, k)
    probabilities, softmax_backward = reference.masked_softmax(scores, _allowed(mask))
    context = np.einsum("bnst,btnd->bsnd", probabilities, v)
    output = np.einsum("bsnd,ndh->bsh", context, weights["output_kernel"])
    output = output + weights["output_bias"]

    def backward(grad):
        grads = {
            "output_kernel": np.einsum("bsnd,bsh->ndh", context, grad),
            "output_bias": grad.sum((0, 1)),
        }
        grad_context = np.einsum("bsh,ndh->bsnd", grad, weights["output_kernel"])
        grad_v = np.einsum("bnst,bsnd->btnd", probabilities, grad_context)
        (grad_scores,), _ = softmax_backward(np.einsum("bsnd,btnd->bnst", grad_context, v))
        grad_q = scale * np.einsum("bnst,btnd->bsnd", grad_scores, k)
        grad_k = scale * np.einsum("bnst,bsnd->btnd", grad_scores, q)
        grad_query, grads["query_kernel"], grads["query_bias"] = q_backward(grad_q)
        grad_key, grads["key_kernel"], grads["key_bias"] = k_backward(grad_k)
        grad_value, grads["value_kernel"], grads["value_bias"] = v_backward(grad_v)
        return (grad_query, grad_key, grad_value), grads

    return output, backward


def feed_forward(x, weights, hidden_act="gelu"):
    """x [b, s, h] -> [b, s, f] -> [b, s, h] (Vaswani et al., 2017, section 3.3)."""
    mapping = {"kernel": weights["mapping_kernel"], "bias": weights["mapping_bias"]}
    projection = {"kernel": weights["projection_kernel"], "bias": weights["projection_bias"]}
    wide, wide_backward = reference.linear(x, mapping)
    active, active_backward = reference.ACTIVATIONS[hidden_act](wide)
    output, output_backward = reference.linear(active, projection)

    def backward(grad):
        (grad_active,), projection_grads = output_backward(grad)
        (grad_wide,), _ = active_backward(grad_active)
        (grad_x,), mapping_grads = wide_backward(grad_wide)
        return (grad_x,), {
            "mapping_kernel": mapping_grads["kernel"],
            "mapping_bias": mapping_grads["bias"],
            "projection_kernel": projection_grads["kernel"],
            "projection_bias": projection_grads["bias"],
        }

    return output, backward


def encoder_layer(x, weights, mask=None, post_layernorm_residual=False, hidden_act="gelu"):
    """Self-attention, then feed-forward, each with its norm and residual sum."""
    attend = lambda y: _self(attention(y, y, y, weights["attention"], mask))
    transform = lambda y: feed_forward(y, weights["feed_forward"], hidden_act)
    residual = _post_norm if post_layernorm_residual else _pre_norm
    middle, first_backward = residual(x, attend, weights["attention_norm"])
    output, second_backward = residual(middle, transform, weights["feed_forward_norm"])

    def backward(grad):
        (grad,), inner, norm = second_backward(grad)
        grads = {"feed_forward": inner, "feed_forward_norm": norm}
        (grad,), grads["attention"], grads["attention_norm"] = first_backward(grad)
        return (grad,), grads

    return output, backward


def decoder_layer(
    x,
    encoder_output,
    weights,
    decoder_mask=None,
    memory_mask=None,
    post_layernorm_residual=False,
    hidden_act="gelu",
):
    """Self-attention, cross-attention, feed-forward layer."""

    def look(y):
        output, back = attention(
            y, encoder_output, encoder_output, weights["cross_attention"], memory_mask
        )

        def backward(grad):
            (grad_y, grad_key, grad_value), grads = back(grad)
            return (grad_y, grad_key + grad_value), grads

        return output, backward

    attend = lambda y: _self(attention(y, y, y, weights["self_attention"], decoder_mask))
    transform = lambda y: feed_forward(y, weights["feed_forward"], hidden_act)
    residual = _post_norm if post_layernorm_residual else _pre_norm
    first, first_backward = residual(x, attend, weights["self_attention_norm"])
    second, second_backward = residual(first, look, weights["cross_attention_norm"])
    output, third_backward = residual(second, transform, weights["feed_forward_norm"])

    def backward(grad):
        (grad,), inner, norm = third_backward(grad)
        grads = {"feed_forward": inner, "feed_forward_norm": norm}
        (grad, grad_memory), inner, norm = second_backward(grad)
        grads.update(cross_attention=inner, cross_attention_norm=norm)
        (grad,), inner, norm = first_backward(grad)
        grads.update(self_attention=inner, self_attention_norm=norm)
        return (grad, grad_memory), grads

    return output, backward


def encoder(x, weights, mask=None, post_layernorm_residual=False, hidden_act="gelu"):
    """Stack of `weights["blocks"]` and, if present, "final_norm"."""
    backwards = []
    for block in weights["blocks"]:
        x, back = encoder_layer(x, block, mask, post_layernorm_residual, hidden_act)
        backwards.append(back)
    output, norm_backward = _final_norm(x, weights)

    def backward(grad):
        grad, grads = norm_backward(grad)
        for back in reversed(backwards):
            (grad,), block_grads = back(grad)
            grads["blocks"].insert(0, block_grads)
        return (grad,), grads

    return output, backward


def decoder(
    x,
    encoder_output,
    weights,
    decoder_mask=None,
    memory_mask=None,
    post_layernorm_residual=False,
    hidden_act="gelu",
):
    """Stack of blocks that all attend to the same encoder output."""
    backwards = []
    options = (decoder_mask, memory_mask, post_layernorm_residual, hidden_act)
    for block in weights["blocks"]:
        x, back = decoder_layer(x, encoder_output, block, *options)
        backwards.append(back)
    output, norm_backward = _final_norm(x, weights)

    def backward(grad):
        grad, grads = norm_backward(grad)
        grad_memory = np.zeros_like(encoder_output)
        for back in reversed(backwards):
            (grad, part), block_grads = back(grad)
            grad_memory += part
            grads["blocks"].insert(0, block_grads)
        return (grad, grad_memory), grads

    return output, backward


def _heads(x, kernel, bias):
    """x [b, s, h], kernel [h, n, d], bias [n, d] -> [b, s, n, d]."""

    def backward(grad):
        grad_x = np.einsum("bsnd,hnd->bsh", grad, kernel)
        return grad_x, np.einsum("bsh,bsnd->hnd", x, grad), grad.sum((0, 1))

    return np.einsum("bsh,hnd->bsnd", x, kernel) + bias, backward


def _allowed(mask):
    """Convert a mask `[b, t]` or `[b, s or 1, t]` to bool for broadcasting to `[b, n, s, t]`."""
    if mask is None:
        return np.array(True)
    mask = np.asarray(mask) != 0
    return mask[:, None, None, :] if mask.ndim == 2 else mask[:, None, :, :]


def _self(result):
    """Use one input for queries, keys and values, and sum their gradients."""
    output, back = result

    def backward(grad):
        input_grads, grads = back(grad)
        return (sum(input_grads),), grads

    return output, backward


def _pre_norm(x, function, norm):
    """x + function(norm(x)). The backward pass returns gradients of inputs, function and norm."""
    normal, norm_backward = reference.layer_norm(x, norm)
    change, function_backward = function(normal)

    def backward(grad):
        (grad_normal, *others), grads = function_backward(grad)
        (grad_x,), norm_grads = norm_backward(grad_normal)
        return (grad + grad_x, *others), grads, norm_grads

    return x + change, backward


def _post_norm(x, function, norm):
    """norm(x + function(x)), the arrangement of the original Transformer."""
    change, function_backward = function(x)
    output, norm_backward = reference.layer_norm(x + change, norm)

    def backward(grad):
        (grad_sum,), norm_grads = norm_backward(grad)
        (grad_x, *others), grads = function_backward(grad_sum)
        return (grad_sum + grad_x, *others), grads, norm_grads

    return output, backward


def _final_norm(x, weights):
    if "final_norm" not in weights:
        return x, lambda grad: (grad, {"blocks": []})
    output, norm_backward = reference.layer_norm(x, weights["final_norm"])

    def backward(grad):
        (grad_x,), norm_grads = norm_backward(grad)
        return grad_x, {"blocks": [], "final_norm": norm_grads}

    return output, backward
