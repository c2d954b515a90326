"""Checks that wrong arguments, wrong groups and different calls raise an error on every rank."""

import functools

import numpy as np
import tensorflow as tf

from dtransformer.parallel import collectives
from dtransformer.parallel.runtime import job
from tests.distributed.tasks.collectives.checks import (
    CHECKS,
    check,
    compiled,
    eager,
    expect,
    expect_equal,
    expect_error,
    value_for_rank,
)


@check(3)
def wrong_arguments():
    n, x, ones = job.size(), tf.zeros([5, 7]), tf.ones([12, 24])
    ranks = f"group of {n}"
    for name in ("gather", "all_gather", "scatter", "reduce_scatter_sum"):
        function = getattr(collectives, name)
        expect_error(lambda: function(x, axis=2), name, "(5, 7)", ranks, "axis=2", "-2 to 1")
        expect_error(lambda: function(x, axis=-3), name, "(5, 7)", ranks, "axis=-3")
        expect_error(lambda: function(tf.zeros([])), name, "()", ranks, "scalar")
    for name in ("scatter", "reduce_scatter_sum"):
        function = getattr(collectives, name)
        expect_error(lambda: function(x, axis=1), name, "(5, 7)", ranks, "7", "axis=1", "divisible")
    expect_error(lambda: collectives.all_to_all(x, 1, 0), "all_to_all", "(5, 7)", "split_axis=1")
    expect_error(lambda: collectives.all_to_all(ones, 0, 2), "all_to_all", "concat_axis=2")
    for name in ("broadcast", "reduce_sum", "gather", "scatter"):
        function = getattr(collectives, name)
        expect_error(lambda: function(ones, root=n), name, "(12, 24)", f"Position {n}", ranks)
    expect_error(lambda: collectives.all_reduce_sum(tf.zeros([2], "bool")), "bool", "(2,)")
    expect_error(lambda: collectives.broadcast(tf.zeros([2], "complex64")), "complex64", "float32")
    function = compiled(collectives.all_gather)
    expect_error(lambda: function(x, axis=2), "all_gather", "(5, 7)", "axis=2")
    expect_error(lambda: function(x, axis=2), "all_gather", "(5, 7)", "axis=2")


@check(3)
def rank_outside_the_group():
    group = job.new_group([0])
    if job.rank() > 0:
        for name in ("all_reduce_sum", "all_gather"):
            expect_error(
                lambda: getattr(collectives, name)(tf.zeros([2]), group=group),
                name,
                "(2,)",
                f"Rank {job.rank()} is not in the group",
            )
        expect_error(lambda: collectives.send(tf.zeros([2]), 0, group), "send", "not in the group")
    else:
        expect_equal(collectives.all_gather(tf.zeros([2]), group=group), np.zeros(2, "f"), "alone")


DISAGREEMENTS = {
    "shapes": (
        lambda: collectives.all_reduce_sum(tf.zeros(value_for_rank([2, 3]))),
        "(2,)",
        "(3,)",
    ),
    "ranks_of_tensors": (
        lambda: collectives.all_gather(tf.zeros(value_for_rank([[2], [2, 1]]))),
        "(2, 1)",
    ),
    "dtypes": (
        lambda: collectives.all_to_all(tf.zeros([12], value_for_rank(["float32", "int32"]))),
        "float32",
        "int32",
    ),
    "axes": (
        lambda: collectives.all_gather(tf.zeros([2, 2]), value_for_rank([0, 1])),
        "axis=0",
        "axis=1",
    ),
    "roots": (
        lambda: collectives.broadcast(tf.zeros([2]), value_for_rank([0, 1])),
        "root=0",
        "root=1",
    ),
    "functions": (
        lambda: getattr(collectives, value_for_rank(["all_reduce_sum", "all_reduce_max"]))(
            tf.zeros([2])
        ),
        "all_reduce_sum",
        "all_reduce_max",
    ),
    "a_shape_that_one_rank_rejects": (
        lambda: collectives.scatter(tf.zeros([value_for_rank([12, 13])])),
        "(12,)",
        "(13,)",
    ),
}


def check_disagreement(function, *words):
    words = ("rank 0", "rank 1", "of a group must make the same", *words)
    expect_error(function, *words)
    expect_error(compiled(function), *words)
    expect_error(compiled(function), *words)  # A second call raises the same error.
    y = collectives.all_reduce_sum(tf.ones([2]))  # The group still works.
    expect_equal(y, np.full(2, job.size(), "f"), "after the error")


