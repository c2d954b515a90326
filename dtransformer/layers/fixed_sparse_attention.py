"""Sparse attention by a fixed pattern: of the windows before it a query sees a part."""

import dataclasses

import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.attention_core import attention
from dtransformer.layers.attention_inputs import check_inputs
from dtransformer.layers.attention_mask import Segments, expand_mask, own_or_keras_mask
from dtransformer.layers.base import StreamLayer, check_divisible, register
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

# Pattern of fixed sparse attention, the keys of each query: a plan, computed without devices.


# Blocks of a local window.
NUM_LOCAL_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class FixedSparsePattern:
    """The fixed pattern: a query sees its own window, and a part of each window before.

    A window has four blocks. A query sees no later position; of its own window it sees all others,
    and of each window before it the global positions: those at the end of one block, which is the
    last block for the first of the patterns, the one before for the second, and so on.

    Reference: Child et al., 2019, "Generating long sequences with sparse transformers", arXiv
    1904.10509, §4.3, whose stride l is 4 · block_size, and whose c is `global_size`.

    Args:
        seq_length: number s of positions.
        block_size: positions of a block; four times as many divide s.
        num_patterns: number of patterns, up to 4.
        global_size: how many positions of a block are global, the last ones; all by default.

    Raises:
        ValueError: a window does not divide the sequence, or there are no such patterns.

    Example:

    >>> print(FixedSparsePattern(16, 2, num_patterns=2).picture(1))
    ■ . . . . . . .
    ■ ■ . . . . . .
    ■ ■ ■ . . . . .
    ■ ■ ■ ■ . . . .
    . . □ . ■ . . .
    . . □ . ■ ■ . .
    . . □ . ■ ■ ■ .
    . . □ . ■ ■ ■ ■
    """

    seq_length: int
    block_size: int
    num_patterns: int = NUM_LOCAL_BLOCKS
    global_size: int | None = None

    def __post_init__(self):
        for name in ("seq_length", "block_size", "num_patterns"):
            check_int(name, getattr(self, name))
        if self.seq_length % self.window:
            raise ValueError(
                f"a window of {NUM_LOCAL_BLOCKS} · block_size={self.window} positions must divide "
                f"seq_length={self.seq_length}"
            )
        if self.num_patterns > NUM_LOCAL_BLOCKS:
            raise ValueError(
                f"there are at most {NUM_LOCAL_BLOCKS} patterns, one for each block of a window, "
                f"got {self.num_patterns}"
            )
        if self.global_size is None:
            object.__setattr__(self, "global_size", self.block_size)
        if check_int("global_size", self.global_size) > self.block_size:
            raise ValueError(
                f"global_size={self.global_size} must be at most block_size={self.block_size}"
            )

    @property
    def window(self) -> int:
        """The number of positions of a window."""
        return NUM_LOCAL_BLOCKS * self.block_size

    @property
    def num_windows(self) -> int:
        """The number of windows."""
        return self.seq_length // self.window

    def global_block(self, pattern: int) -> int:
        """Return which block of a window, from 0, has the global positions of a pattern."""
        return NUM_LOCAL_BLOCKS - 1 - pattern % self.num_patterns

    def mask(self, pattern: int) -> np.ndarray:
        """Return what is seen of a pattern, bool [s, s]: queries, keys."""
        positions = np.arange(self.seq_length)
        windows, places = divmod(positions, self.window)
        end = (self.global_block(pattern) + 1) * self.block_size
        is_global = (places >= end - self.global_size) & (places < end)
        own = windows[:, None] == windows[None, :]
        before = windows[:, None] > windows[None, :]
        return own & (positions[:, None] >= positions[None, :]) | before & is_global[None, :]

    def picture(self, pattern: int = 0) -> str:
        """Return a pattern as text, by blocks: ■ for own windows, □ for global ones, . for none."""
        size, number = self.block_size, self.seq_length // self.block_size
        seen = self.mask(pattern).reshape(number, size, number, size).any((1, 3))
        lines = []
        for row, columns in enumerate(seen):
            marks = [
                "." if not is_seen else "■" if row // 4 == column // 4 else "□"
                for column, is_seen in enumerate(columns)
            ]
            lines.append(" ".join(marks))
        return "\n".join(lines)

    def __str__(self):
        return "\n\n".join(self.picture(pattern) for pattern in range(self.num_patterns))


# Queries whose scores are computed together, where windows are smaller.
_QUERIES = 256


