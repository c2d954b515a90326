"""Sparse attention with a fixed pattern: local windows, and a part of each earlier window."""

import dataclasses

import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.arguments import get_init_arguments
from dtransformer.layers.attention_core import reference_attention
from dtransformer.layers.attention_inputs import check_inputs
from dtransformer.layers.attention_mask import Segments, expand_mask, mask_or_keras_mask
from dtransformer.layers.attention_options import AttentionOptions
from dtransformer.layers.base import StreamLayer, check_divisible, register
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

# Number of blocks in a window.
NUM_LOCAL_BLOCKS = 4


@dataclasses.dataclass(frozen=True)
class FixedSparsePattern:
    """Fixed sparse pattern: a query sees its window up to itself, and a part of earlier windows.

    A window has four blocks. In its window a query sees itself and all earlier positions. In each
    earlier window it sees the global positions: the last `global_size` positions of one block.
    Pattern 0 uses the last block of a window, pattern 1 the one before, and so on.

    Reference: [Child et al., 2019](https://arxiv.org/abs/1904.10509), section 4.3. Its stride l is
    `4 * block_size`, and its c is `global_size`.

    Args:
        seq_length: Integer. Number s of positions, a multiple of `4 * block_size`.
        block_size: Integer. Positions per block.
        num_patterns: Integer. Number of patterns, at most 4. Defaults to `4`.
        global_size: Integer. Number of global positions per block, at most `block_size`. Defaults
            to `block_size`.

    Raises:
        ValueError: If a window does not divide the sequence, or another argument is out of range.

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
                f"The window, {NUM_LOCAL_BLOCKS} * block_size = {self.window} positions, must divide "
                f"`seq_length={self.seq_length}`."
            )
        if self.num_patterns > NUM_LOCAL_BLOCKS:
            raise ValueError(
                f"The number of patterns must be at most {NUM_LOCAL_BLOCKS}, one per block of a "
                f"window, got {self.num_patterns}."
            )
        if self.global_size is None:
            object.__setattr__(self, "global_size", self.block_size)
        if check_int("global_size", self.global_size) > self.block_size:
            raise ValueError(
                f"`global_size={self.global_size}` must be at most `block_size={self.block_size}`."
            )

    @property
    def window(self) -> int:
        """Number of positions in a window."""
        return NUM_LOCAL_BLOCKS * self.block_size

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return self.seq_length // self.window

    def global_block(self, pattern: int) -> int:
        """Return the index of the block in a window that has a pattern's global positions."""
        return NUM_LOCAL_BLOCKS - 1 - pattern % self.num_patterns

    def mask(self, pattern: int) -> np.ndarray:
        """Return a pattern as a bool array `[s, s]`, True where query i (row) sees key j."""
        positions = np.arange(self.seq_length)
        windows, places = divmod(positions, self.window)
        end = (self.global_block(pattern) + 1) * self.block_size
        is_global = (places >= end - self.global_size) & (places < end)
        same_window = windows[:, None] == windows[None, :]
        earlier_window = windows[:, None] > windows[None, :]
        return (
            same_window & (positions[:, None] >= positions[None, :])
            | earlier_window & is_global[None, :]
        )

    def picture(self, pattern: int = 0) -> str:
        """Return a pattern as text, one mark per block.

        ■ is a visible block of the query's window, □ a visible block of an earlier window, and `.`
        a hidden block.
        """
        size = self.block_size
        num_blocks = self.seq_length // self.block_size
        visible = self.mask(pattern).reshape(num_blocks, size, num_blocks, size).any((1, 3))
        lines = []
        for row, columns in enumerate(visible):
            marks = [
                "." if not is_visible else "■" if row // 4 == column // 4 else "□"
                for column, is_visible in enumerate(columns)
            ]
            lines.append(" ".join(marks))
        return "\n".join(lines)

    def __str__(self):
        return "\n\n".join(self.picture(pattern) for pattern in range(self.num_patterns))


# Minimum number of queries per call of `attention`. Small windows are grouped.
_MIN_QUERIES = 256


