"""Collectives against NumPy, and their gradients against numeric differentiation.

Every rank knows the inputs of all ranks.
"""

import functools
import itertools

import numpy as np
import tensorflow as tf

from dtransformer.parallel import collectives
from dtransformer.parallel.collectives import flat_shards, transport
from dtransformer.parallel.collectives.call import Call
from dtransformer.parallel.collectives.division import Division
from dtransformer.parallel.runtime import job
from tests.distributed.tasks.collectives.checks import (
    CHECKS,
    check,
    compiled,
    eager,
    expect,
    expect_equal,
    expect_error,
    mine,
)
from tests.distributed.tasks.collectives.groups import all_groups, my_groups
from tests.distributed.tasks.collectives.reference import (
    DTYPES,
    REFERENCE,
    SHAPES,
    add,
    arguments_of,
    call,
    inputs,
)
from tests.tolerances import BLOCKS, NUMERIC_DERIVATIVE


def compare(name, cases, group, how):
    """Compare a function with NumPy for many cases (shape, dtype, arguments)."""
    arrays = [inputs(shape, dtype, group.size) for shape, dtype, _ in cases]

    def results(xs):
        return [call(name, x, group, **case[-1]) for x, case in zip(xs, cases)]

    actual = how(results)([tf.constant(xs[group.index]) for xs in arrays])
    for xs, case, y in zip(arrays, cases, actual):
        expected = REFERENCE[name](xs, **case[-1])[group.index]
        expect_equal(y, expected, f"{name} of {case} in the group {group.ranks}")


def check_forward(name, how):
    for group in my_groups():
        is_whole = group is job.whole_job()
        cases = [
            (shape, "float32", arguments)
            for shape in (SHAPES if is_whole and how is eager else SHAPES[-1:])
            for arguments in arguments_of(name, shape, group.size)
        ]
        if is_whole and job.size() < 4:  # to save time
            shape = (group.size, 2 * group.size)
            *_, arguments = arguments_of(name, shape, group.size)
            dtypes = DTYPES[:-1] if "sum" in name else DTYPES
            cases += [(shape, dtype, arguments) for dtype in dtypes]
        compare(name, cases[:: 1 if how is eager else 3], group, how)