@register
class FixedSparseAttention(StreamLayer):
    """Attend from queries to their own window, and to a part of each window before.

    Heads take turns over the patterns; see `FixedSparsePattern`. Scores that no query sees are not
    computed, but for a few beside those of a group of windows. Of a sequence of s positions
    each has 4 · block_size + s · global_size / (4 · block_size) keys at most: with all of a block
    global a quarter of the sequence, with a fixed number and blocks that grow as √s some √s.

    Reference: Child et al., 2019, "Generating long sequences with sparse transformers", arXiv
    1904.10509, §4.3.

    Args:
        num_heads: number n of heads.
        size_per_head: number d of features of a head.
        block_size: positions of a block; a window has four.
        seq_length: number s of positions.
        num_different_global_patterns: number of patterns, up to 4.
        global_size: how many positions of a block are global, the last ones; all by default.

    Call arguments:
        query: tensor [b, s, n·d].
        key: tensor [b, s, n·d].
        value: tensor [b, s, n·d].
        attention_mask: tensor of 0 and 1, or bool: [b, s], [b, 1, s] or [b, s, s]; 1 where a query
            may attend, if the pattern allows it. Or `Segments`. None for everywhere.

    Output shape:
        The query's.

    Raises:
        ValueError: four blocks do not divide the sequence, or model_parallel does not divide
            the heads.

    Example:

    >>> x = tf.zeros((2, 64, 16))
    >>> FixedSparseAttention(4, 4, block_size=4, seq_length=64)(x, x, x).shape
    TensorShape([2, 64, 16])
    """

    def __init__(
        self,
        num_heads: int,
        size_per_head: int,
        block_size: int,
        seq_length: int = 1024,
        num_different_global_patterns: int = NUM_LOCAL_BLOCKS,
        global_size: int | None = None,
        **kwargs,
    ):
        given = given_arguments(locals())
        super().__init__(**kwargs)
        self.arguments = given
        self.num_heads = check_int("num_heads", num_heads)
        self.size_per_head = check_int("size_per_head", size_per_head)
        check_divisible(num_heads=num_heads)
        self.pattern = FixedSparsePattern(
            seq_length, block_size, num_different_global_patterns, global_size
        )

    def call(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        attention_mask: tf.Tensor | Segments | None = None,
    ) -> tf.Tensor:
        attention_mask = own_or_keras_mask(attention_mask, key)
        size = self.num_heads * self.size_per_head
        check_inputs(size, query, key, value, self.pattern.seq_length)
        q, k, v = (self._heads(x) for x in (query, key, value))
        q *= self.size_per_head**-0.5
        global_keys, global_values = self._global_positions(k), self._global_positions(v)
        at_once = max(_QUERIES // self.pattern.window, 1)
        contexts = []
        for first in range(0, self.pattern.num_windows, at_once):
            windows = range(first, min(first + at_once, self.pattern.num_windows))
            rows = slice(first * self.pattern.window, windows.stop * self.pattern.window)
            num_global = windows[-1] * self.pattern.global_size
            keys, values = (
                [x[:, :, :num_global]] * (num_global > 0) + [own[:, :, rows]]
                for x, own in ((global_keys, k), (global_values, v))
            )
            seen = self._seen(windows, rows, num_global, attention_mask)
            softmax = "float64" if q.dtype == "float64" else "float32"
            contexts.append(
                attention(
                    q[:, :, rows],
                    keys,
                    values,
                    seen,
                    softmax_compute_type=softmax,
                    implementation="reference",
                )
            )
        context = contexts[0] if len(contexts) == 1 else tf.concat(contexts, axis=2)
        # [batch, heads, length, head_dim] -> [batch, length, heads · head_dim]
        context = constrain(context, ("batch", "heads", None, "head_dim"))
        context = tf.transpose(context, [0, 2, 1, 3])
        return tf.reshape(context, static_or_dynamic_shape(query))

    def _heads(self, x):
        """[b, s, n·d] -> [b, n, s, d]"""
        b = static_or_dynamic_shape(x)[0]
        x = tf.reshape(x, [b, self.pattern.seq_length, self.num_heads, self.size_per_head])
        return constrain(tf.transpose(x, [0, 2, 1, 3]), ("batch", "heads", None, "head_dim"))

    def _seen(self, windows, rows, num_global, mask):
        """Return what queries of some windows see of global positions before, and of these windows."""
        window_of = np.repeat(windows, self.pattern.window)
        of_global = np.repeat(range(windows[-1]), self.pattern.global_size)
        near = np.tril(window_of[:, None] == window_of)
        seen = np.concatenate([window_of[:, None] > of_global, near], axis=1)[None, None]
        if mask is None:
            return tf.constant(seen)
        own = _part_of(mask, rows, rows)
        if num_global:
            far = self._global_part(mask, rows, num_global)
            own = tf.concat([far, own | tf.zeros_like(far[..., :1])], axis=-1)
        return own & seen

    def _global_positions(self, x):
        """[b, n, s, d] -> [b, n, s / l · c, d]: those that queries of later windows see of a head."""
        b, n, _, d = static_or_dynamic_shape(x)
        blocks = [b, n, self.pattern.num_windows, NUM_LOCAL_BLOCKS, self.pattern.block_size, d]
        x = tf.reshape(x, blocks)[..., -self.pattern.global_size :, :]
        is_global = np.zeros([self.num_heads, NUM_LOCAL_BLOCKS], "bool")
        for head in range(self.num_heads):
            is_global[head, self.pattern.global_block(head)] = True
        # A selection, whose heads may be sharded, and not a look-up.
        is_global = tf.cast(is_global, x.dtype)[None, :, None, :, None, None]
        x = tf.reduce_sum(x * is_global, axis=3)
        length = self.pattern.num_windows * self.pattern.global_size
        return constrain(
            tf.reshape(x, [b, self.num_heads, length, d]), ("batch", "heads", None, None)
        )

    def _global_part(self, mask, rows, num_global):
        """Return a mask of queries and global keys, bool [b, n, u·l or 1, …]."""
        all_keys = slice(0, self.pattern.seq_length)
        part = tf.cast(_part_of(mask, rows, all_keys), self.compute_dtype)
        part = self._global_positions(tf.transpose(part, [0, 1, 3, 2]))
        return tf.transpose(part, [0, 1, 3, 2])[..., :num_global] > 0


def _part_of(mask, rows, columns):
    """Return a mask [b, 1, rows or 1, columns] of ranges of queries and keys, bool."""
    if isinstance(mask, Segments):
        return expand_mask(Segments(mask.queries[:, rows], mask.keys[:, columns]))
    mask = expand_mask(mask)
    if mask.shape[2] != 1:
        mask = mask[:, :, rows]
    return mask[..., columns]
