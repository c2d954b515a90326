"""Exchange of shards of a sequence for attention, by relayouts on the mesh.

Tensors [b, n, s, d] are sharded along s over the context axis between attentions. Here they are
[c, b, n, s/c, d]: c shards, of which each device has its own. An all-to-all is a relayout from one
dimension of c to another. DTensor has no collective by which each device sends to the next one
only: it takes neither `tf.roll` nor a concatenation along a sharded dimension, and a product with a
permutation all-gathers. So a ring's rounds are all-to-alls, in each of which every shard gives
all others a c-th of its keys and values: as many bytes in all, and as little memory at once.
"""

import tensorflow as tf

from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.context_parallel.plan import ContextPlan, Range, make_plan
from dtransformer.parallel.mesh.axis_rules import axis_size, constrain, mesh_axis
from dtransformer.parallel.ops.custom_gradient import after
from dtransformer.parallel.tracing import trace

_SHARDS = "length_shards", "batch", "heads"


def context_exchange(
    q: tf.Tensor, k: tf.Tensor, causal: bool, has_bias: bool
) -> "ContextExchange | None":
    """Return how sequences are exchanged for attention; None where they are not sharded.

    Args:
        q: tensor [b, n, s, d].
        k: tensor [b, m, t, d].
        causal: whether a query may attend to no later position.
        has_bias: whether scores have a bias by positions.

    Raises:
        ValueError: see `make_plan`.
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
    """Carries a `ContextPlan` out.

    Args:
        plan: the plan.
        head_shards: number of shards of the heads over the model axis.
    """

    def __init__(self, plan: ContextPlan, head_shards: int):
        self.plan, self._head_shards = plan, head_shards

    def queries(self, q: tf.Tensor) -> tf.Tensor:
        """[b, n, s, d] -> [c, b, n', s', d], the queries of each shard."""
        q = self._by_shards(q)
        if self.plan.has_all_positions:
            return self._to_heads(q)
        return self._to_stripes(q) if self.plan.is_striped else q

    def context(self, x: tf.Tensor) -> tf.Tensor:
        """[c, b, n', s', d] -> [b, n, s, d], as `queries` the other way around."""
        if self.plan.has_all_positions:
            x = self._from_heads(x)
        elif self.plan.is_striped:
            x = self._from_stripes(x)
        c, b, n, s, d = x.shape
        # [c, b, n, s/c, d] -> [b, n, c, s/c, d] -> [b, n, s, d]
        x = _constrain(tf.transpose(x, [1, 2, 0, 3, 4]), ("batch", "heads", "length_shards"))
        return _constrain(tf.reshape(x, [b, n, c * s, d]), ("batch", "heads", "inner_length"))

    def memory(self, x: tf.Tensor) -> tf.Tensor:
        """[b, m, t, d] -> [c, b, m', t', d], the keys or values that each shard begins with."""
        x = self._by_shards(x)
        if not self.plan.has_all_positions:
            return x
        c, b, m, t, d = x.shape
        times = max(c * self._head_shards // m, 1)
        if times > 1:  # each head is there for several shards
            x = tf.reshape(tf.stack([x] * times, axis=3), [c, b, m * times, t, d])
        return self._to_heads(_constrain(x, _SHARDS))

    def gather(self, k: tf.Tensor, v: tf.Tensor, part: Range) -> list[tf.Tensor]:
        """Return the keys and values [c, b, m, t, d] of a round, the same for all shards.

        Args:
            k, v: as from `memory`.
            part: one of the plan's `round_parts`.
        """
        if self.plan.has_all_positions:
            return [k, v]
        first, last = part
        x = tf.concat([k[..., first:last, :], v[..., first:last, :]], axis=-1)
        c, b, m, t, d = x.shape
        # [c, b, m, t, d] -> [c, c, b, m, t, d]: what shard j has for shard i
        x = _all_to_all(tf.stack([x] * c))
        x = tf.reshape(tf.transpose(x, [0, 2, 3, 1, 4, 5]), [c, b, m, c * t, d])
        return tf.split(_constrain(x, _SHARDS), 2, axis=-1)

    def scatter_sum(self, k: tf.Tensor, v: tf.Tensor) -> list[tf.Tensor]:
        """Return the sums of what all shards have for the keys and values that `gather` gave.

        Args:
            k, v: tensors [c, b, m, t, d] of a round.

        Returns:
            A list of two tensors [c, b, m, t/c, d].
        """
        if self.plan.has_all_positions:
            return [k, v]
        x = tf.concat([k, v], axis=-1)
        c, b, m, t, d = x.shape
        # [c, b, m, t, d] -> [c, c, b, m, t/c, d]: what shard j has for shard i
        x = tf.transpose(tf.reshape(x, [c, b, m, c, t // c, d]), [3, 0, 1, 2, 4, 5])
        x = _all_to_all(x)
        return tf.split(_constrain(tf.reduce_sum(x, axis=1), _SHARDS), 2, axis=-1)

    def rows(self, x: tf.Tensor) -> tf.Tensor:
        """[b, n or 1, s or 1, t] -> [c or 1, b, n' or 1, s' or 1, t], of queries as from `queries`."""
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
        """[b, n, s, t] -> [c, b, n/c, s, t], of the heads that each shard has."""
        b, n, s, t = x.shape
        c, of_model = self.plan.shards, self._head_shards
        x = tf.reshape(x, [b, of_model, c, n // (of_model * c), s, t])
        x = tf.reshape(tf.transpose(x, [2, 0, 1, 3, 4, 5]), [c, b, n // c, s, t])
        return _constrain(x, ("length_shards", None, "heads"))

    def after(self, x: tf.Tensor, done: tf.Tensor) -> tf.Tensor:
        """Return x [c, b, m, t, d] once `done` [c, b, n, s, d] is known, by values; see `after`.

        No device waits for another's: what is looked at is on the same one. One number of heads divides
        the other.
        """
        known = tf.reduce_min(tf.cast(done, "float32"), axis=[3, 4], keepdims=True)
        (c, b, n), m = known.shape[:3], x.shape[2]
        if n > m:
            known = _constrain(tf.reshape(known, [c, b, m, n // m, 1]), _SHARDS)
            known = tf.reduce_min(known, axis=3, keepdims=True)
        elif n < m:
            known = _constrain(tf.concat([known] * (m // n), axis=3), _SHARDS)
            known = _constrain(tf.reshape(known, [c, b, m, 1, 1]), _SHARDS)
        return x + tf.cast(tf.where(known == known, 0.0, float("nan")), x.dtype)

    def _by_shards(self, x):
        """[b, n, s, d] -> [c, b, n, s/c, d]"""
        b, n, s, d = x.shape
        c = self.plan.shards
        x = _constrain(x, ("batch", "heads", "inner_length"))
        x = _constrain(tf.reshape(x, [b, n, c, s // c, d]), ("batch", "heads", "length_shards"))
        return _constrain(tf.transpose(x, [2, 0, 1, 3, 4]), _SHARDS)

    def _to_stripes(self, x):
        """Position r·s/c + c·i + j of shard r becomes the place r·s/c² + i of shard j."""
        c, b, n, s, d = x.shape
        split = [c, b, n, s // c, c, d]
        return _exchanged(x, split, [4, 0, 1, 2, 3, 5], [0, 2, 3, 1, 4, 5], [c, b, n, s, d])

    def _from_stripes(self, x):
        c, b, n, s, d = x.shape
        split = [c, b, n, c, s // c, d]
        return _exchanged(x, split, [3, 0, 1, 2, 4, 5], [0, 2, 3, 4, 1, 5], [c, b, n, s, d])

    def _to_heads(self, x):
        """[c, b, n, s/c, d] -> [c, b, n/c, s, d]"""
        c, b, n, s, d = x.shape
        of_model = self._head_shards
        split, shape = [c, b, of_model, c, n // (of_model * c), s, d], [c, b, n // c, c * s, d]
        return _exchanged(x, split, [3, 0, 1, 2, 4, 5, 6], [0, 2, 3, 4, 1, 5, 6], shape)

    def _from_heads(self, x):
        c, b, n, s, d = x.shape
        of_model = self._head_shards
        split, shape = [c, b, of_model, n // of_model, c, s // c, d], [c, b, n * c, s // c, d]
        return _exchanged(x, split, [4, 0, 1, 2, 3, 5, 6], [0, 2, 3, 1, 4, 5, 6], shape)


class LocalExchange(ContextExchange):
    """Carries out the plan of attention of sequences that are not sharded: there is one shard.

    Args:
        num_queries, num_keys: numbers s and t of positions.
    """

    def __init__(self, num_queries: int, num_keys: int):
        super().__init__(ContextPlan("ulysses", 1, num_queries, num_keys), 1)

    def rows(self, x: tf.Tensor) -> tf.Tensor:
        """[b, n, s, d] -> [1, b, n, s, d]"""
        return tf.expand_dims(x, 0)

    queries = memory = heads = rows

    def context(self, x: tf.Tensor) -> tf.Tensor:
        """[1, b, n, s, d] -> [b, n, s, d]"""
        return constrain(tf.squeeze(x, 0), ("batch", "heads", None, "head_dim"))

    after = staticmethod(after)


def _all_to_all(x):
    """[c, c, b, n, ...]: what device j has for device i becomes what i has of j."""
    x = _constrain(x, (None, *_SHARDS))
    return _constrain(x, ("length_shards", None, "batch", "heads"))


def _exchanged(x, split, there, back, shape):
    """Reshape x to `split`, send along the dimension that `there` puts first, and put it back."""
    x = _all_to_all(tf.transpose(tf.reshape(x, split), there))
    return _constrain(tf.reshape(tf.transpose(x, back), shape), _SHARDS)


def _constrain(x, axes):
    """Lay x out as the rules say of its first dimensions; others are replicated."""
    return constrain(x, (*axes, *[None] * (len(x.shape) - len(axes))))
