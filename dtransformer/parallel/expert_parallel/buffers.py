"""Experts on a mesh, or under XLA: each has a buffer of as many tokens as it takes of a group.

The buffers [g, E, c, h] lie where the groups are. Where experts are sharded, an all-to-all
sends each expert's to the devices that hold it, and another one takes the outputs back
(Lepikhin et al., 2020, GShard, arXiv 2006.16668, §3). Each way is a look-up by a plan of
numbers, and so are their gradients: nothing is scattered, which DTensor has no rule for.

Shapes: g groups of n tokens of h features; k choices of each; E experts; c places of an expert
for tokens of a group; f features inside of experts. g may be two dimensions: see `TokenGroups`.
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
    """Sends tokens to experts and takes their outputs back.

    Args:
        taken: the `Places` of the tokens.
        choices: int64 [g, n, k], the experts chosen for each token.
        groups: the `TokenGroups`.
        most: number of tokens that an expert takes of a group; None for all.
    """

    def __init__(self, taken: Places, choices: tf.Tensor, groups: TokenGroups, most: int | None):
        self._groups, self._of_groups = groups, groups.relayout
        *of_groups, size, self._num_choices = static_or_dynamic_shape(choices)
        num_experts = taken.taken.shape[-1]
        is_known = isinstance(most, int) and isinstance(size, int)
        places = size if most is None else (min if is_known else tf.minimum)(most, size)
        self._shape = [*of_groups, num_experts, places]
        self._experts, self._model = mesh_axis("expert"), mesh_axis("mlp")
        # Of one mesh axis: the buffers are sharded by groups, and those of experts by experts.
        # It moves from the first dimension: DTensor's all-to-all between others gives wrong numbers.
        axis, *context = groups.axes
        self._of_experts = (None if self._experts else axis, *context, self._experts, None, None)
        all_places, all_choices = num_experts * places, size * self._num_choices
        place = _index(places) * _index(tf.range(num_experts)) + taken.position
        # Of those that are dropped: the last.
        place = tf.where(taken.taken > 0, place, _index(all_places))
        is_choice = tf.one_hot(choices, num_experts, dtype=INDEX_TYPE)  # [g, n, k, E]
        # Place of each choice [g, n·k], and the other way around: choice of each place [g, E·c].
        place = tf.reduce_sum(is_choice * place[..., None, :], axis=-1)
        self._places = self._of_groups(tf.reshape(place, [*of_groups, all_choices]))
        # The first tokens have the greatest numbers, and what is not taken has 0.
        which = _index(tf.range(self._num_choices))[:, None]
        which = tf.reduce_sum(is_choice * which, axis=-2)  # [g, n, E]
        first = _index(tf.range(size))[:, None] * self._num_choices
        number = _index(all_choices) - (first + which)
        number = self._of_groups(tf.linalg.matrix_transpose(number * taken.taken))
        number = tf.reshape(tf.math.top_k(number, places).values, [*of_groups, all_places])
        self._choices = self._of_groups(_index(all_choices) - number)

    def send(self, x: tf.Tensor) -> list[tf.Tensor]:
        """Return the buffers of all experts, from the tokens [g, n, h], as a list of one tensor."""
        shape = static_or_dynamic_shape(x)

        @custom_gradient
        def send(x):
            tokens = self._choices // self._num_choices  # n where there is none
            sent = self._look_up(x, tokens)

            def gradient(dy):
                back = self._look_up(self._flat(self._of_groups(dy)), self._places)
                back = tf.reshape(back, [*shape[:-1], self._num_choices, shape[-1]])
                return self._of_groups(tf.reduce_sum(self._of_groups(back), axis=-2))

            sent = self._of_groups(tf.reshape(sent, [*self._shape, shape[-1]]))
            return shard_first(sent, self._of_experts), gradient

        return [send(self._of_groups(x))]

    def take_back(self, outputs: list[tf.Tensor], gates: tf.Tensor) -> tf.Tensor:
        """Return Σ gate · output of each token, [g, n, h].

        Args:
            outputs: list of the buffers of all experts, one tensor.
            gates: [g, n, k].
        """

        @custom_gradient
        def of_choices(y):
            y = self._of_groups(y)

            def gradient(dy):
                dy = self._flat(self._of_groups(dy))
                dy = tf.reshape(self._look_up(dy, self._choices), [*self._shape, dy.shape[-1]])
                return shard_first(self._of_groups(dy), self._of_experts)

            found = self._look_up(self._flat(y), self._places)
            found = tf.reshape(found, [*static_or_dynamic_shape(gates), y.shape[-1]])
            return self._of_groups(found), gradient

        y = of_choices(outputs[0])
        gates = self._of_groups(tf.cast(gates, y.dtype))
        return self._of_groups(tf.reduce_sum(gates[..., None] * y, axis=-2))

    def _flat(self, buffers):
        """[g, E, c, h] -> [g, E·c, h]"""
        return self._of_groups(tf.reshape(buffers, [*self._shape[:-2], -1, buffers.shape[-1]]))

    def _look_up(self, rows, numbers):
        """Return rows [g, r, h] by their numbers [g, m]; 0 for that of r: [g, m, h]."""
        rank = len(self._groups.axes)
        rows = self._of_groups(tf.pad(rows, [*[[0, 0]] * rank, [0, 1], [0, 0]]))
        return self._of_groups(tf.gather(rows, numbers, axis=rank, batch_dims=rank))

    def column_parallel(self, xs: list, kernel: tf.Tensor) -> list[tf.Tensor]:
        """Multiply buffers [g, E, c, h] with kernels [E, h, f], sharded along f."""
        inner = (*self._of_experts[:-1], self._model)
        return [self._product(xs[0], kernel, inner, (self._experts, None, self._model))]

    def row_parallel(self, xs: list, kernel: tf.Tensor) -> list[tf.Tensor]:
        """Multiply buffers [g, E, c, f] with kernels [E, f, h], sharded along f."""
        of_kernel = (self._experts, self._model, None)
        product = lambda: self._product(xs[0], kernel, self._of_experts, of_kernel)
        return [keep_for_recompute(product)]

    def _product(self, x, kernel, of_result, of_kernel):
        of_inputs = (*self._of_experts[:-1], of_kernel[1])
        g = "gs"[: len(self._groups.axes)]

        @custom_gradient
        def product(x, kernel):
            x, kernel = shard_first(x, of_inputs), shard_first(kernel, of_kernel)

            def gradient(dy):
                dy = shard_first(dy, of_result)
                dx = tf.einsum(f"{g}ecf,ehf->{g}ech", dy, kernel)
                dk = tf.einsum(f"{g}ech,{g}ecf->ehf", x, dy)
                return shard_first(dx, of_inputs), shard_first(dk, of_kernel)

            return shard_first(tf.einsum(f"{g}ech,ehf->{g}ecf", x, kernel), of_result), gradient

        return product(x, tf.cast(kernel, x.dtype))

    def add_bias(self, xs: list, bias: tf.Tensor) -> list[tf.Tensor]:
        """Add the bias of each expert, of all [E, f]."""
        return [xs[0] + tf.cast(bias, xs[0].dtype)[:, None, :]]


def _index(numbers):
    return tf.cast(numbers, INDEX_TYPE)
