"""Compare collectives with NumPy, and their gradients with numeric differentiation.

Every rank computes the inputs of all ranks.
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
    value_for_rank,
)
from tests.distributed.tasks.collectives.groups import all_groups, my_groups
from tests.distributed.tasks.collectives.reference import (
    DTYPES,
    REFERENCE,
    SHAPES,
    add,
    call,
    inputs,
    valid_arguments,
)
from tests.tolerances import BLOCKS, NUMERIC_DERIVATIVE


def compare(name, cases, group, how):
    """Compare a collective with NumPy for a list of cases (shape, dtype, arguments)."""
    arrays = [inputs(shape, dtype, group.size) for shape, dtype, _ in cases]

    def results(xs):
        return [call(name, x, group, **case[-1]) for x, case in zip(xs, cases)]

    actual = how(results)([tf.constant(xs[group.index]) for xs in arrays])
    for xs, case, y in zip(arrays, cases, actual):
        expected = REFERENCE[name](xs, **case[-1])[group.index]
        expect_equal(y, expected, f"{name} of {case} in the group {group.ranks}")


def check_forward(name, how):
    for group in my_groups():
        is_world_group = group is job.world_group()
        cases = [
            (shape, "float32", arguments)
            for shape in (SHAPES if is_world_group and how is eager else SHAPES[-1:])
            for arguments in valid_arguments(name, shape, group.size)
        ]
        if is_world_group and job.size() < 4:  # Four ranks skip the dtypes to save time.
            shape = (group.size, 2 * group.size)
            *_, arguments = valid_arguments(name, shape, group.size)
            dtypes = DTYPES[:-1] if "sum" in name else DTYPES
            cases += [(shape, dtype, arguments) for dtype in dtypes]
        compare(name, cases[:: 1 if how is eager else 3], group, how)


def check_gradient(name):
    """Check the first and second derivative along a direction of each rank's input.

    The loss is the sum of w · sin(y) over all ranks. The second derivative is the gradient of the
    sum of u · gradient over all ranks.
    """
    group = all_groups()[-1]
    shape = (group.size, 2 * group.size)
    *_, arguments = valid_arguments(name, shape, group.size)
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
        slope = np.sum(actual.numpy() * direction)
        expect(
            abs(slope - expected) <= tolerance * max(1, abs(expected)) and actual.dtype == dtype,
            f"{name} in {group.ranks}, {dtype}: expected {expected}, got {slope}",
        )

    expected = difference(loss)
    compare(gradient, expected, "float64", NUMERIC_DERIVATIVE)
    compare(compiled(gradient), expected, "float32", BLOCKS["float32"])
    if job.size() != 3:  # A single size of the job saves time.
        return
    expected = difference(product)
    compare(second, expected, "float64", NUMERIC_DERIVATIVE)
    if name in ("scatter", "send_recv"):  # The gradients of these collectives have the most code.
        compare(compiled(second), expected, "float32", BLOCKS["float32"])
        product = compiled(product)  # Now the tape is outside of the function.
        compare(second, expected, "float64", NUMERIC_DERIVATIVE)


for name in REFERENCE:
    CHECKS[f"{name}_eager"] = (2, 3, 4), functools.partial(check_forward, name, eager)
    CHECKS[f"{name}_in_a_function"] = (2,), functools.partial(check_forward, name, compiled)
    CHECKS[f"gradient_of_{name}"] = (2, 3, 4), functools.partial(check_gradient, name)


@check(3)
def flat_shards_of_every_float_in_every_order():
    """Flat shards use the same transport as the public collectives."""
    for group in my_groups():
        for dtype in ("float32", "float16", "bfloat16"):
            xs = [inputs(shape, dtype, group.size) for shape in ((3, 5), (4,))]
            sums = [add(x) for x in xs]
            local_tensors = [tf.constant(x[group.index]) for x in xs]
            name = f"{'_'.join(map(str, group.ranks))}_{dtype}"
            last = group.size - 1  # The first and the last rank own one tensor each.
            owners = [
                Division.single_owner(15, group.size, 0),
                Division.single_owner(4, group.size, last),
            ]

            @compiled
            def shards_and_sums(local_tensors):
                shards = flat_shards.reduce_scatter(local_tensors, group, f"to_shards_{name}")
                shapes = [x.shape for x in local_tensors]
                gathered = flat_shards.all_gather(shards, shapes, group, f"from_shards_{name}")
                reduced = flat_shards.all_reduce(local_tensors, group, f"sums_{name}")
                short = flat_shards.all_reduce(local_tensors, group, f"short_{name}", "bfloat16")
                owned = flat_shards.reduce_scatter(
                    local_tensors, group, f"owned_{name}", None, owners
                )
                regathered = flat_shards.all_gather(owned, shapes, group, f"told_{name}", owners)
                return shards, gathered, reduced, short, regathered

            shards, *results = shards_and_sums(local_tensors)
            for shard, total in zip(shards, sums):
                expected = flat_shards.get_local_shard(tf.constant(total), group)
                expect_equal(shard, expected.numpy(), f"the shard in {group.ranks}, {dtype}")
            for result in results:
                for actual, total in zip(result, sums):
                    expect_equal(actual, total, f"the sum in {group.ranks}, {dtype}")


def all_reduce_product(x, group=None):
    """Custom collective: the product over the group."""
    call = Call("all_reduce_product", x, group)
    return call.run(
        lambda x: call.carry(transport.all_reduce, x, "Product"),
        lambda g, y: collectives.all_reduce_sum(g * y, call.group) / call.x,
    )


@check(2)
def custom_collective_of_the_product():
    n, x = job.size(), tf.constant([2.0, 3.0 + job.rank()])
    all_inputs = np.array([[2.0, 3.0 + rank] for rank in range(n)], "f")
    for how in (eager, compiled):

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = all_reduce_product(x)
            return y, tape.gradient(y, x)

        y, slope = how(gradient)(x)
        expect_equal(y, all_inputs.prod(0), "the product")
        expect_equal(slope, n * all_inputs.prod(0) / x.numpy(), "its gradient")
    expect_error(
        lambda: all_reduce_product(tf.zeros(value_for_rank([2, 3]))), "all_reduce_product", "(3,)"
    )


@check(2)
def every_tied_maximum_gets_the_full_gradient():
    x = tf.constant([1.0, 2.0, value_for_rank([3.0, 5.0])])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = collectives.all_reduce_max(x)
    gradient = tape.gradient(y, x).numpy()
    n = job.size()
    expect(list(gradient) == [n, n, value_for_rank([0, n])], f"got {gradient}")
