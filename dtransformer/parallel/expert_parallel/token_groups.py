"""Groups of tokens that share the capacity of the experts, and counts from other devices and ranks.

A group is either a few tokens of one sequence, which no layout divides, or all tokens of the global
batch. In the second case, devices of a mesh or ranks exchange the number of tokens for each expert.

Shapes: b sequences of s tokens; g groups, or parts of one, of n tokens; E experts. If sequences are
sharded into full groups, g stands for two dimensions: b, and the groups of a sequence.
"""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.transport import never_constant
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.expert_parallel.checks import needs_the_batch
from dtransformer.parallel.mesh.axis_rules import (
    activation_specs,
    axis_size,
    mesh_axis,
    relayout,
    relayout_with_gradient,
)
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@dataclasses.dataclass(frozen=True)
class Totals:
    """Counts over full groups.

    Args:
        load: float32 tensor `[g, E]` or `[1, E]`. Number of tokens that chose each expert.
        tokens: float32 tensor `[g]` or `[1]`. Number of tokens without padding.
        positions: Integer or scalar tensor. Number n of tokens of a group with padding.
        before: See `places`.
        parts: Float or scalar tensor. Size of the group relative to the local part.
    """

    load: tf.Tensor
    tokens: tf.Tensor
    positions: int | tf.Tensor
    before: tf.Tensor | None = None
    parts: float | tf.Tensor = 1.0


def get_group_axis(length: int, size: int | None) -> str | None:
    """Return the mesh axis that shards the groups of a sequence, or `None`.

    It is `None` if sequences are not sharded, or if groups have tokens from several shards. In that
    case every shard computes the experts of all tokens of its sequences.

    Args:
        length: Integer. Number of positions of a sequence.
        size: Integer. Maximum size of a group. `None` means one group of all tokens.
    """
    axis = mesh_axis("inner_length")
    fits = axis and size and length % (min(size, length) * axis_size(axis)) == 0
    return axis if fits else None


