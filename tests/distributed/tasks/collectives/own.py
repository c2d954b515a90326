"""Check of a custom collective that is one function outside of the package."""

import tensorflow as tf

from dtransformer.parallel.collectives import transport
from dtransformer.parallel.collectives.call import Call
from dtransformer.parallel.runtime import job
from tests.distributed.tasks.collectives.checks import check, expect_equal


def all_reduce_mean(x, group=None):
    """Return the mean over the group to every rank."""
    call = Call("all_reduce_mean", x, group, adds=True)
    return call.run(
        lambda x: call.carry(transport.all_reduce, x, "Sum") / call.group.size,
        lambda g, _: all_reduce_mean(g, call.group),
    )


@check(2, 3)
def custom_collective_of_the_mean():
    x = tf.fill([3], float(job.rank()))
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean = all_reduce_mean(x)
        loss = tf.reduce_sum(mean) * job.size()
    expected = sum(range(job.size())) / job.size()
    expect_equal(mean, tf.fill([3], expected).numpy(), "mean of the ranks")
    expect_equal(tape.gradient(loss, x), tf.fill([3], float(job.size())).numpy(), "its gradient")
