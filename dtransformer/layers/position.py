"""Position embeddings and token-type embeddings."""

import keras
import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.arguments import check_floating
from dtransformer.layers.base import StreamLayer, register
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.tensor_parallel.embedding import look_up
from dtransformer.parallel.tensor_parallel.linear import column_parallel
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape

POSITION_KINDS = "learned", "sinusoidal", "sinusoidal_paper"


@register
class PositionEmbedding(StreamLayer):
    """Add an embedding of each position to the inputs.

    Reference: [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), section 3.5, for sinusoidal
    embeddings

    Args:
        max_length: Integer. Number of learned positions. Sinusoidal embeddings have no limit.
        kind: `"learned"`, `"sinusoidal"` with wavelengths from 2π to 10000·2π, or
            `"sinusoidal_paper"` with the paper's formula and a slightly shorter longest wavelength.
            Defaults to `"sinusoidal"`.
        initializer: Keras initializer of the learned table, or its name. Defaults to `"normal"`.
        offset: Integer. Index of the first position. A learned table also has rows for the
            positions before it, which are unused. RoBERTa and BART start at 2. Defaults to `0`.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`. Learned positions require s ≤ `max_length`.
        start: Position of the first input: an integer, or an int32 tensor of shape `[b]` for each
            row. Positions below 0 count as 0. Defaults to `0`.
        segments: Integer tensor of shape `[b, s]` with the segment ids of packed sequences.
            Positions restart in each segment. Defaults to `None`.

    Output shape:
        `[b, s, h]`

    Raises:
        ValueError: If the sequence is longer than the learned table.
    """

    pipeline_stage = 0

    def __init__(
        self,
        max_length: int,
        kind: str = "sinusoidal",
        initializer: str | keras.initializers.Initializer = "normal",
        offset: int = 0,
        **kwargs,
    ):
        super().__init__(**kwargs)
        if kind not in POSITION_KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(POSITION_KINDS)}, got {kind!r}.")
        self.max_length = check_int("max_length", max_length)
        self.kind = kind
        self.initializer = initializer
        self.offset = check_int("offset", offset, minimum=0)

    def build(self, input_shape: tuple) -> None:
        if self.kind == "learned":
            self.require_features(input_shape[-1])
            self.table = self.add_weight(
                (self.max_length + self.offset, input_shape[-1]),
                self.initializer,
                axes=("position", "embed"),
                name="table",
            )

    def call(
        self, inputs: tf.Tensor, start: int | tf.Tensor = 0, segments: tf.Tensor | None = None
    ) -> tf.Tensor:
        check_floating("inputs", inputs)
        length = static_or_dynamic_shape(inputs)[1]
        ends = self.kind == "learned" and segments is None
        if ends and (inputs.shape[1] or 0) > self.max_length:
            raise ValueError(
                f"The sequence has {inputs.shape[1]} positions, but the learned positions end at "
                f"`max_length={self.max_length}`."
            )
        positions = tf.range(length)
        if ends and inputs.shape[1] is None:
            # `tf.slice` checks its size on the host. `tf.gather` on a GPU returns zeros beyond the
            # table without an error.
            positions = tf.slice(tf.range(self.max_length), [0], [length], "up_to_max_length")
        by_rows = segments is not None or getattr(start, "shape", None) not in (None, ())
        if by_rows and segments is None:
            positions = tf.maximum(start[:, None] + positions, 0)
        else:
            positions += start
        if segments is not None:
            positions -= segment_starts(segments)
        if self.offset:
            positions += self.offset
        if self.kind == "learned" and by_rows:
            rows = look_up(tf.convert_to_tensor(self.table), positions, "position")
        elif self.kind == "learned":
            rows = tf.gather(tf.convert_to_tensor(self.table), positions)
        else:
            rows = sinusoidal_positions(
                positions, inputs.shape[-1], by_paper=self.kind == "sinusoidal_paper"
            )
        return inputs + tf.cast(rows, inputs.dtype)


def segment_starts(segments: tf.Tensor) -> tf.Tensor:
    """Return the first position of each position's segment.

    A segment ends where the id changes.

    Args:
        segments: Integer tensor of shape `[b, s]`.

    Returns:
        An int32 tensor of shape `[b, s]`.
    """
    length = static_or_dynamic_shape(segments)[1]
    begins = tf.pad(segments[:, 1:] != segments[:, :-1], [[0, 0], [1, 0]])
    first = tf.where(begins, tf.range(length), 0)
    # Cumulative maximum by doubling the step, since DTensor has none.
    max_length = length if isinstance(length, int) else 2**30
    for step in (2**power for power in range((max_length - 1).bit_length())):
        earlier = tf.pad(first, [[0, 0], [tf.minimum(step, length), 0]])[:, :length]
        first = tf.maximum(first, earlier)
    # DTensor cannot pad tensors that are sharded along the length.
    return constrain(first, ("batch", None))


def sinusoidal_positions(
    positions: tf.Tensor, hidden_size: int, by_paper: bool = False
) -> tf.Tensor:
    """Return sines and cosines of positions at wavelengths from 2π to 10000·2π.

    Args:
        positions: Integer tensor of shape `[s]` or `[b, s]`.
        hidden_size: Integer. Number h of features. The first half are sines, the second half
            cosines.
        by_paper: Boolean, whether the longest wavelength follows the paper's formula, 10000^(1 −
            2/h)·2π. Defaults to `False`.

    Returns:
        A float32 tensor of shape `[s, h]` or `[b, s, h]`.
    """
    half = (hidden_size + 1) // 2
    last = hidden_size / 2 if by_paper else max(half - 1, 1)
    frequencies = 10000.0 ** (-np.arange(half) / last)
    angles = tf.cast(positions, "float32")[..., None] * frequencies.astype("float32")
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)[..., :hidden_size]


@register
class TokenTypeEmbedding(StreamLayer):
    """Add an embedding of each token's type, such as its sentence in a pair.

    Reference: [Devlin et al., 2019](https://arxiv.org/abs/1810.04805), section 3

    Args:
        num_types: Integer. Number of types, usually small.
        initializer: Keras initializer or its name. Defaults to `"normal"`.

    Call arguments:
        inputs: Tensor of shape `[b, s, h]`.
        token_types: Integer tensor of shape `[b, s]` in [0, num_types). Defaults to type 0.

    Output shape:
        `[b, s, h]`

    Example:

    >>> TokenTypeEmbedding(2)(tf.zeros((1, 3, 8)), tf.constant([[0, 0, 1]])).shape
    TensorShape([1, 3, 8])
    """

    pipeline_stage = 0

    def __init__(
        self, num_types: int, initializer: str | keras.initializers.Initializer = "normal", **kwargs
    ):
        super().__init__(**kwargs)
        self.num_types = check_int("num_types", num_types)
        self.initializer = initializer

    def build(self, input_shape: tuple, *args) -> None:
        self.require_features(input_shape[-1])
        self.table = self.add_weight(
            (self.num_types, input_shape[-1]), self.initializer, axes=(None, "embed"), name="table"
        )

    def call(self, inputs: tf.Tensor, token_types: tf.Tensor | None = None) -> tf.Tensor:
        check_floating("inputs", inputs)
        if token_types is None:
            token_types = tf.zeros(static_or_dynamic_shape(inputs)[:2], "int32")
        # Use a product; its gradient is reduced to the few rows of the table before it is sent.
        is_type = tf.one_hot(tf.cast(token_types, "int32"), self.num_types, dtype=inputs.dtype)
        (rows,) = column_parallel(is_type, [self.table], ("embed",))
        return inputs + constrain(rows, ("batch", "length", None))
