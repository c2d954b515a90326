"""Low-rank addition to a frozen kernel: a product of two small factors beside it.

Reference: Hu et al., 2021, "LoRA: Low-rank adaptation of large language models", arXiv
2106.09685, §4.1; of magnitudes: Liu et al., 2024, "DoRA: Weight-decomposed low-rank
adaptation", arXiv 2402.09353, §4.
"""

import dataclasses

import keras
import tensorflow as tf

from dtransformer.parallel.ops.training_noise import InputDropout

# Kinds of additions -> the names of their variables: A, B and, of the second, magnitudes m.
KINDS = {"lora": "ab", "dora": "abm"}


@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """The low-rank addition to a kernel W: a product with it is x · W + scale · (x · A) · B.

    With magnitudes m the product is multiplied with m / ‖V‖, of V = W + scale · A · B, with a norm
    for each output, which is a constant to gradients (§4.3). V is in memory for its norms alone. A
    kernel has the addition as its attribute `low_rank`.

    Args:
        a: variable A [*inputs, r].
        b: variable B [r, *outputs].
        scale: α / r.
        dropout: of x before A, and before W in what magnitudes change; None for none.
        m: variable m [*outputs]; None for none.
    """

    a: keras.Variable
    b: keras.Variable
    scale: float
    dropout: InputDropout | None = None
    m: keras.Variable | None = None

    @property
    def factors(self) -> dict[str, keras.Variable]:
        """Its variables by their names: "a", "b" and, where there are magnitudes, "m"."""
        return {"a": self.a, "b": self.b} | ({} if self.m is None else {"m": self.m})

    def norms(self, kernel: tf.Tensor) -> tf.Tensor:
        """Return ‖V‖ of each output, float32 [*outputs].

        Args:
            kernel: the value of W, [*inputs, *outputs].
        """
        a, b, kernel = (tf.cast(x, "float32") for x in (self.a, self.b, kernel))
        inputs = "xyz"[: a.shape.rank - 1]
        outputs = "uvw"[: b.shape.rank - 1]
        added = tf.einsum(f"{inputs}r,r{outputs}->{inputs}{outputs}", a, b)
        squares = tf.square(kernel + self.scale * added)
        return tf.sqrt(tf.reduce_sum(squares, list(range(len(inputs)))))


def low_rank_of(kernel: tf.Tensor | keras.Variable) -> LowRank | None:
    """Return the low-rank addition to a kernel; None without one."""
    return getattr(kernel, "low_rank", None)
