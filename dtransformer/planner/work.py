"""Computation time of blocks and the head on one device, without communication.

A product takes its operations divided by the speed that its sizes reach. Other operations
take the bytes that they read and write, divided by the memory bandwidth.
"""

import functools
import typing

import numpy as np

from dtransformer.planner.clusters import Device
from dtransformer.planner.layouts import Layouts
from dtransformer.planner.shape import BlockKind, ModelShape

# Items read and written per element in a forward pass, counted by operation. A backward pass
# counts twice. Stream: two norms (2 · 2), and twice bias, dropout and residual (2 · 3, plus a mask
# of half an item each). Inner features: the activation. Scores: product, fused softmax with scale
# and mask, dropout.
STREAM_ITEMS = 11
INNER_ITEMS = 2
HEAD_ITEMS = 4  # Queries, keys, values and context are transposed by heads.
SCORE_ITEMS = 4.5
# Fused attention computes two products in its forward pass and five in its backward pass.
FUSED_PRODUCTS = 2 + 5
MAX_FUSED_HEAD_DIM = 128
STATE_PASSES = 2.5  # Every weight, gradient and state is read, and most are written.


class Passes(typing.NamedTuple):
    """Seconds of a block per micro-batch. Every field is an array [N].

    Args:
        forward, backward: Forward and backward pass.
        repeated: Recomputation for the backward pass.
    """

    forward: np.ndarray
    backward: np.ndarray
    repeated: np.ndarray

    @property
    def total(self):
        """Sum of the passes."""
        return sum(self)


def product_seconds(
    device: Device, rows, inputs, outputs, times=1.0, is_16_bit=True, half_features=None
):
    """Return the seconds of `times` products [rows, inputs] × [inputs, outputs].

    Args:
        device: A `Device`.
        rows, inputs, outputs: Sizes of the product, numbers or arrays.
        times: Number of products.
        is_16_bit: Boolean, whether the product uses 16-bit numbers.
        half_features: Number of features that halves the speed. Defaults to the device's value.
    """
    constants = device.constants
    peak = (device.tflops_16_bit if is_16_bit else device.tflops_32_bit) * 1e12
    half = constants.half_features if half_features is None else half_features
    slowdown = (1 + constants.half_rows / rows) * (1 + half / inputs) * (1 + half / outputs)
    return 2.0 * rows * inputs * outputs * times * slowdown / (peak * constants.product_share)


def memory_seconds(device: Device, num_bytes):
    """Return the seconds that a device takes to read or write `num_bytes` bytes."""
    return num_bytes / (device.memory_gb_per_second * 1e9 * device.constants.memory_share)