@register
class FixedSparseAttention(StreamLayer):
    """Attention from queries to their window, and to a part of each earlier window.

    Heads cycle through the patterns, see `FixedSparsePattern`. Only scores of visible keys are
    computed, plus a few extra in groups of small windows. In a sequence of s positions each query
    sees at most `4 * block_size + s * global_size / (4 * block_size)` keys. With global blocks,
    this is a quarter of the sequence. With a fixed `global_size`, and blocks that grow as √s, it is
    on the order of √s.

    Reference: [Child et al., 2019](https://arxiv.org/abs/1904.10509), section 4.3

    Args:
        num_heads: Integer. Number n of heads.
        size_per_head: Integer. Features d per head.
        block_size: Integer. Positions per block. A window has four blocks.
        seq_length: Integer. Number s of positions. Defaults to `1024`.
        num_different_global_patterns: Integer. Number of patterns, at most 4. Defaults to `4`.
        global_size: Integer. Number of global positions at the end of a block. Defaults to
            `block_size`.

    Call arguments:
        query, key, value: Tensors of shape `[b, s, n·d]`.
        attention_mask: Boolean or 0/1 tensor of shape `[b, s]`, `[b, 1, s]` or `[b, s, s]`, 1 where
            a query may attend if the pattern allows it; or `Segments`. Defaults to the Keras mask
            of `key`.

    Output shape:
        `[b, s, n·d]`

    Raises:
        ValueError: If four blocks do not divide the sequence, or `model_parallel` does not divide
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
        init_arguments = get_init_arguments(locals())
        super().__init__(**kwargs)
        self.arguments = init_arguments
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
        attention_mask = mask_or_keras_mask(attention_mask, key)
        size = self.num_heads * self.size_per_head
        check_inputs(size, query, key, value, self.pattern.seq_length)
        q, k, v = (self._heads(x) for x in (query, key, value))
        q *= self.size_per_head**-0.5
        global_keys = self._global_positions(k)
        global_values = self._global_positions(v)
        windows_per_call = max(_MIN_QUERIES // self.pattern.window, 1)
        contexts = []
        for first in range(0, self.pattern.num_windows, windows_per_call):
            windows = range(first, min(first + windows_per_call, self.pattern.num_windows))
            rows = slice(first * self.pattern.window, windows.stop * self.pattern.window)
            num_global = windows[-1] * self.pattern.global_size
            keys = [k[:, :, rows]]
            values = [v[:, :, rows]]
            if num_global:
                keys.insert(0, global_keys[:, :, :num_global])
                values.insert(0, global_values[:, :, :num_global])
            visible = self._visible(windows, rows, num_global, attention_mask)
            softmax = "float64" if q.dtype == "float64" else "float32"
            options = AttentionOptions(visible, softmax_compute_type=softmax)
            contexts.append(reference_attention(q[:, :, rows], keys, values, options))
        context = contexts[0] if len(contexts) == 1 else tf.concat(contexts, axis=2)
        # [batch, heads, length, head_dim] -> [batch, length, heads · head_dim]
        context = constrain(context, ("batch", "heads", None, "head_dim"))
        context = tf.transpose(context, [0, 2, 1, 3])
        return tf.reshape(context, static_or_dynamic_shape(query))

    def _heads(self, x):
        """Reshape and transpose `[b, s, n·d]` to `[b, n, s, d]`."""
        b = static_or_dynamic_shape(x)[0]
        x = tf.reshape(x, [b, self.pattern.seq_length, self.num_heads, self.size_per_head])
        return constrain(tf.transpose(x, [0, 2, 1, 3]), ("batch", "heads", None, "head_dim"))

    def _visible(self, windows, rows, num_global, mask):
        """Return the mask of a group of windows: earlier global positions, then the windows."""
        query_windows = np.repeat(windows, self.pattern.window)
        global_windows = np.repeat(range(windows[-1]), self.pattern.global_size)
        near = np.tril(query_windows[:, None] == query_windows)
        pattern = np.concatenate([query_windows[:, None] > global_windows, near], axis=1)
        pattern = pattern[None, None]
        if mask is None:
            return tf.constant(pattern)
        visible_keys = _slice_mask(mask, rows, rows)
        if num_global:
            global_mask = self._global_mask(mask, rows, num_global)
            visible_keys = tf.concat(
                [global_mask, visible_keys | tf.zeros_like(global_mask[..., :1])], axis=-1
            )
        return visible_keys & pattern

    def _global_positions(self, x):
        """Select the global positions of each head: `[b, n, s, d]` -> `[b, n, s / l · c, d]`."""
        b, n, _, d = static_or_dynamic_shape(x)
        blocks = [b, n, self.pattern.num_windows, NUM_LOCAL_BLOCKS, self.pattern.block_size, d]
        x = tf.reshape(x, blocks)[..., -self.pattern.global_size :, :]
        is_global = np.zeros([self.num_heads, NUM_LOCAL_BLOCKS], "bool")
        for head in range(self.num_heads):
            is_global[head, self.pattern.global_block(head)] = True
        # A masked sum works with sharded heads, a gather does not.
        is_global = tf.cast(is_global, x.dtype)[None, :, None, :, None, None]
        x = tf.reduce_sum(x * is_global, axis=3)
        length = self.pattern.num_windows * self.pattern.global_size
        return constrain(
            tf.reshape(x, [b, self.num_heads, length, d]), ("batch", "heads", None, None)
        )

    def _global_mask(self, mask, rows, num_global):
        """Return the mask of queries and global keys, bool `[b, n, rows or 1, num_global]`."""
        all_keys = slice(0, self.pattern.seq_length)
        part = tf.cast(_slice_mask(mask, rows, all_keys), self.compute_dtype)
        part = self._global_positions(tf.transpose(part, [0, 1, 3, 2]))
        return tf.transpose(part, [0, 1, 3, 2])[..., :num_global] > 0


def _slice_mask(mask, rows, columns):
    """Return the bool mask `[b, 1, rows or 1, columns]` for slices of queries and keys."""
    if isinstance(mask, Segments):
        return expand_mask(Segments(mask.queries[:, rows], mask.keys[:, columns]))
    mask = expand_mask(mask)
    if mask.shape[2] != 1:
        mask = mask[:, :, rows]
    return mask[..., columns]