def check_gradient(name):
    """The first and the second derivative, along directions of one rank's input at a time.

    The loss is the sum of all ranks' losses, that of a rank the sum of w · sin(y); what is
    derived a second time is the sum of all ranks' sums of u · gradient.
    """
    group = all_groups()[-1]
    shape = (group.size, 2 * group.size)
    *_, arguments = arguments_of(name, shape, group.size)
    x, u, direction = np.random.default_rng(0).normal(size=(3, group.size, *shape))[:, group.index]

    def loss(x):
        y = call(name, x, group, **arguments)
        w = np.random.default_rng(group.index).normal(size=y.shape)
        return tf.reduce_sum(tf.constant(w, y.dtype) * tf.sin(y))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x)
        return tape.gradient(value, x)

    def product(x):
        return tf.reduce_sum(tf.cast(u, x.dtype) * gradient(x))

    def second(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = product(x)
        return tape.gradient(value, x)

    def difference(function, step=1e-5):
        """Return the numeric derivative along the direction of this rank's input."""
        local = []
        for index, sign in itertools.product(range(group.size), (1, -1)):
            move = sign * step * direction * (index == group.index)
            local.append(function(tf.constant(x + move)))
        total = collectives.all_reduce_sum(tf.stack(local), group).numpy()
        return (total[2 * group.index] - total[2 * group.index + 1]) / (2 * step)

    def compare(derivative, expected, dtype, tolerance):
        actual = derivative(tf.constant(x, dtype))
        along = np.sum(actual.numpy() * direction)
        expect(
            abs(along - expected) <= tolerance * max(1, abs(expected)) and actual.dtype == dtype,
            f"{name} in {group.ranks}, {dtype}: expected {expected}, got {along}",
        )

    expected = difference(loss)
    compare(gradient, expected, "float64", NUMERIC_DERIVATIVE)
    compare(compiled(gradient), expected, "float32", BLOCKS["float32"])
    if job.size() != 3:  # to save time
        return
    expected = difference(product)
    compare(second, expected, "float64", NUMERIC_DERIVATIVE)
    if name in ("scatter", "send_recv"):  # whose gradients have the most of their own
        compare(compiled(second), expected, "float32", BLOCKS["float32"])
        product = compiled(product)  # and with the tape outside of the function
        compare(second, expected, "float64", NUMERIC_DERIVATIVE)


for name in REFERENCE:
    CHECKS[f"{name}_eager"] = (2, 3, 4), functools.partial(check_forward, name, eager)
    CHECKS[f"{name}_in_a_function"] = (2,), functools.partial(check_forward, name, compiled)
    CHECKS[f"gradient_of_{name}"] = (2, 3, 4), functools.partial(check_gradient, name)


@check(3)
def flat_shards_of_every_float_in_every_order():
    """They take the same way as the public collectives."""
    for group in my_groups():
        for dtype in ("float32", "float16", "bfloat16"):
            xs = [inputs(shape, dtype, group.size) for shape in ((3, 5), (4,))]
            sums = [add(x) for x in xs]
            own = [tf.constant(x[group.index]) for x in xs]
            name = f"{'_'.join(map(str, group.ranks))}_{dtype}"
            last = group.size - 1  # one rank has all of a tensor, those between the two nothing
            owners = [Division.whole(15, group.size, 0), Division.whole(4, group.size, last)]

            @compiled
            def shards_and_sums(own):
                shards = flat_shards.reduce_scatter(own, group, f"to_shards_{name}")
                shapes = [x.shape for x in own]
                gathered = flat_shards.all_gather(shards, shapes, group, f"from_shards_{name}")
                reduced = flat_shards.all_reduce(own, group, f"sums_{name}")
                short = flat_shards.all_reduce(own, group, f"short_{name}", "bfloat16")
                owned = flat_shards.reduce_scatter(own, group, f"owned_{name}", None, owners)
                told = flat_shards.all_gather(owned, shapes, group, f"told_{name}", owners)
                return shards, gathered, reduced, short, told

            shards, *results = shards_and_sums(own)
            for shard, total in zip(shards, sums):
                expected = flat_shards.own_shard(tf.constant(total), group)
                expect_equal(shard, expected.numpy(), f"the shard in {group.ranks}, {dtype}")
            for result in results:
                for actual, total in zip(result, sums):
                    expect_equal(actual, total, f"the sum in {group.ranks}, {dtype}")


def all_reduce_product(x, group=None):
    """A collective that the package does not have, as someone would add it."""
    call = Call("all_reduce_product", x, group)
    return call.run(
        lambda x: call.carry(transport.all_reduce, x, "Product"),
        lambda g, y: collectives.all_reduce_sum(g * y, call.group) / call.x,
    )


@check(2)
def a_collective_of_ones_own():
    n, x = job.size(), tf.constant([2.0, 3.0 + job.rank()])
    everyones = np.array([[2.0, 3.0 + rank] for rank in range(n)], "f")
    for how in (eager, compiled):

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = all_reduce_product(x)
            return y, tape.gradient(y, x)

        y, slope = how(gradient)(x)
        expect_equal(y, everyones.prod(0), "the product")
        expect_equal(slope, n * everyones.prod(0) / x.numpy(), "its gradient")
    expect_error(lambda: all_reduce_product(tf.zeros(mine([2, 3]))), "all_reduce_product", "(3,)")


@check(2)
def ties_get_the_gradient_in_full():
    x = tf.constant([1.0, 2.0, mine([3.0, 5.0])])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = collectives.all_reduce_max(x)
    gradient = tape.gradient(y, x).numpy()
    n = job.size()
    expect(list(gradient) == [n, n, mine([0, n])], f"got {gradient}")
