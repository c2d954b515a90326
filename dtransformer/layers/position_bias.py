"""Position biases of attention's scores: by distance, another number for each head."""

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
    """A bias of scores that depends on the distance of a key from a query alone.

    Args:
        of_distances: a function of `tensors` and of distances, int [l], negative for keys before
            the query, that returns what is added: a tensor [l, n].
        tensors: list of the tensors that it reads, which may have gradients.
    """

    def __init__(self, of_distances: Callable, tensors: Sequence[tf.Tensor] = ()):
        self._of_distances, self.tensors = of_distances, list(tensors)

    def block(
        self,
        tensors: Sequence[tf.Tensor],
        first_query: int | tf.Tensor,
        num_queries: int,
        first_key: int | tf.Tensor,
        num_keys: int,
    ) -> tf.Tensor:
        """Return the bias [n, s, t] of s queries and t keys whose positions follow each other.

        Args:
            tensors: as `self.tensors`.
            first_query, first_key: positions.
            num_queries, num_keys: numbers s and t.
        """
        s, t = num_queries, num_keys
        nearest = first_key - first_query - (s - 1)
        values = tf.transpose(self._of_distances(tensors, nearest + tf.range(s + t - 1)))
        if isinstance(s, int) and s == 1:
            return values[:, None, :]
        # Row i has the values from place s - 1 - i on. All rows one after the other, each with all
        # of the values, are read in rows that are one shorter: so no element is looked up. Zeros are
        # added to repeat them, as DTensor has to know the shapes in the gradient, too.
        n, length = values.shape[0], s + t - 1
        rows = tf.reshape(values[:, None, :] + tf.zeros([s, 1], values.dtype), [n, s * length])
        rows = rows[:, s - 1 : s - 1 + s * (length - 1)]
        return tf.reshape(rows, [n, s, length - 1])[:, :, :t]

    def of_positions(self, queries: tf.Tensor, keys: tf.Tensor) -> tf.Tensor:
        """Return the bias [n, s, t] of queries and keys at any positions, int [s] and [t]."""
        distances = keys[None, :] - queries[:, None]
        values = tf.transpose(self._of_distances(self.tensors, tf.reshape(distances, [-1])))
        return tf.reshape(values, [values.shape[0], *static_or_dynamic_shape(distances)])


def alibi(num_heads: int) -> PositionBias:
    """Return the linear bias of ALiBi: less the further a key is away.

    Reference: Press et al., 2021, "Train short, test long", arXiv 2108.12409, §3. Where the number
    of heads is no power of 2 the slopes are those of the next lower one, then every second one of
    twice as many.

    Args:
        num_heads: number n of heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]

    def of_distances(_, distances):
        return -tf.abs(tf.cast(distances, "float32"))[:, None] * tf.constant(slopes, "float32")

    return PositionBias(of_distances)


def relative_bias(table: tf.Tensor, max_distance: int, causal: bool) -> PositionBias:
    """Return the learned bias of T5: a number for each head and range of distances.

    Reference: Raffel et al., 2019, arXiv 1910.10683, §2.1.

    Args:
        table: tensor [r, n] of r ranges, from `RelativePositionTable`.
        max_distance: distances from this on share the last range.
        causal: whether keys come before the queries; else half of the ranges are for those after.
    """
    num_ranges = table.shape[0]
    ranges = distance_ranges(num_ranges if causal else num_ranges // 2, max_distance)

    def of_distances(tensors, distances):
        away = tf.maximum(-distances, 0) if causal else tf.abs(distances)
        found = tf.gather(tf.constant(ranges, "int32"), tf.minimum(away, max_distance))
        if not causal:
            found += tf.where(distances > 0, num_ranges // 2, 0)
        # A product: its gradient is one, too, on every device and mesh.
        return tf.matmul(tf.one_hot(found, num_ranges, dtype=tensors[0].dtype), tensors[0])

    return PositionBias(of_distances, [table])


def distance_ranges(num_ranges: int, max_distance: int) -> np.ndarray:
    """Return the range of each distance up to `max_distance`, an int array [max_distance + 1].

    Half of the ranges have one distance each, the others grow with the distance's logarithm.

    Raises:
        ValueError: the logarithm's ranges would begin after `max_distance`.
    """
    exact = num_ranges // 2
    if not 0 < exact < max_distance:
        raise ValueError(
            f"relative_max_distance={max_distance} must be more than the {exact} distances that "
            "have a range of their own, and there must be one at least"
        )
    distances = np.arange(max_distance + 1)
    share = np.log(np.maximum(distances, exact).astype("float32") / exact)
    share /= np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (share * (num_ranges - exact)).astype("int32"), num_ranges - 1)
    return np.where(distances < exact, distances, far)


@register
class RelativePositionTable(Layer):
    """The table of T5's relative positions, which all blocks of a stack share.

    Args:
        num_heads: number n of heads.
        num_ranges: number r of ranges of distances.

    Call arguments:
        inputs: tensor; what is not read.

    Output shape:
        [r, n], the table, in the type that it is stored in.
    """

    pipeline_stage = 0
    results_that_are_weights = types.MappingProxyType({0: "table"})

    def __init__(self, num_heads: int, num_ranges: int = 32, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = check_int("num_heads", num_heads)
        self.num_ranges = check_int("num_ranges", num_ranges, least=4)

    def build(self, input_shape: tuple | None = None) -> None:
        shape, axes = (self.num_ranges, self.num_heads), (None, "heads")
        self.table = self.add_weight(shape, "normal", axes=axes, name="table", autocast=False)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.convert_to_tensor(self.table)

    def compute_output_spec(self, inputs: tf.Tensor) -> keras.KerasTensor:
        return keras.KerasTensor((self.num_ranges, self.num_heads), self.variable_dtype)
