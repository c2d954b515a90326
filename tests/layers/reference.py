"""Small parts of the layers in NumPy float64, with hand-derived gradients.

Written from spec/layers.md, independent of TensorFlow and dtransformer, so that a mistake in a
layer is not repeated here. tests/layers/test_reference.py compares every gradient with numeric
differentiation.

Every function returns an `(output, backward)` tuple. `backward(output gradient)` returns the input
gradients as a tuple and the weight gradients as a dictionary with the keys and shapes of `weights`.

Letters in shapes: b batch, s queries, t keys, h hidden, n heads, d head size, f inner size, V
classes.
"""

import math

import numpy as np

_erf = np.vectorize(math.erf, otypes=[np.float64])


def linear(x, weights):
    """x [..., i], kernel [i, o], bias [o] or none -> [..., o]."""
    kernel = weights["kernel"]
    output = x @ kernel
    if "bias" in weights:
        output = output + weights["bias"]

    def backward(grad):
        grads = {"kernel": np.einsum("ni,no->io", _rows(x), _rows(grad))}
        if "bias" in weights:
            grads["bias"] = _rows(grad).sum(0)
        return (grad @ kernel.T,), grads

    return output, backward


def gelu(x):
    """x * Phi(x) with Phi the normal distribution (Hendrycks and Gimpel, 2016)."""
    phi = 0.5 * (1.0 + _erf(x / math.sqrt(2.0)))

    def backward(grad):
        density = np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return (grad * (phi + x * density),), {}

    return x * phi, backward


def relu(x):
    return np.maximum(x, 0.0), lambda grad: ((grad * (x > 0.0),), {})


ACTIVATIONS = {"gelu": gelu, "relu": relu}


def layer_norm(x, weights, epsilon=1e-5):
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta (Ba et al., 2016)."""
    centred = x - x.mean(-1, keepdims=True)
    inverse = 1.0 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    normal = centred * inverse

    def backward(grad):
        inner = grad * weights["gamma"]
        along = normal * (inner * normal).mean(-1, keepdims=True)
        grad_x = inverse * (inner - inner.mean(-1, keepdims=True) - along)
        grads = {"gamma": _rows(grad * normal).sum(0), "beta": _rows(grad).sum(0)}
        return (grad_x,), grads

    return normal * weights["gamma"] + weights["beta"], backward


def rms_norm(x, weights, epsilon=1e-6):
    """x / sqrt(mean(x^2) + epsilon) * gamma (Zhang and Sennrich, 2019)."""
    inverse = 1.0 / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    normal = x * inverse

    def backward(grad):
        inner = grad * weights["gamma"]
        grad_x = inverse * (inner - normal * (inner * normal).mean(-1, keepdims=True))
        return (grad_x,), {"gamma": _rows(grad * normal).sum(0)}

    return normal * weights["gamma"], backward


def masked_softmax(scores, allowed):
    """Softmax over the allowed elements of the last dimension. All others are 0.

    `allowed` is broadcast to `scores`. A row without allowed elements is 0.
    """
    allowed = np.broadcast_to(allowed, scores.shape)
    top = np.max(scores, axis=-1, keepdims=True, where=allowed, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    powers = np.where(allowed, np.exp(np.where(allowed, scores, top) - top), 0.0)
    total = powers.sum(-1, keepdims=True)
    probabilities = powers / np.where(total > 0.0, total, 1.0)

    def backward(grad):
        mean = (grad * probabilities).sum(-1, keepdims=True)
        return (probabilities * (grad - mean),), {}

    return probabilities, backward


def embedding(ids, weights):
    """ids [...] integer, table [V, h] -> [..., h]. The ids have no gradient."""
    table = weights["table"]

    def backward(grad):
        grad_table = np.zeros_like(table)
        np.add.at(grad_table, ids.reshape(-1), _rows(grad))
        return (), {"table": grad_table}

    return table[ids], backward


def causal_mask(padding):
    """padding [b, s] of 0/1 -> [b, s, s]: m * m^T, lower-triangular."""
    padding = np.asarray(padding)
    size = padding.shape[1]
    return padding[:, :, None] * padding[:, None, :] * np.tri(size, dtype=padding.dtype)


def cross_entropy(
    logits, labels, mask=None, label_smoothing=0.0, ignore_id=None, vocab_size=None, z_loss=0.0
):
    """Mean smoothed negative log-likelihood of the weighted tokens.

    Logits are `[..., W]`, labels `[...]`. Only the first V = `vocab_size` columns are classes.
    Smoothing (Szegedy et al., 2016): (1 − e) · nll + e · mean over V of −log p. The z-loss
    (Chowdhery et al., 2022) adds its factor times the square of logsumexp.
    """
    classes = vocab_size or logits.shape[-1]
    counted = np.ones(labels.shape) if mask is None else np.asarray(mask, np.float64)
    if ignore_id is not None:
        counted = counted * (labels != ignore_id)
    total = counted.sum()
    share = counted / total if total > 0.0 else np.zeros(labels.shape)

    true = logits[..., :classes]
    shifted = true - true.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    # An ignored label may be outside of the classes (-100). Its one-hot row is 0.
    one_hot = (labels[..., None] == np.arange(classes)).astype(np.float64)
    target = (1.0 - label_smoothing) * one_hot + label_smoothing / classes
    normalizer = (true - log_p)[..., :1]  # logsumexp
    loss = -(share[..., None] * target * log_p).sum()
    loss += z_loss * (share[..., None] * normalizer**2).sum()

    def backward(grad):
        grad_logits, p = np.zeros_like(logits), np.exp(log_p)
        each = p - target + 2 * z_loss * normalizer * p
        grad_logits[..., :classes] = grad * share[..., None] * each
        return (grad_logits,), {}

    return loss, backward


def _rows(x):
    return x.reshape(-1, x.shape[-1])
