"""Collectives to call by hand, in models and training loops of one's own. All are differentiable.

A collective's gradient is another collective. It is that of the sum of all ranks' losses.
What a caller keeps to:

- Every rank of the group makes the same calls in the same order, and so do gradients:
  every rank's loss depends on the result (add `0 * result` where it does not), and
  every rank asks for the gradient.
- `x` is on every rank's `tf.GradientTape` or on none's: `tape.watch` a tensor that only
  has the right shape, as on the ranks that are not the root of a `broadcast`. Where the
  tape is around a `tf.function`, give it to the function as an argument.

Ranks whose calls, shapes or dtypes differ get a ValueError, every one of them: in eager
code at each call (for which the ranks first compare a few bytes), in a `tf.function` when
it is traced. A rank that traces a function anew for a shape that the others do not have
gets it, too, while the others' function fails with a `FailedPreconditionError` of
`tf.errors`. So it does on every rank where dimensions differ that are not known when the
function is traced; where such a dimension is not divisible, it fails with an
`InvalidArgumentError` on that rank, and the others wait for it. Horovod warns of ranks
that wait, after 60 seconds.

`group=None` is the whole job; `root`, `to` and `source` are positions in the group, whose
order is that of concatenations and shards. A group of one rank works without Horovod.
Tensors may be bool, int8 to int64, uint8, uint16, float16, bfloat16, float32 and float64.
They travel in their own type, bfloat16 as 16 bits, but for all-reduces of bfloat16 (float32)
and of bools and integers of fewer than 32 bits (int32). Sums of bfloat16 are computed in
float32; bools have no sum, and sums of small integers wrap around.

Errors name the function, the shape, the group and what is wrong:

    ValueError: an axis outside of the tensor's rank, a dimension that the group's size
        does not divide, a root outside of the group, a dtype that is not carried, a
        rank that is not in the group, or ranks that make different calls.

Example:

>>> import tensorflow as tf
>>> group = new_group([0])
>>> all_reduce_sum(tf.constant([1.0, 2.0]), group).numpy().tolist()
[1.0, 2.0]
"""

import dtransformer.start  # noqa: F401 (first: it keeps notes off the terminal)
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
