"""From ids of sentences to a padded batch of a translation model."""

import dataclasses

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Padding:
    """How sentences of different lengths become a batch, and its special tokens.

    Args:
        max_length: number of tokens of a side; what is beyond is cut off. The start or end
            token comes in addition.
        bucket_bounds: greatest lengths of the buckets, a special token included, int [buckets]:
            a batch is padded to that of its bucket. None to pad it to its longest row.
        multiple_of: lengths are rounded up to a multiple of it.
        rows_multiple_of: empty rows are added until their number is a multiple of it.
        pad_id, start_id, end_id: ids of the special tokens.
    """

    max_length: int
    bucket_bounds: np.ndarray | None = None
    multiple_of: int = 1
    rows_multiple_of: int = 1
    pad_id: int = 0
    start_id: int = 2
    end_id: int = 3

    def batch(
        self, source: tf.RaggedTensor, target: tf.RaggedTensor
    ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """Return a batch of sentence pairs.

        Args:
            source, target: ids [b, (length)], int32.

        Returns:
            ({"source": int32 [b, s], "target": int32 [b, t]}, labels int32 [b, t]): the target
            begins with the start token, the labels end with the end token.
        """
        source, target = source[:, : self.max_length], target[:, : self.max_length]
        column = tf.ones([target.nrows(out_type=tf.int32), 1], tf.int32)
        labels = tf.concat([target, self.end_id * column], axis=1)
        target = tf.concat([self.start_id * column, target], axis=1)
        least = self._bucket_length(source, labels)
        inputs = {
            "source": self._pad(source, least, self.max_length),
            "target": self._pad(target, least, self.max_length + 1),
        }
        return inputs, self._pad(labels, least, self.max_length + 1)

    def _bucket_length(self, source, labels):
        """Return the greatest length of a batch's bucket; 0 where there are no buckets."""
        if self.bucket_bounds is None:
            return 0
        bounds = tf.constant(self.bucket_bounds, tf.int32)
        longest = tf.maximum(source.bounding_shape()[1] + 1, labels.bounding_shape()[1])
        return bounds[tf.searchsorted(bounds, [tf.cast(longest, tf.int32)])[0]]

    def _pad(self, ids, least, most):
        """Ragged [b, (length)] -> [b, the longest or `least`, rounded up within `most`]."""
        longest = tf.maximum(tf.cast(tf.reduce_max(ids.row_lengths()), tf.int32), least)
        width = tf.minimum(-(-longest // self.multiple_of) * self.multiple_of, most)
        padded = ids.to_tensor(self.pad_id, shape=tf.stack([-1, width]))
        missing = -tf.shape(padded)[0] % self.rows_multiple_of
        padded = tf.pad(padded, [[0, missing], [0, 0]], constant_values=self.pad_id)
        return tf.ensure_shape(padded, [None, None])
