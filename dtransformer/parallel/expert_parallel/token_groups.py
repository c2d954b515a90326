"""The tokens that share the places of the experts, and what is known of those held elsewhere.

A group is a few tokens of one sequence, which no layout divides. Or it is all tokens of the
global batch: then devices of a mesh, or ranks, tell each other how many tokens each sends to
which expert.

Shapes: b sequences of s tokens; g groups, or parts of one, of n tokens; E experts.
"""

import dataclasses

import tensorflow as tf

from dtransformer.parallel import job, trace
from dtransformer.parallel.axis_rules import activation_specs
from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.impure import never_constant
from dtransformer.parallel.config import MoEConfig
from dtransformer.parallel.dtensor.layouts import axis_size, relayout
from dtransformer.parallel.expert_parallel.checks import needs_the_batch
from dtransformer.parallel.shapes import static_or_dynamic_shape


@dataclasses.dataclass(frozen=True)
class Totals:
    """What is known of whole groups.

    Args:
        load: float32 [g, E] or [1, E], the number of tokens that each expert was chosen for.
        tokens: float32 [g] or [1], the number of tokens, padding not counted.
        positions: the number n of tokens of a group, padding counted: an int or an int32 scalar.
        before: as that of `places`.
        parts: a number: of how many parts like those here the groups are.
    """

    load: tf.Tensor
    tokens: tf.Tensor
    positions: int | tf.Tensor
    before: tf.Tensor | None = None
    parts: float | tf.Tensor = 1.0


class TokenGroups:
    """How the tokens of activations [b, s, ...] lie in groups [g, n, ...].

    Args:
        x: tensor [b, s, ...].
        moe_config: a `MoEConfig`; its `expert_group_size` is that of groups.
    """

    def __init__(self, x: tf.Tensor, moe_config: MoEConfig):
        size = moe_config.expert_group_size
        self._asks_others = needs_the_batch(moe_config)
        self._shape = static_or_dynamic_shape(x)[:2]
        self._axis = None
        if trace.is_on_mesh():
            self._axis = activation_specs(("batch",), x.shape[:1])[0]
        batch, length = self._shape
        self._is_global, self._padding = size is None, 0
        if self._is_global:
            self._num_groups, self.size = axis_size(self._axis), None
        else:
            is_longer = isinstance(length, int) and length <= size
            self.size = length if is_longer else size
            in_sequence = -(-length // self.size)
            self._num_groups = batch * in_sequence
            self._padding = in_sequence * self.size - length

    def split(self, x: tf.Tensor) -> tf.Tensor:
        """[b, s, ...] -> [g, n, ...]; zeros follow a sequence that groups do not divide"""
        if not (isinstance(self._padding, int) and self._padding == 0):
            x = tf.pad(x, [[0, 0], [0, self._padding], *[[0, 0]] * (len(x.shape) - 2)])
        x = tf.reshape(x, [self._num_groups, self.size or -1, *x.shape[2:]])
        return self.relayout(x)

    def join(self, x: tf.Tensor) -> tf.Tensor:
        """[g, n, ...] -> [b, s, ...]"""
        batch, length = self._shape
        x = tf.reshape(x, [batch, length + self._padding, *x.shape[2:]])
        return self.relayout(x[:, :length])

    def relayout(self, x: tf.Tensor) -> tf.Tensor:
        """Lay a tensor of all groups [g, ...], or sequences, out as these are."""
        if not trace.is_on_mesh():
            return x
        return relayout(x, (self._axis, *[None] * (len(x.shape) - 1)))

    @property
    def axis(self) -> str | None:
        """The mesh axis that shards the groups, or None."""
        return self._axis

    def totals(self, chosen: tf.Tensor, is_token: tf.Tensor, name: str) -> Totals:
        """Return what is known of the groups, once every rank that shares them is asked.

        Args:
            chosen: int32 [g, n, E], 1 where the token is to be sent to the expert.
            is_token: int32 [g, n], 0 where there is padding.
            name: of the layer.
        """
        load = tf.reduce_sum(chosen, axis=1)
        tokens = tf.reduce_sum(is_token, axis=1)
        size = static_or_dynamic_shape(chosen)[1]
        if not self._asks_others:
            return Totals(tf.cast(load, "float32"), tf.cast(tokens, "float32"), size)
        if trace.is_on_mesh():
            return self._of_mesh(load, tokens, size)
        if job.data_parallel_group().size == 1:
            return Totals(tf.cast(load, "float32"), tf.cast(tokens, "float32"), size)
        return self._of_ranks(load, tokens, size, name)

    def _of_mesh(self, load, tokens, size):
        load, tokens = relayout(load, (None, None)), relayout(tokens, (None,))
        before = self.relayout(tf.cumsum(load, axis=0, exclusive=True))
        load = tf.reduce_sum(load, axis=0, keepdims=True)
        tokens = tf.reduce_sum(tokens, axis=0, keepdims=True)
        parts = self._num_groups
        return Totals(
            *(tf.cast(x, "float32") for x in (load, tokens)), size * parts, before, float(parts)
        )

    def _of_ranks(self, load, tokens, size, name):
        """All-gather the counts of every replica; each has one part of the group."""
        group, rows = job.data_parallel_group(), self._shape[0]
        own = tf.concat([load[0], tokens, [size, rows]], 0)
        everyone = transport.all_gather(never_constant(own), group, f"{name}/counts")
        *load, tokens, size, all_rows = tf.unstack(everyone, axis=1)
        load = tf.stack(load, axis=1)  # [ranks, E]
        before = tf.reduce_sum(load[: group.index], axis=0, keepdims=True)
        return Totals(
            tf.cast(tf.reduce_sum(load, axis=0, keepdims=True), "float32"),
            tf.cast(tf.reduce_sum(tokens, keepdims=True), "float32"),
            tf.reduce_sum(size),
            before,
            tf.cast(tf.reduce_sum(all_rows), "float32") / tf.cast(rows, "float32"),
        )
