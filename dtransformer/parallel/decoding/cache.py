"""Cache of keys and values for token-by-token decoding.

A cache has an entry for every position and each of the k hypotheses of a source: entry p·k + c is
position p of hypothesis c. A mask selects the entries of a hypothesis that continues another one,
so entries never move. A cache with room for r positions is a ring: position p replaces p - r, which
attention with a window of r no longer sees.
Shapes: b sources, n heads, e = r·k entries, d features of a head.
"""

import dataclasses

import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

_AXES = ("batch", "heads", "memory_length", "head_dim")


@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values that an attention layer has computed. A nested structure for `tf.nest`.

    In self-attention, the positions of a prompt come first. All hypotheses share them. With a
    window of w positions, a cache stores at most w − 1 positions of the prompt and w of each
    hypothesis. In cross-attention, `key` and `value` belong to the memory and never change.

    Args:
        key, value: Tensors of shape `[b, n, e, d]`.
        index: Int32 scalar tensor. Number of positions inserted after the prompt. `None` in
            cross-attention.
        prompt_key, prompt_value: Tensors of shape `[b, n, p, d]`, or `None` without a prompt.
        prompt_length: Integer scalar tensor. Number of prompt positions, including positions
            outside of the window. `None` if the cache stores all of them.
    """

    key: tf.Tensor
    value: tf.Tensor
    index: tf.Tensor | None = None
    prompt_key: tf.Tensor | None = None
    prompt_value: tf.Tensor | None = None
    prompt_length: tf.Tensor | None = None

    def __tf_flatten__(self):
        tensors = {name: x for name, x in vars(self).items() if x is not None}
        return tuple(tensors), tuple(tensors.values())

    @classmethod
    def __tf_unflatten__(cls, metadata, components):
        return cls(**dict(zip(metadata, components, strict=True)))

    @classmethod
    def empty(cls, shape: list, dtype: str) -> "KVCache":
        """Return a cache without positions.

        Args:
            shape: List of the sizes `[b, n, e, d]`.
            dtype: Name of the dtype.
        """
        return cls(_empty(shape, dtype), _empty(shape, dtype), tf.constant(0))

    @property
    def num_prompt_positions(self) -> int | tf.Tensor:
        """Number of prompt positions, including positions outside of the window."""
        if self.prompt_length is not None:
            return self.prompt_length
        if self.prompt_key is None:
            return 0
        return static_or_dynamic_shape(self.prompt_key)[2]

    @property
    def keys(self) -> list[tf.Tensor]:
        """The tensors of keys, with the prompt first."""
        return [x for x in (self.prompt_key, self.key) if x is not None]

    @property
    def values(self) -> list[tf.Tensor]:
        """The tensors of values, with the prompt first."""
        return [x for x in (self.prompt_value, self.value) if x is not None]

    def with_prompt(self, key: tf.Tensor, value: tf.Tensor, window: int | None) -> "KVCache":
        """Return a cache with the keys and values of a prompt.

        Args:
            key, value: Tensors of shape `[b, n, p, d]`.
            window: Integer. Number of visible positions. Only the last `window - 1` positions are
                stored, since the next query is visible to itself. `None` stores all.
        """
        if window is None:
            return dataclasses.replace(self, prompt_key=key, prompt_value=value)
        length = static_or_dynamic_shape(key)[2]
        if isinstance(length, int):
            first = max(length - (window - 1), 0)
        else:
            first = tf.maximum(length - (window - 1), 0)
        return dataclasses.replace(
            self,
            prompt_key=key[:, :, first:],
            prompt_value=value[:, :, first:],
            prompt_length=tf.convert_to_tensor(length),
        )

    def without_last_prompt_position(self) -> "KVCache":
        """Return the cache without the last position of its prompt. It must store all positions."""
        return dataclasses.replace(
            self, prompt_key=self.prompt_key[:, :, :-1], prompt_value=self.prompt_value[:, :, :-1]
        )

    def insert(self, key: tf.Tensor, value: tf.Tensor) -> "KVCache":
        """Return the cache with the next position of each hypothesis.

        In a decoding loop the cache is updated in place, so this object changes as well. The time
        then does not depend on the capacity.

        Args:
            key, value: Tensors of shape `[b·k, n, 1, d]`.
        """
        b, _, num_entries, _ = static_or_dynamic_shape(self.key)
        k = static_or_dynamic_shape(key)[0] // b
        slot = self.index % (num_entries // k)
        insert = _insert_in_place if trace.is_decoding_loop() else _insert_copy
        new_key, new_value = insert([self.key, self.value], [key, value], slot, k)
        return dataclasses.replace(self, key=new_key, value=new_value, index=self.index + 1)


def _empty(shape, dtype):
    """Return a tensor of zeros.

    In a decoding loop it is a separate tensor, because it is updated in place. TensorFlow might
    otherwise share one tensor of zeros between all caches.
    """
    if trace.is_decoding_loop():
        return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)
    return constrain(tf.zeros(shape, dtype), _AXES)


def _insert_in_place(tensors, new, slot, num_hypotheses):
    """Write rows `[b·k, n, 1, d]` into tensors `[b, n, e, d]`."""
    b, n, e, d = static_or_dynamic_shape(tensors[0])
    sources = tf.reshape(tf.range(b), [-1, 1, 1])
    hypotheses = tf.reshape(tf.range(num_hypotheses), [-1, 1])
    heads = tf.range(n)
    # Row of each hypothesis in [b·n·e, d], with the dimensions b, k and n.
    rows = (sources * n + heads) * e + slot * num_hypotheses + hypotheses
    rows = tf.reshape(rows, [-1])
    results = []
    for tensor, update in zip(tensors, new, strict=True):
        flat = tf.reshape(tensor, [-1, d])
        flat = tf.raw_ops.InplaceUpdate(x=flat, i=rows, v=tf.reshape(update, [-1, d]))
        results.append(tf.reshape(flat, [b, n, e, d]))
    return results


def _insert_copy(tensors, new, slot, num_hypotheses):
    """Return copies of tensors `[b, n, e, d]` with rows `[b·k, n, 1, d]`."""
    b, _, e, _ = static_or_dynamic_shape(tensors[0])
    entries = tf.range(e)
    is_new = (entries // num_hypotheses == slot)[None, None, :, None]
    has_one_hypothesis = isinstance(num_hypotheses, int) and num_hypotheses == 1
    results = []
    for tensor, update in zip(tensors, new, strict=True):
        update = hypotheses_to_positions(update, b)
        if not has_one_hypothesis:
            update = tf.gather(update, entries % num_hypotheses, axis=2)
        results.append(constrain(tf.where(is_new, update, tensor), _AXES))
    return results


def get_cache_positions(size: int | tf.Tensor, last: tf.Tensor, num_hypotheses=1) -> tf.Tensor:
    """Return the positions of a cache's entries, int32 `[e]`. Empty entries are negative.

    Args:
        size: Integer or scalar tensor. Number e of entries.
        last: Integer scalar tensor. Last position in the cache.
        num_hypotheses: Integer. Number k of hypotheses per source. Defaults to `1`.
    """
    places = tf.range(size) // num_hypotheses
    return last - (last - places) % (size // num_hypotheses)


def hypotheses_to_positions(x: tf.Tensor, num_sources: int | tf.Tensor) -> tf.Tensor:
    """Convert `[b·k, n, s, d]` to `[b, n, s·k, d]`: positions of all hypotheses of a source."""
    rows, n, s, d = static_or_dynamic_shape(x)
    if isinstance(rows, int) and isinstance(num_sources, int) and rows == num_sources:
        return x
    x = tf.reshape(x, [num_sources, -1, n, s, d])
    return tf.reshape(tf.transpose(x, [0, 2, 3, 1, 4]), [num_sources, n, -1, d])


def positions_to_hypotheses(x: tf.Tensor, num_positions: int | tf.Tensor) -> tf.Tensor:
    """Convert `[b, n, s·k, d]` to `[b·k, s, n, d]`, with heads after positions."""
    b, n, queries, d = static_or_dynamic_shape(x)
    if isinstance(queries, int) and isinstance(num_positions, int) and queries == num_positions:
        return tf.transpose(x, [0, 2, 1, 3])
    x = tf.reshape(x, [b, n, num_positions, -1, d])
    return tf.reshape(tf.transpose(x, [0, 3, 2, 1, 4]), [-1, num_positions, n, d])
