"""Exchange of sequence shards for attention, by relayouts on the mesh.

Between attention layers, tensors `[b, n, s, d]` are sharded along s over the context axis. This
module reshapes them to `[c, b, n, s/c, d]`, with one of c shards per device. An all-to-all is a
relayout from one dimension of size c to another. DTensor has no collective that only sends to the
next device: it supports neither `tf.roll` nor a concatenation along a sharded dimension, and a
product with a permutation all-gathers. Therefore each round of a ring is an all-to-all that sends
1/c of every shard's keys and values to all others. The total bytes and the peak memory are the
same as for a ring.
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
        ValueError: If c does not divide a sequence or, with `"ulysses"`, the heads.
    """
    axis = mesh_axis("length_shards") if trace.is_on_mesh() else None
    if axis is None:
        return None
    divisors = axis_size(mesh_axis("batch")), axis_size(mesh_axis("heads"))
    queries, keys = (
        (max(x.shape[0] // divisors[0], 1), x.shape[1] // divisors[1], *x.shape[2:]) for x in (q, k)
    )
    mode = get_parallel_config().context_parallel_mode
    plan = make_plan(mode, axis_size(axis), queries, keys, causal, has_bias, q.dtype.size)
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
        q = self._by_shards(q)
        if self.plan.has_all_positions:
            return self._to_heads(q)
        return self._to_stripes(q) if self.plan.is_striped else q

    def context(self, x: tf.Tensor) -> tf.Tensor:
        """Convert `[c, b, n', s', d]` back to `[b, n, s, d]`. Inverse of `queries`."""
        if self.plan.has_all_positions:
            x = self._from_heads(x)
        elif self.plan.is_striped:
            x = self._from_stripes(x)
        c, b, n, s, d = x.shape
        # [c, b, n, s/c, d] -> [b, n, c, s/c, d] -> [b, n, s, d]
        x = _constrain(tf.transpose(x, [1, 2, 0, 3, 4]), ("batch", "heads", "length_shards"))
        return _constrain(tf.reshape(x, [b, n, c * s, d]), ("batch", "heads", "inner_length"))

    def memory(self, x: tf.Tensor) -> tf.Tensor:
        """Convert `[b, m, t, d]` to each shard's initial keys or values, `[c, b, m', t', d]`."""
        x = self._by_shards(x)
        if not self.plan.has_all_positions:
            return x
        c, b, m, t, d = x.shape
        times = max(c * self._head_shards // m, 1)
        if times > 1:  # Replicate each head for several shards.
            x = tf.reshape(tf.stack([x] * times, axis=3), [c, b, m * times, t, d])
        return self._to_heads(_constrain(x, _SHARDS))

    def gather(self, k: tf.Tensor, v: tf.Tensor, part: Range) -> list[tf.Tensor]:
        """Return the keys and values `[c, b, m, t, d]` of a round, identical for all shards.

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
        # [c, b, m, t, d] -> [c, c, b, m, t, d]: the tensors that shard j sends to shard i.
        x = _all_to_all(tf.stack([x] * c))
        x = tf.reshape(tf.transpose(x, [0, 2, 3, 1, 4, 5]), [c, b, m, c * t, d])
        return tf.split(_constrain(x, _SHARDS), 2, axis=-1)

    def scatter_sum(self, k: tf.Tensor, v: tf.Tensor) -> list[tf.Tensor]:
        """Return the sums over all shards of gradients of the tensors from `gather`.

        Args:
            k: Tensor `[c, b, m, t, d]` of a round, for the keys.
            v: Tensor `[c, b, m, t, d]` of a round, for the values.

        Returns:
            A list of two tensors `[c, b, m, t/c, d]`.
        """
        if self.plan.has_all_positions:
            return [k, v]
        x = tf.concat([k, v], axis=-1)
        c, b, m, t, d = x.shape
        # [c, b, m, t, d] -> [c, c, b, m, t/c, d]: the tensors that shard j sends to shard i.
        x = tf.transpose(tf.reshape(x, [c, b, m, c, t // c, d]), [3, 0, 1, 2, 4, 5])
        x = _all_to_all(x)
        return tf.split(_constrain(tf.reduce_sum(x, axis=1), _SHARDS), 2, axis=-1)

    def rows(self, x: tf.Tensor) -> tf.Tensor:
        """Convert a mask or bias to the layout of the queries.

        `[b, n or 1, s or 1, t]` becomes `[c or 1, b, n' or 1, s' or 1, t]`, for queries from
        `queries`.
        """
        b, n, s, t = x.shape
        if self.plan.has_all_positions:
            return tf.expand_dims(x, 0) if n == 1 else self.heads(x)
        if s == 1:
            return tf.expand_dims(x, 0)
        c = self.plan.shards
        if self.plan.is_striped:
            x = tf.transpose(tf.reshape(x, [b, n, s // c, c, t]), [3, 0, 1, 2, 4])
        else:
            x = tf.transpose(tf.reshape(x, [b, n, c, s // c, t]), [2, 0, 1, 3, 4])
        return _constrain(x, _SHARDS if n > 1 else _SHARDS[:2])

    def heads(self, x: tf.Tensor) -> tf.Tensor:
        """Convert `[b, n, s, t]` to the heads of each shard, `[c, b, n/c, s, t]`."""
        b, n, s, t = x.shape
        c = self.plan.shards
        head_shards = self._head_shards
        x = tf.reshape(x, [b, head_shards, c, n // (head_shards * c), s, t])
        x = tf.reshape(tf.transpose(x, [2, 0, 1, 3, 4, 5]), [c, b, n // c, s, t])
        return _constrain(x, ("length_shards", None, "heads"))

    def depend_on(self, x: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        """Return `x` with a data dependency on `done`. See `ops.custom_gradient.depend_on`.

        `x` is `[c, b, m, t, d]` and `done` is `[c, b, n, s, d]`.

        Devices do not wait for each other, because each one only reads its local part. One number
        of heads must divide the other.
        """
        minimum = tf.reduce_min(tf.cast(done, "float32"), axis=[3, 4], keepdims=True)
        c, b, n = minimum.shape[:3]
        m = x.shape[2]
        if n > m:
            minimum = _constrain(tf.reshape(minimum, [c, b, m, n // m, 1]), _SHARDS)
            minimum = tf.reduce_min(minimum, axis=3, keepdims=True)
        elif n < m:
            minimum = _constrain(tf.concat([minimum] * (m // n), axis=3), _SHARDS)
            minimum = _constrain(tf.reshape(minimum, [c, b, m, 1, 1]), _SHARDS)
        return x + tf.cast(tf.where(minimum == minimum, 0.0, float("nan")), x.dtype)

    def _by_shards(self, x):
        """Convert `[b, n, s, d]` to `[c, b, n, s/c, d]`."""
        b, n, s, d = x.shape
        c = self.plan.shards
        x = _constrain(x, ("batch", "heads", "inner_length"))
        x = _constrain(tf.reshape(x, [b, n, c, s // c, d]), ("batch", "heads", "length_shards"))
        return _constrain(tf.transpose(x, [2, 0, 1, 3, 4]), _SHARDS)

    def _to_stripes(self, x):
        """Move position r·s/c + c·i + j of shard r to index r·s/c² + i of shard j."""
        c, b, n, s, d = x.shape
        split = [c, b, n, s // c, c, d]
        return _exchange(x, split, [4, 0, 1, 2, 3, 5], [0, 2, 3, 1, 4, 5], [c, b, n, s, d])

    def _from_stripes(self, x):
        c, b, n, s, d = x.shape
        split = [c, b, n, c, s // c, d]
        return _exchange(x, split, [3, 0, 1, 2, 4, 5], [0, 2, 3, 4, 1, 5], [c, b, n, s, d])

    def _to_heads(self, x):
        """Convert `[c, b, n, s/c, d]` to `[c, b, n/c, s, d]`."""
        c, b, n, s, d = x.shape
        head_shards = self._head_shards
        split = [c, b, head_shards, c, n // (head_shards * c), s, d]
        shape = [c, b, n // c, c * s, d]
        return _exchange(x, split, [3, 0, 1, 2, 4, 5, 6], [0, 2, 3, 4, 1, 5, 6], shape)

    def _from_heads(self, x):
        c, b, n, s, d = x.shape
        head_shards = self._head_shards
        split = [c, b, head_shards, n // head_shards, c, s // c, d]
        shape = [c, b, n * c, s // c, d]
        return _exchange(x, split, [4, 0, 1, 2, 3, 5, 6], [0, 2, 3, 1, 4, 5, 6], shape)


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

    queries = memory = heads = rows

    def context(self, x: tf.Tensor) -> tf.Tensor:
        """Remove the shard dimension: `[1, b, n, s, d]` becomes `[b, n, s, d]`."""
        return constrain(tf.squeeze(x, 0), ("batch", "heads", None, "head_dim"))

    depend_on = staticmethod(depend_on)


def _all_to_all(x):
    """Exchange blocks `[c, c, b, n, ...]`: block i of device j becomes block j of device i."""
    x = _constrain(x, (None, *_SHARDS))
    return _constrain(x, ("length_shards", None, "batch", "heads"))


def _exchange(x, split, to_front, inverse, shape):
    """Reshape `x` to `split`, exchange blocks, and reshape the result to `shape`.

    `there` permutes the dimension to send to the front, and `back` reverses this.
    """
    x = _all_to_all(tf.transpose(tf.reshape(x, split), to_front))
    return _constrain(tf.reshape(tf.transpose(x, inverse), shape), _SHARDS)


def _constrain(x, axes):
    """Lay out the first dimensions of `x` by the rules and replicate the others."""
    return constrain(x, (*axes, *[None] * (len(x.shape) - len(axes))))
