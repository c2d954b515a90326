"""Training noise outside of layers: dropout of adapter inputs and noise on embeddings."""

import dataclasses

import tensorflow as tf

from dtransformer.parallel.mesh.random_numbers import kept_elements, random_floats
from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.dropout_seed import (
    RandomLayer,
    current_dropout_seed,
    current_random_id,
)
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


@dataclasses.dataclass(frozen=True, eq=False)
class InputDropout(RandomLayer):
    """Dropout of a low-rank adapter's inputs, in training steps only.

    Args:
        rate: Float. Fraction of elements to drop.
        path: Path of the kernel, which selects the random numbers.
    """

    rate: float
    path: str

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        if not trace.is_training_step():
            return x
        shape = static_or_dynamic_shape(x)
        seed = current_dropout_seed()
        is_kept = kept_elements(shape, self.rate, seed, current_random_id(self))
        return tf.where(is_kept, x / tf.cast(1 - self.rate, x.dtype), tf.zeros([], x.dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingNoise(RandomLayer):
    """Uniform noise U(−a, a) on embeddings with a = α / √(s·h), in training steps only.

    Reference: [Jain et al., 2023](https://arxiv.org/abs/2310.05914) (NEFTune), algorithm 1, where s
    is the length of the row

    Args:
        alpha: Float α.
        path: String that selects the random numbers.

    Call arguments:
        x: Tensor of shape `[b, s, h]`.
    """

    alpha: float
    path: str

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        if not trace.is_training_step():
            return x
        shape = static_or_dynamic_shape(x)
        noise = 2 * random_floats(shape, current_dropout_seed(), current_random_id(self)) - 1
        size = tf.cast(shape[1], "float32") * shape[2]
        return x + tf.cast(noise * self.alpha * tf.math.rsqrt(size), x.dtype)