for name, arguments in DISAGREEMENTS.items():
    CHECKS[f"disagreement_of_{name}"] = (3,), functools.partial(check_disagreement, *arguments)


@check(3)
def gradient_tape_on_a_single_rank():
    def forward():
        x = tf.zeros([2])
        with tf.GradientTape() as tape:
            if job.rank() == 0:
                tape.watch(x)
            return collectives.broadcast(x)

    for how in (eager, compiled):
        expect_error(how(forward), "broadcast", "on a gradient tape", "rank 0", "rank 1")


@check(3)
def unknown_dimensions_are_compared_at_run_time():
    function = compiled(
        lambda x: collectives.all_gather(x, axis=1), input_signature=[tf.TensorSpec([2, None])]
    )
    n = job.size()
    expect_equal(function(tf.ones([2, 3])), np.ones([2, 3 * n], "f"), "of unknown dimension")
    error_type = tf.errors.FailedPreconditionError
    expect_error(
        lambda: function(tf.ones([2, value_for_rank([3, 4])])), "3", "4", error_type=error_type
    )
    expect_equal(function(tf.ones([2, 1])), np.ones([2, n], "f"), "after the error")


@check(3)
def function_that_one_rank_traces_again():
    """Matching tensors work. Different tensors raise an error on every rank."""

    @compiled
    def total(local, common):
        return tf.reduce_sum(local) + tf.reduce_sum(collectives.all_reduce_sum(common))

    n = job.size()
    for length in ([2, 3], [4, 3], [4, 5]):
        y = total(tf.zeros(value_for_rank(length)), tf.ones([7]))
        expect_equal(y, np.float32(7 * n), "with another local shape")
    error_type = (ValueError, tf.errors.FailedPreconditionError)
    words = ["all_reduce_sum", "(8,)", "did not retrace"] if job.rank() == 0 else []
    expect_error(
        lambda: total(tf.zeros([9]), tf.ones(value_for_rank([8, 7]))), *words, error_type=error_type
    )
    y = total(tf.zeros([9]), tf.ones([7]))
    expect_equal(y, np.float32(7 * n), "after the error")


@check(3)
def wrong_pairs():
    group = job.new_group([0, 1])
    rank = job.rank()
    if rank < 2:
        x = tf.zeros([2 + rank])

        def exchange():
            return collectives.recv(x, 0, group) if rank else collectives.send(x, 1, group)

        expect_error(exchange, "(2,)", "(3,)", "send/recv")
        expect_error(compiled(exchange), "(2,)", "(3,)", "send/recv")
        both_send = functools.partial(collectives.send, tf.zeros([2]), 1 - rank, group)
        expect_error(both_send, "the ranks (0, 1)", "the ranks (1, 0)", "send/recv")
        expect_error(lambda: collectives.send(x, rank, group), "send", "itself")
        expect_error(lambda: collectives.recv(x, 2, group), "recv", "Position 2", "0 to 1")
    else:
        x = tf.zeros([2])
        expect_error(lambda: collectives.send(x, 1), "send(to=1)", "(2,)", "new_group((2, 1))")
        expect_error(lambda: collectives.send(x, 0, group), "send", "not in the group")


@check(4)
def wrong_groups():
    n = job.size()
    for ranks in ([], [0, 0], [0, n], [-1], ["0"], None, 1.5):
        expect_error(lambda: job.new_group(ranks), "rank", "group")
    expect_error(lambda: job.new_group([0, n]), str((0, n)), f"0 to {n - 1}")
    for first, ranks_on_others in ([[0], [1]], [[0, 1], [1, 0]], [[0, 1], [0, n]], [[0], []]):
        ranks = value_for_rank([first, ranks_on_others])
        expect_error(lambda: job.new_group(ranks), str(tuple(first)), str(tuple(ranks_on_others)))


@check(4)
def groups_are_created_once():
    n, rank = job.size(), job.rank()
    first, again, reversed_group = map(job.new_group, ([0, 1], (0, 1), [1, 0]))
    expect(first is again, "the same ranks, another group")
    expect(first is not reversed_group and reversed_group.ranks == (1, 0), f"got {reversed_group}")
    expect(first.process_set is reversed_group.process_set, "one process set serves both orders")
    expect(first.index == (rank if rank < 2 else None), f"got {first.index}")
    expect(reversed_group.index == (1 - rank if rank < 2 else None), f"got {reversed_group.index}")
    expect(job.world_group() is job.new_group(range(n)), "the whole job is one group")
    expect(job.world_group().size == n and job.world_group().index == rank, "the whole job")