def block_passes(
    device: Device,
    model: ModelShape,
    kind: BlockKind,
    layouts: Layouts,
    is_16_bit=True,
    is_fused=False,
) -> Passes:
    """Return the seconds of one block's passes for a micro-batch.

    Args:
        device: A `Device`.
        model: A `ModelShape`.
        kind: `BlockKind` of the block.
        layouts: The `Layouts`.
        is_16_bit: Boolean, whether products use 16-bit numbers.
        is_fused: Boolean or array [N], whether fused kernels compute attention if they can.
    """
    t = layouts.model
    item = 2 if is_16_bit else 4
    h = model.config.hidden_size
    d = model.head_dim
    length = kind.length / layouts.context
    rows = layouts.micro_batch * length
    product = functools.partial(product_seconds, device, is_16_bit=is_16_bit)
    half_head = device.constants.half_head_features
    score_product = functools.partial(product, half_features=half_head)
    products = 0.0
    core = 0.0
    scores = 0.0
    computed_scores = 0.0
    for i, attended_length in enumerate(kind.attended):
        queries = model.config.num_heads * d / t
        shared = 2 * model.num_kv_heads * d / t
        if model.latent is not None:
            for name, (x, y) in model.attention_kernels().items():
                products += product(rows, x, y / (1 if name in model.latent.DOWN else t))
        elif i == 0:
            products += product(rows, h, queries + shared) + product(rows, queries, h)
        else:  # Cross-attention reads keys and values from the source.
            source_rows = layouts.micro_batch * attended_length / layouts.context
            products += 2 * product(rows, h, queries) + product(source_rows, h, shared)
        heads = layouts.micro_batch * model.config.num_heads / t
        core += score_product(length, d, attended_length, heads)
        core += score_product(length, attended_length, d, heads)
        scores += heads * length * attended_length
        # Fused attention skips masked scores.
        is_causal = kind.is_causal and i == 0
        computed_scores += heads * length * attended_length / (1 + is_causal)
    inner = _feed_forward_rows(model, kind, layouts)
    for each_rows, features, times in inner:
        products += product(each_rows, h, (2 if model.gated else 1) * features / t, times)
        products += product(each_rows, features / t, h, times)
    sharded = np.where(layouts.sequence > 0, t, 1)
    moved = (len(kind.attended) + 1) / 2 * rows * h * STREAM_ITEMS / sharded
    computed = sum(each_rows * features * times for each_rows, features, times in inner)
    moved += INNER_ITEMS * computed * (2 if model.gated else 1) / t
    moved += rows * HEAD_ITEMS * len(kind.attended) * model.config.num_heads * d / t
    core += memory_seconds(device, scores * SCORE_ITEMS * item)
    attention_flops = device.tflops_16_bit * 1e12 * device.constants.attention_share
    if is_16_bit and attention_flops and d <= MAX_FUSED_HEAD_DIM:
        # Passes count a third of the time as the forward pass.
        fused = computed_scores * d * 2 * FUSED_PRODUCTS / 3 / attention_flops
        core = np.where(is_fused, fused, core)
    start = device.constants.pass_overhead_us * 1e-6
    forward = products + core + memory_seconds(device, moved * item)
    adapter_seconds = 0.0
    for inputs, outputs, _ in model.get_block_adapters(kind):
        adapter_seconds += product(rows, inputs, model.adapter_rank)
        adapter_seconds += product(rows, model.adapter_rank, outputs / t)
    if kind.is_frozen:
        return Passes(forward + start, 0 * forward, 0 * forward)
    repeated = np.choose(layouts.recompute, [0 * forward, core, forward + adapter_seconds + start])
    # A frozen kernel has no gradient.
    backward = 2 * (forward + adapter_seconds + start) - (0 if model.trains(kind) else products)
    return Passes(forward + adapter_seconds + start, backward, repeated)


def _feed_forward_rows(model, kind, layouts):
    """Return a list of `(rows, inner_features, count)` tuples: a block's feed-forward layers."""
    rows = layouts.micro_batch * kind.length / layouts.context
    if not kind.has_experts:
        return [(rows, model.inner_size(kind), 1.0)]
    local_experts = model.experts.expert_num / layouts.expert
    routed = rows * model.routed_rows(layouts.shards_experts)
    layers = [(routed / local_experts, model.inner_size(kind), local_experts)]
    if model.experts.shared_experts:
        layers.append((rows, model.experts.shared_experts * model.inner_size(kind), 1.0))
    return layers


def head_seconds(device: Device, model: ModelShape, layouts: Layouts, is_16_bit=True, items=10):
    """Return the seconds of the head and the loss per micro-batch, forward and backward.

    Args:
        device: A `Device`.
        model: A `ModelShape`.
        layouts: The `Layouts`.
        is_16_bit: Boolean, whether products use 16-bit numbers.
        items: Items that the head and the loss read and write per logit.
    """
    rows = layouts.micro_batch * model.num_predictions / layouts.context
    entries = model.config.vocab_size / layouts.model
    passes = 2 if model.adapter_rank else 3
    if model.is_frozen:
        passes = 1
    products = passes * product_seconds(
        device, rows, model.config.hidden_size, entries, 1.0, is_16_bit
    )
    return products + memory_seconds(device, rows * entries * items * (2 if is_16_bit else 4))


def update_seconds(device: Device, state_bytes):
    """Return the seconds of the optimizer update.

    The update streams over long vectors, so it reaches the full memory bandwidth.

    Args:
        device: A `Device`.
        state_bytes: Bytes of weights, gradients and states that the rank updates.
    """
    return STATE_PASSES * state_bytes / (device.memory_gb_per_second * 1e9)
