"""Biases of attention scores by distance, with separate values for each head."""

import math
import types
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from dtransformer.errors import check_int
from dtransformer.layers.base import Layer, register
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


class PositionBias:
    """Bias of attention scores that depends only on the distance between key and query.

    Args:
        compute_bias: Function of `tensors` and an integer tensor of distances `[l]` (key position
            minus query position) that returns the biases, a tensor of shape `[l, n]`.
        tensors: List of tensors that `compute_bias` reads. They may have gradients. Defaults to
            none.
    """

    def __init__(self, compute_bias: Callable, tensors: Sequence[tf.Tensor] = ()):
        self._compute_bias = compute_bias
        self.tensors = list(tensors)

    def block(
        self,
        tensors: Sequence[tf.Tensor],
        first_query: int | tf.Tensor,
        num_queries: int,
        first_key: int | tf.Tensor,
        num_keys: int,
        stride: int = 1,
    ) -> tf.Tensor:
        """Return the biases of equally spaced queries and consecutive keys.

        Args:
            tensors: List of tensors, in the form of the attribute `tensors`.
            first_query, first_key: Integers. Positions of the first query and the first key.
            num_queries, num_keys: Integers s and t.
            stride: Integer. Distance between the positions of two queries. Defaults to `1`.

        Returns:
            A tensor of shape `[n, s, t]`.
        """
        s = num_queries
        t = num_keys
        last = (s - 1) * stride
        nearest = first_key - first_query - last
        length = last + t
        values = tf.transpose(self._compute_bias(tensors, nearest + tf.range(length)))
        if isinstance(s, int) and s == 1:
            return values[:, None, :]
        # Row i of the result starts at element (s - 1 - i) * stride of the values. The values are
        # repeated for each row, flattened, and read in rows that are `stride` elements shorter,
        # which shifts them without a gather. They are repeated by adding zeros, since DTensor must
        # also know the shapes in the gradient.
        n = values.shape[0]
        rows = tf.reshape(values[:, None, :] + tf.zeros([s, 1], values.dtype), [n, s * length])
        rows = rows[:, last : last + s * (length - stride)]
        return tf.reshape(rows, [n, s, length - stride])[:, :, :t]

    def at_positions(self, queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """Return the biases of queries and keys at arbitrary positions.

        Args:
            queries: Integer tensor of shape `[s]`.
            keys: Integer tensor of shape `[t]`.

        Returns:
            A tensor of shape `[n, s, t]`.
        """
        distances = keys[None, :] - queries[:, None]
        values = tf.transpose(self._compute_bias(self.tensors, tf.reshape(distances, [-1])))
        return tf.reshape(values, [values.shape[0], *static_or_dynamic_shape(distances)])


def alibi(num_heads: int) -> PositionBias:
    """Return ALiBi's bias, which decreases linearly with the distance.

    If the number of heads is not a power of 2, the slopes of the next lower power p are followed by
    every second slope of 2·p heads.

    Reference: [Press et al., 2021](https://arxiv.org/abs/2108.12409), section 3

    Args:
        num_heads: Integer. Number n of heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]

    def compute_bias(_, distances):
        return -tf.abs(tf.cast(distances, "float32"))[:, None] * tf.constant(slopes, "float32")

    return PositionBias(compute_bias)


def relative_bias(table: tf.Tensor, max_distance: int, causal: bool) -> PositionBias:
    """Return T5's learned bias, which has one value per head and range of distances.

    Reference: [Raffel et al., 2019](https://arxiv.org/abs/1910.10683), section 2.1

    Args:
        table: Tensor of shape `[r, n]`, from `RelativePositionTable`.
        max_distance: Integer. Distances from this one on share the last range.
        causal: Boolean. `True` uses all ranges for keys before the query. `False` reserves half of
            them for keys after it.
    """
    num_ranges = table.shape[0]
    ranges = distance_ranges(num_ranges if causal else num_ranges // 2, max_distance)

    def compute_bias(tensors, distances):
        lengths = tf.maximum(-distances, 0) if causal else tf.abs(distances)
        index = tf.gather(tf.constant(ranges, "int32"), tf.minimum(lengths, max_distance))
        if not causal:
            index += tf.where(distances > 0, num_ranges // 2, 0)
        # Use a product; its gradient is also a product on every device and mesh.
        return tf.matmul(tf.one_hot(index, num_ranges, dtype=tensors[0].dtype), tensors[0])

    return PositionBias(compute_bias, [table])


def distance_ranges(num_ranges: int, max_distance: int) -> np.ndarray:
    """Return the range index of each distance.

    The first half of the ranges contain one distance each. The others grow logarithmically.

    Args:
        num_ranges: Integer. Number of ranges.
        max_distance: Integer. Largest distance.

    Returns:
        An integer array of shape `[max_distance + 1]`.

    Raises:
        ValueError: If the logarithmic ranges would start above `max_distance`.
    """
    exact = num_ranges // 2
    if not 0 < exact < max_distance:
        raise ValueError(
            f"`relative_max_distance={max_distance}` must be above {exact}, the number of ranges "
            "with a single distance, which must be at least 1."
        )
    distances = np.arange(max_distance + 1)
    fraction = np.log(np.maximum(distances, exact).astype("float32") / exact)
    fraction /= np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (fraction * (num_ranges - exact)).astype("int32"), num_ranges - 1)
    return np.where(distances < exact, distances, far)


@register
class RelativePositionTable(Layer):
    """Table of T5's relative positions, shared by all blocks of a stack.

    Args:
        num_heads: Integer. Number n of heads.
        num_ranges: Integer, at least 4. Number r of ranges of distances. Defaults to `32`.

    Call arguments:
        inputs: Tensor of any shape. Its values are ignored.

    Output shape:
        `[r, n]`, the table in its storage type
    """

    pipeline_stage = 0
    weight_outputs = types.MappingProxyType({0: "table"})

    def __init__(self, num_heads: int, num_ranges: int = 32, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = check_int("num_heads", num_heads)
        self.num_ranges = check_int("num_ranges", num_ranges, minimum=4)

    def build(self, input_shape: tuple | None = None) -> None:
        shape = (self.num_ranges, self.num_heads)
        axes = (None, "heads")
        self.table = self.add_weight(shape, "normal", axes=axes, name="table", autocast=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(self.table)

    def compute_output_spec(self, inputs: tf.Tensor) -> keras.KerasTensor:
        return keras.KerasTensor((self.num_ranges, self.num_heads), self.variable_dtype)
