"""Low-rank adapter of a frozen kernel: the product of two small factors.

References:

- [Hu et al., 2021](https://arxiv.org/abs/2106.09685) (LoRA), section 4.1
- [Liu et al., 2024](https://arxiv.org/abs/2402.09353) (DoRA), section 4, for magnitudes
"""

import dataclasses
from collections.abc import Callable

import keras
import tensorflow as tf

# Kind of adapter -> suffixes of its variables: A, B and the magnitudes m.
KINDS = {"lora": "ab", "dora": "abm"}
# Types of the variables. Updates of bfloat16 are rounded stochastically.
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank adapter of a kernel W. The product becomes x · W + scale · (x · A) · B.

    With magnitudes m, this product is multiplied by m / ‖V‖, where V = W + scale · A · B. The norm
    is taken for each output and is constant in the gradient (section 4.3). V is only in memory
    while its norms are computed. A kernel stores its adapter in the attribute `low_rank`.

    Args:
        a: Variable A of shape `[*inputs, r]`.
        b: Variable B of shape `[r, *outputs]`.
        scale: Float, α / r.
        dropout: `InputDropout` of x before A and, with magnitudes, in the adapter's change of x ·
            W. Defaults to `None`.
        m: Variable m of shape `[*outputs]`. Defaults to `None`, no magnitudes.
    """

    a: keras.Variable
    b: keras.Variable
    scale: float
    dropout: Callable[[tf.Tensor], tf.Tensor] | None = None
    m: keras.Variable | None = None

    @property
    def factors(self) -> dict[str, keras.Variable]:
        """Dictionary of the variables: `"a"`, `"b"` and, with magnitudes, `"m"`."""
        return {"a": self.a, "b": self.b} | ({} if self.m is None else {"m": self.m})

    def norms(self, kernel: tf.Tensor) -> tf.Tensor:
        """Return ‖V‖ for each output, a float32 tensor of shape `[*outputs]`.

        Args:
            kernel: Value of W, a tensor of shape `[*inputs, *outputs]`.
        """
        a, b, kernel = (tf.cast(x, "float32") for x in (self.a, self.b, kernel))
        inputs = "xyz"[: a.shape.rank - 1]
        outputs = "uvw"[: b.shape.rank - 1]
        delta = tf.einsum(f"{inputs}r,r{outputs}->{inputs}{outputs}", a, b)
        squares = tf.square(kernel + self.scale * delta)
        return tf.sqrt(tf.reduce_sum(squares, list(range(len(inputs)))))


def get_low_rank(kernel: tf.Tensor | keras.Variable) -> LowRank | None:
    """Return the low-rank adapter of a kernel, or `None`."""
    return getattr(kernel, "low_rank", None)
