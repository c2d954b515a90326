"""Noise that a trainer's training steps draw where no layer of its own does: as masks of dropout."""

import dataclasses

import tensorflow as tf

from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.dropout_seed import (
    DrawsMasks,
    current_dropout_seed,
    kept_elements,
    layer_number,
    random_floats,
)
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@dataclasses.dataclass(frozen=True, eq=False)
class InputDropout(DrawsMasks):
    """Dropout of what a low-rank addition is multiplied with.

    Args:
        rate: the share that is set to zero.
        path: the kernel's, by which its masks differ from others'.
    """

    rate: float
    path: str

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        if not trace.is_training_step():
            return x
        shape, seed = static_or_dynamic_shape(x), current_dropout_seed()
        is_kept = kept_elements(shape, self.rate, seed, layer_number(self))
        return tf.where(is_kept, x / tf.cast(1 - self.rate, x.dtype), tf.zeros([], x.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingNoise(DrawsMasks):
    """Noise that is added to embeddings: U(−a, a), a = α / √(s·h).

    Reference: Jain et al., 2023, "NEFTune: noisy embeddings improve instruction finetuning", arXiv
    2310.05914, algorithm 1, with s the length of the row.

    Args:
        alpha: α.
        path: what its numbers differ by from those of dropout.

    Call arguments:
        x: tensor [b, s, h].
    """

    alpha: float
    path: str

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        if not trace.is_training_step():
            return x
        shape = static_or_dynamic_shape(x)
        noise = 2 * random_floats(shape, current_dropout_seed(), layer_number(self)) - 1
        size = tf.cast(shape[1], "float32") * shape[2]
        return x + tf.cast(noise * self.alpha * tf.math.rsqrt(size), x.dtype)