class TokenGroups:
    """Mapping between activations `[b, s, ...]` and groups of tokens `[g, n, ...]`.

    Args:
        x: Tensor `[b, s, ...]`.
        moe_config: `MoEConfig`, whose `expert_group_size` is the maximum size of a group.

    Attributes:
        axes: Tuple with the mesh axis of each dimension of g, or `None`.
    """

    def __init__(self, x: tf.Tensor, moe_config: MoEConfig):
        size = moe_config.expert_group_size
        self._exchanges_counts = needs_the_batch(moe_config)
        self._shape = static_or_dynamic_shape(x)[:2]
        axis = context = None
        if trace.is_on_mesh():
            axis = activation_specs(("batch",), x.shape[:1])[0]
            context = get_group_axis(self._shape[1], size)
        batch, length = self._shape
        self._is_global = size is None
        self._padding = 0
        if self._is_global:
            self._groups = [axis_size(axis)]
            self.size = None
        else:
            is_longer = isinstance(length, int) and length <= size
            self.size = length if is_longer else size
            in_sequence = -(-length // self.size)
            self._groups = [batch, in_sequence] if context else [batch * in_sequence]
            self._padding = in_sequence * self.size - length
        self.axes = (axis, context)[: len(self._groups)]
        self._sequence_axes = axis, context

    def split(self, x: tf.Tensor) -> tf.Tensor:
        """Convert `[b, s, ...]` to groups `[g, n, ...]`, padded with zeros.

        The input must have the layout of `of_sequences`.
        """
        x = self.group_activations(x)
        if not (isinstance(self._padding, int) and self._padding == 0):
            paddings = [[0, 0], [0, self._padding], *[[0, 0]] * (len(x.shape) - 2)]
            x = self.group_activations(tf.pad(x, paddings))
        return self.relayout(tf.reshape(x, [*self._groups, self.size or -1, *x.shape[2:]]))

    def join(self, x: tf.Tensor) -> tf.Tensor:
        """Convert `[g, n, ...]` to `[b, s, ...]` without padding."""
        batch, length = self._shape
        x = self.relayout(x)
        x = tf.reshape(x, [batch, length + self._padding, *x.shape[len(self.axes) + 1 :]])
        return self.group_rows(self.group_rows(x)[:, :length])

    def relayout(self, x: tf.Tensor) -> tf.Tensor:
        """Lay out a tensor of all groups `[g, ...]` over the mesh axes of the groups."""
        return shard_first(x, self.axes)

    def group_rows(self, x: tf.Tensor) -> tf.Tensor:
        """Lay out a tensor `[b, s, ...]` so that `split` needs no communication."""
        return shard_first(x, self._sequence_axes)

    def group_activations(self, x: tf.Tensor) -> tf.Tensor:
        """Lay out a tensor `[b, s, ...]` and its gradient as `of_sequences` does.

        DTensor cannot add several gradients of a tensor if their layout is not specified.
        """
        if not trace.is_on_mesh():
            return x
        return relayout_with_gradient(x, (*self._sequence_axes, *[None] * (len(x.shape) - 2)))

    def totals(self, chosen: tf.Tensor, is_token: tf.Tensor, name: str) -> Totals:
        """Return the counts over the groups, exchanged with all ranks that share them.

        Args:
            chosen: int64 tensor `[g, n, E]`. 1 if the token chose the expert.
            is_token: int64 tensor `[g, n]`. 0 for padding.
            name: Name of the layer.
        """
        load = tf.reduce_sum(chosen, axis=-2)
        tokens = tf.reduce_sum(is_token, axis=-1)
        size = static_or_dynamic_shape(chosen)[-2]
        if not self._exchanges_counts:
            return Totals(tf.cast(load, "float32"), tf.cast(tokens, "float32"), size)
        if trace.is_on_mesh():
            return self._mesh_totals(load, tokens, size)
        if job.data_parallel_group().size == 1:
            return Totals(tf.cast(load, "float32"), tf.cast(tokens, "float32"), size)
        return self._rank_totals(load, tokens, size, name)

    def _mesh_totals(self, load, tokens, size):
        load = relayout(load, (None, None))
        tokens = relayout(tokens, (None,))
        before = self.relayout(tf.cumsum(load, axis=0, exclusive=True))
        load = tf.reduce_sum(load, axis=0, keepdims=True)
        tokens = tf.reduce_sum(tokens, axis=0, keepdims=True)
        (parts,) = self._groups
        return Totals(
            *(tf.cast(x, "float32") for x in (load, tokens)), size * parts, before, float(parts)
        )

    def _rank_totals(self, load, tokens, size, name):
        """All-gather the counts of all replicas. Each replica has one part of the group."""
        group = job.data_parallel_group()
        rows = self._shape[0]
        counts = tf.concat([load[0], tokens, tf.cast([size, rows], load.dtype)], 0)
        gathered = transport.all_gather(never_constant(counts), group, f"{name}/counts")
        *load, tokens, size, all_rows = tf.unstack(gathered, axis=1)
        load = tf.stack(load, axis=1)  # [ranks, E]
        before = tf.reduce_sum(load[: group.index], axis=0, keepdims=True)
        return Totals(
            tf.cast(tf.reduce_sum(load, axis=0, keepdims=True), "float32"),
            tf.cast(tf.reduce_sum(tokens, keepdims=True), "float32"),
            tf.reduce_sum(size),
            before,
            tf.cast(tf.reduce_sum(all_rows), "float32") / tf.cast(rows, "float32"),
        )


def shard_first(x: tf.Tensor, axes: Sequence[str | None]) -> tf.Tensor:
    """Shard the first dimensions of a tensor over mesh axes. Does nothing without a mesh.

    Args:
        x: Tensor.
        axes: Sequence with the mesh axis of each first dimension, or `None`.
    """
    return relayout(x, (*axes, *[None] * (len(x.shape) - len(axes)))) if trace.is_on_mesh() else x
