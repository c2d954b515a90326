"""Embeddings of positions."""

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
    """Add an embedding of the position.

    Reference: Vaswani et al., 2017, "Attention is all you need", §3.5, for the
    sinusoidal kind.

    Args:
        max_length: number of positions of the learned kind; the sinusoidal kind has
            no limit.
        kind: `"learned"`, `"sinusoidal"`, of wavelengths from 2π to 10000·2π, or
            `"sinusoidal_paper"`, by the paper's formula, whose longest is a little shorter.
        initializer: a Keras initializer, or its name, of the learned kind.
        offset: number of the first position. A learned table has rows for those before it, which
            are not used: RoBERTa's and BART's first position is 2.

    Call arguments:
        inputs: tensor [b, s, h]; s ≤ max_length for the learned kind.
        start: position of the first input, or of each row's first input, int32 [b]: those before
            0 count as 0.
        segments: int tensor [b, s], where several sequences are packed into one: the number of
            each position's sequence. Positions begin anew in each.

    Output shape:
        [b, s, h]
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
            raise ValueError(f"positions must be one of {', '.join(POSITION_KINDS)}, got {kind!r}")
        self.max_length = check_int("max_length", max_length)
        self.kind = kind
        self.initializer = initializer
        self.offset = check_int("offset", offset, least=0)

    def build(self, input_shape: tuple) -> None:
        if self.kind == "learned":
            self.takes(input_shape[-1])
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
                f"the sequence has {inputs.shape[1]} positions, but the learned positions end at "
                f"max_length={self.max_length}"
            )
        positions = tf.range(length)
        if ends and inputs.shape[1] is None:
            # A slice of too few is an error, whose sizes are on the host; `gather` on a GPU tells none.
            positions = tf.slice(tf.range(self.max_length), [0], [length], "up_to_max_length")
        by_rows = segments is not None or getattr(start, "shape", None) not in (None, ())
        if by_rows and segments is None:
            positions = tf.maximum(start[:, None] + positions, 0)
        else:
            positions += start
        if segments is not None:
            positions -= first_of_segment(segments)
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


def first_of_segment(segments: tf.Tensor) -> tf.Tensor:
    """Return where the segment of each position begins: [b, s] -> int32 [b, s].

    A segment ends where another number follows.
    """
    length = static_or_dynamic_shape(segments)[1]
    begins = tf.pad(segments[:, 1:] != segments[:, :-1], [[0, 0], [1, 0]])
    first = tf.where(begins, tf.range(length), 0)
    # The highest so far, over 2, 4, 8, … positions: DTensor has no cumulative maximum.
    known = length if isinstance(length, int) else 2**30
    for step in (2**power for power in range((known - 1).bit_length())):
        earlier = tf.pad(first, [[0, 0], [tf.minimum(step, length), 0]])[:, :length]
        first = tf.maximum(first, earlier)
    return constrain(first, ("batch", None))  # DTensor cannot pad what it shards along the length


def sinusoidal_positions(
    positions: tf.Tensor, hidden_size: int, by_paper: bool = False
) -> tf.Tensor:
    """Return sin and cos of positions at wavelengths from 2π to 10000·2π.

    Args:
        positions: int tensor [s] or [b, s].
        hidden_size: number h of features; the first half are sines, the second
            cosines.
        by_paper: whether the longest wavelength is 10000^(1 − 2/h)·2π, by the paper's formula.

    Returns:
        A float32 tensor [s, h] or [b, s, h].
    """
    half = (hidden_size + 1) // 2
    last = hidden_size / 2 if by_paper else max(half - 1, 1)
    frequencies = 10000.0 ** (-np.arange(half) / last)
    angles = tf.cast(positions, "float32")[..., None] * frequencies.astype("float32")
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)[..., :hidden_size]


# Embeddings of the types of tokens, such as which of two sentences they are of.


@register
class TokenTypeEmbedding(StreamLayer):
    """Add an embedding of each token's type.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, §3.

    Args:
        num_types: number of types, few.
        initializer: a Keras initializer, or its name.

    Call arguments:
        inputs: tensor [b, s, h].
        token_types: int tensor [b, s], in [0, num_types); None for all of type 0.

    Output shape:
        [b, s, h]

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
        self.takes(input_shape[-1])
        self.table = self.add_weight(
            (self.num_types, input_shape[-1]), self.initializer, axes=(None, "embed"), name="table"
        )

    def call(self, inputs: tf.Tensor, token_types: tf.Tensor | None = None) -> tf.Tensor:
        check_floating("inputs", inputs)
        if token_types is None:
            token_types = tf.zeros(static_or_dynamic_shape(inputs)[:2], "int32")
        # As a product: its gradient is summed to the table's few rows before it is sent.
        is_type = tf.one_hot(tf.cast(token_types, "int32"), self.num_types, dtype=inputs.dtype)
        (rows,) = column_parallel(is_type, [self.table], ("embed",))
        return inputs + constrain(rows, ("batch", "length", None))
