"""Differentiable collectives for custom models and training loops.

The gradient of a collective is another collective, namely the gradient of the sum of all
ranks' losses. Callers follow two rules:

- All ranks of the group make the same calls in the same order, and so do the gradients.
  Every rank's loss must depend on the result (add `0 * result` otherwise), and every rank
  must compute the gradient.
- `x` is recorded by the `tf.GradientTape` on all ranks or on none. Call `tape.watch` on a
  tensor that only supplies the shape, as on the ranks that are not the root of a
  `broadcast`. If the tape surrounds a `tf.function`, pass the tensor as an argument.

If calls, shapes or dtypes differ, every rank raises a ValueError: in eager code at each
call (the ranks first compare a few bytes), in a `tf.function` during tracing. A rank that
retraces a function for a shape that the other ranks do not have also raises it. The other
ranks' function then fails with `tf.errors.FailedPreconditionError`. The same error occurs
on every rank if dimensions differ that are unknown during tracing. If such a dimension is
not divisible, that rank fails with an `InvalidArgumentError` while the other ranks wait
for it. Horovod logs a warning about waiting ranks after 60 seconds.

`group=None` means all ranks of the job. `root`, `to` and `source` are positions in the
group. The order of the group is the order of concatenations and shards. A group with a
single rank works without Horovod.

Tensors may have dtype bool, int8 to int64, uint8, uint16, float16, bfloat16, float32 or
float64. They are sent in their dtype (bfloat16 as 16 bits), except in an all-reduce:
bfloat16 is then sent as float32, and bools and integers of fewer than 32 bits as int32.
Sums of bfloat16 are computed in float32. Bools cannot be summed, and sums of small integers
wrap around.

Errors contain the function, the shape, the group and the cause:

    ValueError: If an axis is out of range, the group size does not divide a dimension, the
        root is outside the group, the dtype is not supported, the rank is not in the group,
        or the ranks make different calls.

Example:

>>> import tensorflow as tf
>>> group = new_group([0])
>>> all_reduce_sum(tf.constant([1.0, 2.0]), group).numpy().tolist()
[1.0, 2.0]
"""

import dtransformer.start  # noqa: F401 (imported first to silence TensorFlow's startup logs)
from dtransformer.parallel.collectives.differentiable import (
    all_gather,
    all_reduce_max,
    all_reduce_min,
    all_reduce_sum,
    all_to_all,
    broadcast,
    gather,
    recv,
    reduce_scatter_sum,
    reduce_sum,
    scatter,
    send,
)
from dtransformer.parallel.runtime.job import new_group
from dtransformer.parallel.runtime.process_groups import Group

__all__ = [
    "Group",
    "all_gather",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_sum",
    "all_to_all",
    "broadcast",
    "gather",
    "new_group",
    "recv",
    "reduce_scatter_sum",
    "reduce_sum",
    "scatter",
    "send",
]
