"""Buffers of experts on a mesh or with XLA, each with the size of the expert's capacity per group.

The buffers `[g, E, c, h]` are on the devices of the groups. If experts are sharded, one all-to-all
sends each buffer to the devices of its expert, and another returns the outputs (Lepikhin et al.,
2020, GShard, arXiv 2006.16668, §3). Both directions and their gradients are lookups by planned
indices. Nothing is scattered, because DTensor has no rule for scatter.

Shapes: g groups of n tokens of h features; k choices per token; E experts; c slots of an expert for
tokens of a group; f inner features of experts. g may stand for two dimensions: see `TokenGroups`.
"""

import tensorflow as tf

from dtransformer.parallel.expert_parallel.capacity_slots import Places
from dtransformer.parallel.expert_parallel.token_groups import TokenGroups, shard_first
from dtransformer.parallel.mesh.axis_rules import mesh_axis
from dtransformer.parallel.ops.custom_gradient import custom_gradient
from dtransformer.parallel.ops.gpu_calls import INDEX_TYPE
from dtransformer.parallel.recompute.recompute import keep_for_recompute
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


class Buffers:
    """Dispatch of tokens to experts with buffers, and combination of the experts' outputs.

    Args:
        taken: `Places` of the tokens.
        choices: int64 tensor `[g, n, k]`. Experts chosen for each token.
        groups: `TokenGroups`.
        most: Capacity of an expert per group. `None` means unlimited.
    """

    def __init__(
        self, slots: Places, choices: tf.Tensor, groups: TokenGroups, max_tokens: int | None
    ):
        self._groups = groups
        self._relayout = groups.relayout
        *group_shape, size, self._num_choices = static_or_dynamic_shape(choices)
        num_experts = slots.accepted.shape[-1]
        is_static = isinstance(max_tokens, int) and isinstance(size, int)
        num_slots = (
            size if max_tokens is None else (min if is_static else tf.minimum)(max_tokens, size)
        )
        self._shape = [*group_shape, num_experts, num_slots]
        self._expert_axis = mesh_axis("expert")
        self._model_axis = mesh_axis("mlp")
        # Buffers are sharded by group, and the buffers of experts by expert, over the same mesh
        # axis. The axis moves from the first dimension, because DTensor's all-to-all between others
        # is wrong.
        axis, *context = groups.axes
        self._expert_axes = (
            None if self._expert_axis else axis,
            *context,
            self._expert_axis,
            None,
            None,
        )
        total_slots = num_experts * num_slots
        total_choices = size * self._num_choices
        slot = _index(num_slots) * _index(tf.range(num_experts)) + slots.position
        # Dropped tokens get the index after the last slot.
        slot = tf.where(slots.accepted > 0, slot, _index(total_slots))
        is_choice = tf.one_hot(choices, num_experts, dtype=INDEX_TYPE)  # [g, n, k, E]
        # Slot of each choice [g, n·k], and conversely the choice of each slot [g, E·c].
        slot = tf.reduce_sum(is_choice * slot[..., None, :], axis=-1)
        self._places = self._relayout(tf.reshape(slot, [*group_shape, total_choices]))
        # The first tokens get the greatest numbers, and tokens that are not accepted get 0.
        choice_index = _index(tf.range(self._num_choices))[:, None]
        choice_index = tf.reduce_sum(is_choice * choice_index, axis=-2)  # [g, n, E]
        first_choice = _index(tf.range(size))[:, None] * self._num_choices
        priority = _index(total_choices) - (first_choice + choice_index)
        priority = self._relayout(tf.linalg.matrix_transpose(priority * slots.accepted))
        priority = tf.reshape(
            tf.math.top_k(priority, num_slots).values, [*group_shape, total_slots]
        )
        self._choices = self._relayout(_index(total_choices) - priority)

    def send(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Return a list of one tensor, the buffers of all experts, from the tokens `[g, n, h]`."""
        shape = static_or_dynamic_shape(x)

        @custom_gradient
        def send(x):
            tokens = self._choices // self._num_choices  # Empty slots have the index n.
            sent = self._look_up(x, tokens)

            def gradient(dy):
                gradients = self._look_up(self._flat(self._relayout(dy)), self._places)
                gradients = tf.reshape(gradients, [*shape[:-1], self._num_choices, shape[-1]])
                return self._relayout(tf.reduce_sum(self._relayout(gradients), axis=-2))

            sent = self._relayout(tf.reshape(sent, [*self._shape, shape[-1]]))
            return shard_first(sent, self._expert_axes), gradient

        return [send(self._relayout(x))]

    def take_back(self, outputs: list[tf.Tensor], gates: tf.Tensor) -> tf.Tensor:
        """Return Σ gate · output of each token, `[g, n, h]`.

        Args:
            outputs: List of one tensor, the buffers of all experts.
            gates: Tensor `[g, n, k]`.
        """

        @custom_gradient
        def gather_choices(y):
            y = self._relayout(y)

            def gradient(dy):
                dy = self._flat(self._relayout(dy))
                dy = tf.reshape(self._look_up(dy, self._choices), [*self._shape, dy.shape[-1]])
                return shard_first(self._relayout(dy), self._expert_axes)

            gathered = self._look_up(self._flat(y), self._places)
            gathered = tf.reshape(gathered, [*static_or_dynamic_shape(gates), y.shape[-1]])
            return self._relayout(gathered), gradient

        y = gather_choices(outputs[0])
        gates = self._relayout(tf.cast(gates, y.dtype))
        return self._relayout(tf.reduce_sum(gates[..., None] * y, axis=-2))

    def _flat(self, buffers):
        """Reshape `[g, E, c, h]` to `[g, E·c, h]`."""
        return self._relayout(tf.reshape(buffers, [*self._shape[:-2], -1, buffers.shape[-1]]))

    def _look_up(self, rows, indices):
        """Gather rows of `[g, r, h]` by indices `[g, m]`, with zeros for index r."""
        rank = len(self._groups.axes)
        rows = self._relayout(tf.pad(rows, [*[[0, 0]] * rank, [0, 1], [0, 0]]))
        return self._relayout(tf.gather(rows, indices, axis=rank, batch_dims=rank))

    def column_parallel(self, xs: list, kernel: tf.Tensor) -> list[tf.Tensor]:
        """Multiply buffers `[g, E, c, h]` with kernels `[E, h, f]`, sharded along f."""
        inner = (*self._expert_axes[:-1], self._model_axis)
        return [self._product(xs[0], kernel, inner, (self._expert_axis, None, self._model_axis))]

    def row_parallel(self, xs: list, kernel: tf.Tensor) -> list[tf.Tensor]:
        """Multiply buffers `[g, E, c, f]` with kernels `[E, f, h]`, sharded along f."""
        kernel_axes = (self._expert_axis, self._model_axis, None)

        def product():
            return self._product(xs[0], kernel, self._expert_axes, kernel_axes)

        return [keep_for_recompute(product)]

    def _product(self, x, kernel, result_axes, kernel_axes):
        input_axes = (*self._expert_axes[:-1], kernel_axes[1])
        g = "gs"[: len(self._groups.axes)]

        @custom_gradient
        def product(x, kernel):
            x = shard_first(x, input_axes)
            kernel = shard_first(kernel, kernel_axes)

            def gradient(dy):
                dy = shard_first(dy, result_axes)
                dx = tf.einsum(f"{g}ecf,ehf->{g}ech", dy, kernel)
                dk = tf.einsum(f"{g}ech,{g}ecf->ehf", x, dy)
                return shard_first(dx, input_axes), shard_first(dk, kernel_axes)

            return shard_first(tf.einsum(f"{g}ech,ehf->{g}ecf", x, kernel), result_axes), gradient

        return product(x, tf.cast(kernel, x.dtype))

    def add_bias(self, xs: list, bias: tf.Tensor) -> list[tf.Tensor]:
        """Add each expert's part of the bias `[E, f]`."""
        return [xs[0] + tf.cast(bias, xs[0].dtype)[:, None, :]]


def _index(values):
    return tf.cast(values, INDEX_TYPE)
