"""Low-rank addition to a frozen kernel: a product of two small factors beside it.

Reference: Hu et al., 2021, "LoRA: Low-rank adaptation of large language models", arXiv
2106.09685, §4.1.
"""

import dataclasses

import keras
import tensorflow as tf

from dtransformer.parallel.ops.training_noise import InputDropout


@dataclasses.dataclass(frozen=True, eq=False)
class LowRank:
    """The low-rank addition to a kernel W: a product with it is x · W + scale · (x · A) · B.

    W + scale · A · B is never in memory. A kernel has it as its attribute `low_rank`.

    Args:
        a: variable A [*inputs, r].
        b: variable B [r, *outputs].
        scale: α / r.
        dropout: of x before A; None for none.
    """

    a: keras.Variable
    b: keras.Variable
    scale: float
    dropout: InputDropout | None = None


def low_rank_of(kernel: tf.Tensor | keras.Variable) -> LowRank | None:
    """Return the low-rank addition to a kernel; None without one."""
    return getattr(kernel, "low_rank", None)
