"""Dispatch of tokens to experts. On one device, tokens are sorted by expert without padding.

Shapes: N tokens of h features; k choices per token; M choices accepted by experts, of which mᵢ
belong to expert i; E experts.
"""

import contextlib
from collections.abc import Callable

import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.expert_parallel.buffers import Buffers
from dtransformer.parallel.expert_parallel.capacity_slots import Places
from dtransformer.parallel.expert_parallel.token_groups import TokenGroups
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.tracing import trace


def _no_xla_clusters():
    """Exclude operations in the `with` block from XLA clusters.

    Their shapes depend on values.
    """
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.xla.experimental.jit_scope(compile_ops=False)


class SortedTokens:
    """Dispatch of tokens to experts by sorting, and combination of the experts' outputs.

    Args:
        taken: `Places` of the tokens.
        choices: int64 tensor `[g, n, k]`. Experts chosen for each token.
    """

    def __init__(self, slots: Places, choices: tf.Tensor):
        num_experts = slots.accepted.shape[-1]
        self._num_choices = choices.shape[-1]
        is_taken = tf.reshape(slots.accepted, [-1, num_experts])  # [N, E]
        self._sizes = tf.reduce_sum(is_taken, axis=0)
        total = tf.reduce_sum(self._sizes)
        first = tf.cumsum(self._sizes, exclusive=True)
        row = first + tf.cumsum(is_taken, axis=0, exclusive=True)
        # Dropped choices point to the row after the last one.
        row = tf.where(is_taken > 0, row, total)
        choices = tf.reshape(choices, [-1, self._num_choices])
        # Row of each choice [N, k], and conversely the choice of each row [M].
        self._rows = tf.gather(row, choices, batch_dims=1)
        flat = tf.reshape(self._rows, [-1, 1])
        indices = tf.range(tf.shape(flat, INDEX_TYPE)[0])
        with _no_xla_clusters():
            self._choices = tf.scatter_nd(flat, indices, [total + 1])[:total]

    def send(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Return the tokens `[mᵢ, h]` of each expert from all tokens `[g, n, h]`."""
        shape = tf.shape(x)
        num_experts = self._sizes.shape[0]

        @custom_gradient
        def send(x):
            tokens = tf.reshape(x, [-1, x.shape[-1]])
            sent = tf.gather(tokens, self._choices // self._num_choices)

            def gradient(*expert_gradients):
                gradients = self._gather_choices(tf.concat(expert_gradients, 0))
                return tf.reshape(tf.reduce_sum(gradients, axis=1), shape)

            with _no_xla_clusters():
                return tf.split(sent, self._sizes, num=num_experts), gradient

        return send(x)

    def take_back(self, outputs: list[tf.Tensor], gates: tf.Tensor) -> tf.Tensor:
        """Return Σ gate · output of each token, `[g, n, h]`.

        Args:
            outputs: List of the outputs `[mᵢ, h]` of each expert.
            gates: Tensor `[g, n, k]`.
        """

        @custom_gradient
        def gather_choices(y):
            def gradient(dy):
                return tf.gather(tf.reshape(dy, [-1, dy.shape[-1]]), self._choices)

            return self._gather_choices(y), gradient

        shape = tf.shape(gates)
        y = gather_choices(tf.concat(outputs, 0))
        gates = tf.cast(tf.reshape(gates, [-1, 1, self._num_choices]), y.dtype)
        return tf.reshape(tf.matmul(gates, y), [shape[0], shape[1], y.shape[-1]])

    def _gather_choices(self, rows):
        """Reorder rows `[M, h]` to choices `[N, k, h]`, with 0 for dropped choices."""
        return tf.gather(tf.pad(rows, [[0, 1], [0, 0]]), self._rows)

    def column_parallel(self, xs: list, kernel: tf.Tensor) -> list[tf.Tensor]:
        """Multiply the tokens `[mᵢ, h]` of each expert with its part of the kernel `[E, h, f]`."""
        kernels = tf.unstack(tf.cast(kernel, xs[0].dtype))
        return [tf.matmul(x, kernel) for x, kernel in zip(xs, kernels)]

    # Nothing is sharded on one device.
    row_parallel = column_parallel

    def add_bias(self, xs: list, bias: tf.Tensor) -> list[tf.Tensor]:
        """Add each expert's part of the bias `[E, f]`."""
        biases = tf.unstack(tf.cast(bias, xs[0].dtype))
        return [tf.nn.bias_add(x, bias) for x, bias in zip(xs, biases)]


def apply_experts(
    feed_forward: Callable,
    x: tf.Tensor,
    slots: Places,
    choices: tf.Tensor,
    gates: tf.Tensor,
    groups: TokenGroups,
    max_tokens: int | tf.Tensor | None,
) -> tf.Tensor:
    """Return Σ gate · expert(x) of each token.

    Args:
        feed_forward: Function of `(products, tokens)`, where `tokens` is a list of tensors. It
            returns a list of the same form. The methods `column_parallel`, `row_parallel` and
            `add_bias` of `products` compute for each expert.
        x: Tensor `[g, n, h]`.
        slots: `Places` of the tokens.
        choices: int64 tensor `[g, n, k]`.
        gates: float32 tensor `[g, n, k]`.
        groups: `TokenGroups`.
        max_tokens: Capacity of an expert per group. `None` means unlimited.

    Returns:
        A tensor `[g, n, h]`.
    """
    # XLA needs static shapes. With unlimited capacity, excluding operations from its clusters is
    # cheaper than padding every expert to all tokens.
    in_clusters = max_tokens is not None and tf.config.optimizer.get_jit()
    if trace.is_on_mesh() or _compat.is_compiled_by_xla() or in_clusters:
        experts = Buffers(slots, choices, groups, max_tokens)
    else:
        experts = SortedTokens(slots, choices)
    return experts.take_back(feed_forward(experts, experts.send(x)), gates)
