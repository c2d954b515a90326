"""Exchange of sequence shards for attention, by relayouts on the mesh.

Between attention layers, tensors `[b, n, s, d]` are sharded along s over the context axis. This
module reshapes them to `[c, b, n, s/c, d]`, with one of c shards per device. An all-to-all is a
relayout from one dimension of size c to another. DTensor has no collective that only sends to the
next device: it supports neither `tf.roll` nor a concatenation along a sharded dimension, and a
product with a permutation all-gathers. Therefore each round of a ring is an all-to-all that sends
1/c of every shard's keys and values to all others. The total bytes and the peak memory are the
same as for a ring.

A collective on a part of an axis is not available either. With u Ulysses shards, one all-to-all
over all c shards moves queries both to their part of the heads and to their stripe of positions,
and each round sends every shard the keys and values of its part of the heads.
"""

import tensorflow as tf

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.context_parallel.plan import ContextPlan, Range, make_plan
from dtransformer.parallel.mesh.axis_rules import axis_size, constrain, mesh_axis
from dtransformer.parallel.ops.custom_gradient import depend_on
from dtransformer.parallel.tracing import trace

_SHARDS = "length_shards", "batch", "heads"


def context_exchange(
    q: tf.Tensor, k: tf.Tensor, causal: bool, has_bias: bool
) -> "ContextExchange | None":
    """Return the exchange of sequences for attention, or `None` if sequences are not sharded.

    Args:
        q: Tensor `[b, n, s, d]`.
        k: Tensor `[b, m, t, d]`.
        causal: Whether queries see no later positions.
        has_bias: Whether scores have a bias by position.

    Raises:
        ValueError: If a sequence or the heads cannot be divided.
    """
    axis = mesh_axis("length_shards") if trace.is_on_mesh() else None
    if axis is None:
        return None
    divisors = axis_size(mesh_axis("batch")), axis_size(mesh_axis("heads"))
    queries, keys = (
        (max(x.shape[0] // divisors[0], 1), x.shape[1] // divisors[1], *x.shape[2:]) for x in (q, k)
    )
    config = get_parallel_config()
    plan = make_plan(
        config.context_parallel_mode,
        axis_size(axis),
        queries,
        keys,
        causal,
        has_bias,
        q.dtype.size,
        config.ulysses_shards,
    )
    return ContextExchange(plan, axis_size(mesh_axis("heads")))


class ContextExchange:
    """Communication of a `ContextPlan`.

    Args:
        plan: `ContextPlan`.
        head_shards: Integer. Number of shards of the heads over the model axis.
    """

    def __init__(self, plan: ContextPlan, head_shards: int):
        self.plan = plan
        self._head_shards = head_shards

    def queries(self, q: tf.Tensor) -> tf.Tensor:
        """Convert `[b, n, s, d]` to the queries of each shard, `[c, b, n', s', d]`."""
        return self._to_parts(self._by_shards(q))

    def context(self, x: tf.Tensor) -> tf.Tensor:
        """Convert `[c, b, n', s', d]` back to `[b, n, s, d]`. Inverse of `queries`."""
        x = self._from_parts(x)
        c, b, n, s, d = x.shape
        # [c, b, n, s/c, d] -> [b, n, c, s/c, d] -> [b, n, s, d]
        x = _constrain(tf.transpose(x, [1, 2, 0, 3, 4]), ("batch", "heads", "length_shards"))
        return _constrain(tf.reshape(x, [b, n, c * s, d]), ("batch", "heads", "inner_length"))

    def memory(self, x: tf.Tensor) -> tf.Tensor:
        """Convert `[b, m, t, d]` to each shard's initial keys or values, `[c, b, m', t', d]`."""
        x = self._by_shards(x)
        c, b, m, t, d = x.shape
        times = max(self.plan.head_parts * self._head_shards // m, 1)
        if times > 1:  # Replicate each head for several shards.
            x = tf.reshape(tf.stack([x] * times, axis=3), [c, b, m * times, t, d])
            x = _constrain(x, _SHARDS)
        return self._to_parts(x) if self.plan.has_all_positions else x

    def gather(self, k: tf.Tensor, v: tf.Tensor, part: Range) -> list[tf.Tensor]:
        """Return the keys and values `[c, b, m/u, t, d]` of a round for each shard.

        Args:
            k: Keys from `memory`.
            v: Values from `memory`.
            part: Element of the plan's `round_parts`.
        """
        if self.plan.has_all_positions:
            return [k, v]
        first, last = part
        x = tf.concat([k[..., first:last, :], v[..., first:last, :]], axis=-1)
        c, b, m, t, d = x.shape
        u = self.plan.head_parts
        # [c, b, m, t, d] -> [c, c, b, m/u, t, d]: the tensors that shard j sends to shard i.
        x = tf.reshape(x, [c, b, *self._split_heads(m), t, d])
        x = tf.concat([tf.transpose(x, [3, 0, 1, 2, 4, 5, 6])] * self.plan.position_parts, axis=0)
        x = _all_to_all(tf.reshape(x, [c, c, b, m // u, t, d]))
        x = tf.reshape(tf.transpose(x, [0, 2, 3, 1, 4, 5]), [c, b, m // u, c * t, d])
        return tf.split(_constrain(x, _SHARDS), 2, axis=-1)

    def scatter_sum(self, k: tf.Tensor, v: tf.Tensor) -> list[tf.Tensor]:
        """Return the sums over all shards of gradients of the tensors from `gather`.

        Args:
            k: Tensor `[c, b, m/u, t, d]` of a round, for the keys.
            v: Tensor `[c, b, m/u, t, d]` of a round, for the values.

        Returns:
            A list of two tensors `[c, b, m, t/c, d]`.
        """
        if self.plan.has_all_positions:
            return [k, v]
        x = tf.concat([k, v], axis=-1)
        c, b, m, t, d = x.shape
        m *= self.plan.head_parts
        heads, u, part = self._split_heads(m)
        # [c, b, m/u, t, d] -> [c, c, b, m/u, t/c, d]: the tensors that shard j sends to shard i.
        x = tf.transpose(tf.reshape(x, [c, b, m // u, c, t // c, d]), [3, 0, 1, 2, 4, 5])
        x = tf.reshape(_all_to_all(x), [c, c // u, u, b, heads, part, t // c, d])
        x = tf.transpose(tf.reduce_sum(x, axis=1), [0, 2, 3, 1, 4, 5, 6])
        x = tf.reshape(x, [c, b, m, t // c, d])
        return tf.split(_constrain(x, _SHARDS), 2, axis=-1)

    def rows(self, x: tf.Tensor) -> tf.Tensor:
        """Convert a mask to the layout of the queries.

        `[b, n or 1, s or 1, t]` becomes `[c or 1, b, n' or 1, s' or 1, t]`, for queries from
        `queries`.
        """
        b, n, s, t = x.shape
        parts = self.plan.position_parts
        if s == 1:
            x = tf.expand_dims(x, 0)
        elif self.plan.is_striped:
            x = tf.transpose(tf.reshape(x, [b, n, s // parts, parts, t]), [3, 0, 1, 2, 4])
        else:
            x = tf.transpose(tf.reshape(x, [b, n, parts, s // parts, t]), [2, 0, 1, 3, 4])
        return self.spread(x)

    def spread(self, x: tf.Tensor) -> tf.Tensor:
        """Convert values for each part of the query positions to values for each shard.

        Args:
            x: Tensor `[p or 1, b or 1, n or 1, s, t]`, replicated over the context axis. p is the
                number of parts.

        Returns:
            A tensor `[c or 1, b or 1, n/u or 1, s, t]`.
        """
        parts, b, n, s, t = x.shape
        u = self.plan.head_parts
        if u > 1 and n > 1:
            x = tf.reshape(x, [parts, b, *self._split_heads(n), s, t])
            x = tf.transpose(x, [0, 3, 1, 2, 4, 5, 6])
            # DTensor cannot concatenate along a dimension that is sharded afterwards.
            x = tf.stack([x] * (self.plan.position_parts // parts))
            x = tf.reshape(x, [self.plan.shards, b, n // u, s, t])
        elif u > 1 and parts > 1:
            x = tf.reshape(tf.stack([x] * u, axis=1), [parts * u, b, n, s, t])
        return _constrain(x, _SHARDS)

    def depend_on(self, x: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        """Return `x` with a data dependency on `done`. See `ops.custom_gradient.depend_on`.

        `x` is `[c, b, m, t, d]` and `done` is `[c, b, n, s, d]`.

        Devices do not wait for each other, because each one only reads its local part.
        """
        heads = self._head_shards
        c, b, n = done.shape[:3]
        minimum = tf.reduce_min(tf.cast(done, "float32"), axis=[3, 4])
        minimum = _constrain(tf.reshape(minimum, [c, b, heads, n // heads]), _SHARDS)
        minimum = tf.reduce_min(minimum, axis=3, keepdims=True)
        minimum = tf.concat([minimum] * (x.shape[2] // heads), axis=3)
        minimum = _constrain(tf.reshape(minimum, [c, b, x.shape[2], 1, 1]), _SHARDS)
        return x + tf.cast(tf.where(minimum == minimum, 0.0, float("nan")), x.dtype)

    def _by_shards(self, x):
        """Convert `[b, n, s, d]` to `[c, b, n, s/c, d]`."""
        b, n, s, d = x.shape
        c = self.plan.shards
        x = _constrain(x, ("batch", "heads", "inner_length"))
        x = _constrain(tf.reshape(x, [b, n, c, s // c, d]), ("batch", "heads", "length_shards"))
        return _constrain(tf.transpose(x, [2, 0, 1, 3, 4]), _SHARDS)

    def _split_heads(self, n):
        """Return the sizes `[model shards, u, heads]` of n heads."""
        u = self.plan.head_parts
        return self._head_shards, u, n // (self._head_shards * u)

    def _to_parts(self, x):
        """Convert `[c, b, n, s/c, d]` to stripes of positions and parts of heads.

        Stripe i of p has the positions i, i + p, i + 2·p, …
        """
        plan = self.plan
        if not (plan.is_striped or plan.has_all_positions):
            return x
        c, b, n, s, d = x.shape
        parts = plan.position_parts
        u = plan.head_parts
        x = tf.reshape(x, [c, b, *self._split_heads(n), s // parts, parts, d])
        # Dimensions to the front: the shard to send to, as stripe and part of the heads.
        x = tf.reshape(tf.transpose(x, [6, 3, 0, 1, 2, 4, 5, 7]), [c, c, b, n // u, s // parts, d])
        x = tf.transpose(_all_to_all(x), [0, 2, 3, 1, 4, 5])
        return _constrain(tf.reshape(x, [c, b, n // u, c * s // parts, d]), _SHARDS)

    def _from_parts(self, x):
        """Inverse of `_to_parts`."""
        plan = self.plan
        if not (plan.is_striped or plan.has_all_positions):
            return x
        c, b, n, s, d = x.shape
        parts = plan.position_parts
        n *= plan.head_parts
        heads, u, part = self._split_heads(n)
        x = tf.reshape(x, [c, b, n // u, c, s // c, d])
        x = _all_to_all(tf.transpose(x, [3, 0, 1, 2, 4, 5]))
        x = tf.reshape(x, [c, parts, u, b, heads, part, s // c, d])
        x = tf.transpose(x, [0, 3, 4, 2, 5, 6, 1, 7])
        return _constrain(tf.reshape(x, [c, b, n, s // c * parts, d]), _SHARDS)


class LocalExchange(ContextExchange):
    """Exchange for sequences that are not sharded, with a single shard.

    Args:
        num_queries: Integer. Number s of query positions.
        num_keys: Integer. Number t of key positions.
    """

    def __init__(self, num_queries: int, num_keys: int):
        super().__init__(ContextPlan("ulysses", 1, num_queries, num_keys), 1)

    def rows(self, x: tf.Tensor) -> tf.Tensor:
        """Add the shard dimension: `[b, n, s, d]` becomes `[1, b, n, s, d]`."""
        return tf.expand_dims(x, 0)

    queries = memory = rows

    def context(self, x: tf.Tensor) -> tf.Tensor:
        """Remove the shard dimension: `[1, b, n, s, d]` becomes `[b, n, s, d]`."""
        return constrain(tf.squeeze(x, 0), ("batch", "heads", None, "head_dim"))

    depend_on = staticmethod(depend_on)


def _all_to_all(x):
    """Exchange blocks `[c, c, b, n, ...]`: block i of device j becomes block j of device i."""
    x = _constrain(x, (None, *_SHARDS))
    return _constrain(x, ("length_shards", None, "batch", "heads"))


def _constrain(x, axes):
    """Lay out the first dimensions of `x` by the rules and replicate the others."""
    return constrain(x, (*axes, *[None] * (len(x.shape) - len(axes))))
