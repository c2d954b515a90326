"""Collectives against NumPy and numeric differentiation.

Every rank knows the inputs of all ranks, runs every check and gives the failures of each. A
check never stops in its middle, or the others would wait.
"""

import functools
import itertools
import os
import runpy
import traceback

import numpy as np
import tensorflow as tf

from dtransformer.parallel import collectives, job
from dtransformer.parallel.collectives import flat_shards, transport
from dtransformer.parallel.collectives.call import Call
from harness.launch import REPOSITORY
from tests.tolerances import BLOCKS, NUMERIC_DERIVATIVE

SHAPES = [(), (1,), (2, 3), (8, 10), (99, 77), (2, 4, 6, 8)]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "int8", "uint8", "bool"]

compiled = functools.partial(tf.function, autograph=False)

CHECKS = {}
failures = []


def eager(function):
    return function


def check(*sizes):
    """Register a check for jobs of these numbers of ranks."""

    def register(function):
        CHECKS[function.__name__] = sizes, function
        return function

    return register


def expect(condition, message):
    if not condition:
        failures.append(message)


def expect_equal(actual, expected, message):
    actual = actual.numpy()
    same = actual.dtype == expected.dtype and actual.shape == expected.shape
    expect(
        same and np.array_equal(actual, expected),
        f"{message}: expected {expected.dtype} {expected.shape} {expected.ravel()[:4]}, "
        f"got {actual.dtype} {actual.shape} {actual.ravel()[:4]}",
    )


def expect_error(function, *words, error_type=ValueError):
    try:
        result = function()
    except error_type as error:
        missing = [word for word in words if word not in str(error)]
        expect(not missing, f"the error does not say {missing}: {error}")
    except Exception as error:
        expect(False, f"expected a {error_type.__name__}, got {error!r}")
    else:
        expect(False, f"expected an error that says {words}, got {result}")


# What each function gives, by NumPy: from the list of the ranks' inputs, in the group's
# order, to the list of their results.


def split(x, axis, count):
    return np.split(x, count, axis)


REFERENCE = {
    "broadcast": lambda xs, root: [xs[root]] * len(xs),
    "reduce_sum": lambda xs, root: [
        add(xs) if i == root else np.zeros_like(x) for i, x in enumerate(xs)
    ],
    "all_reduce_sum": lambda xs: [add(xs)] * len(xs),
    "all_reduce_max": lambda xs: [np.asarray(np.max(xs, 0))] * len(xs),
    "all_reduce_min": lambda xs: [np.asarray(np.min(xs, 0))] * len(xs),
    "gather": lambda xs, axis, root: [
        np.concatenate(xs if i == root else [x.take([], axis)], axis) for i, x in enumerate(xs)
    ],
    "all_gather": lambda xs, axis: [np.concatenate(xs, axis)] * len(xs),
    "scatter": lambda xs, axis, root: split(xs[root], axis, len(xs)),
    "reduce_scatter_sum": lambda xs, axis: split(add(xs), axis, len(xs)),
    "all_to_all": lambda xs, split_axis, concat_axis: [
        np.concatenate([split(x, split_axis, len(xs))[i] for x in xs], concat_axis)
        for i in range(len(xs))
    ],
    # Position 0 sends to the last one; the others do not take part.
    "send_recv": lambda xs: [np.zeros([], xs[0].dtype), *xs[1:-1], xs[0]],
}


def add(xs):
    return np.asarray(sum(xs[1:], xs[0]), xs[0].dtype)  # in the same type: integers wrap


def send_recv(x, group):
    if group.index == 0:
        return collectives.send(x, group.size - 1, group)
    return collectives.recv(x, 0, group) if group.index == group.size - 1 else x


def call(name, x, group, **arguments):
    function = send_recv if name == "send_recv" else getattr(collectives, name)
    return function(x, group=group, **arguments)


def arguments_of(name, shape, count):
    """All arguments that a function allows for a shape in a group of `count`."""
    axes = range(len(shape))
    divisible = [axis for axis in axes if shape[axis] % count == 0]
    roots = sorted({0, count - 1})
    if name in ("broadcast", "reduce_sum"):
        return [{"root": root} for root in roots]
    if name in ("gather", "scatter"):
        usable = axes if name == "gather" else divisible
        return [{"axis": axis, "root": roots[axis % 2 - 1]} for axis in usable]
    if name == "all_gather":
        return [{"axis": axis} for axis in axes] + [{"axis": -1}] * bool(shape)
    if name == "reduce_scatter_sum":
        return [{"axis": axis} for axis in divisible]
    if name == "all_to_all":
        pairs = itertools.product(divisible, axes)
        return [{"split_axis": split, "concat_axis": concat} for split, concat in pairs]
    return [{}]


def inputs(shape, dtype, count):
    """One array for each rank, the same on all; sums of floats are exact in every type."""
    rng = np.random.default_rng(len(shape) + 1)
    if dtype == "bool":
        return [np.asarray(rng.integers(0, 2, shape), bool) for _ in range(count)]
    if dtype.endswith(("int8", "int32", "int64")):
        limits = np.iinfo(dtype if dtype.endswith("8") else "int16")
        return [
            np.asarray(rng.integers(limits.min, limits.max + 1, shape), dtype) for _ in range(count)
        ]
    numpy_type = tf.as_dtype(dtype).as_numpy_dtype
    return [np.asarray(rng.integers(-8, 8, shape) / 4, numpy_type) for _ in range(count)]


@functools.cache
def all_groups():
    """The whole job and groups that are not in order, the same on every rank."""
    orders = {2: [(1, 0)], 3: [(2, 0), (1, 2, 0)], 4: [(3, 1), (2, 0, 3, 1)]}[job.size()]
    made = [job.whole_job(), *map(job.new_group, orders)]
    for group in made:
        job.new_group((group.ranks[0], group.ranks[-1]))  # for send and recv
    return made


def my_groups():
    return [group for group in all_groups() if group.index is not None]


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

            @compiled
            def shards_and_sums(own):
                shards = flat_shards.reduce_scatter(own, group, f"to_shards_{name}")
                shapes = [x.shape for x in own]
                gathered = flat_shards.all_gather(shards, shapes, group, f"from_shards_{name}")
                reduced = flat_shards.all_reduce(own, group, f"sums_{name}")
                short = flat_shards.all_reduce(own, group, f"short_{name}", "bfloat16")
                return shards, gathered, reduced, short

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


def mine(values):
    """This rank's entry of a list that has one for each rank, repeating its last."""
    return values[min(job.rank(), len(values) - 1)]


@check(2)
def ties_get_the_gradient_in_full():
    x = tf.constant([1.0, 2.0, mine([3.0, 5.0])])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = collectives.all_reduce_max(x)
    gradient = tape.gradient(y, x).numpy()
    n = job.size()
    expect(list(gradient) == [n, n, mine([0, n])], f"got {gradient}")


@check(3)
def a_wrong_argument():
    n, x, ones = job.size(), tf.zeros([5, 7]), tf.ones([12, 24])
    ranks = f"group of {n}"
    for name in ("gather", "all_gather", "scatter", "reduce_scatter_sum"):
        function = getattr(collectives, name)
        expect_error(lambda: function(x, axis=2), name, "(5, 7)", ranks, "axis 2", "-2 to 1")
        expect_error(lambda: function(x, axis=-3), name, "(5, 7)", ranks, "axis -3")
        expect_error(lambda: function(tf.zeros([])), name, "()", ranks, "scalar")
    for name in ("scatter", "reduce_scatter_sum"):
        function = getattr(collectives, name)
        expect_error(lambda: function(x, axis=1), name, "(5, 7)", ranks, "7", "axis 1", "divisible")
    expect_error(lambda: collectives.all_to_all(x, 1, 0), "all_to_all", "(5, 7)", "split_axis 1")
    expect_error(lambda: collectives.all_to_all(ones, 0, 2), "all_to_all", "concat_axis 2")
    for name in ("broadcast", "reduce_sum", "gather", "scatter"):
        function = getattr(collectives, name)
        expect_error(lambda: function(ones, root=n), name, "(12, 24)", f"position {n}", ranks)
    expect_error(lambda: collectives.all_reduce_sum(tf.zeros([2], "bool")), "bool", "(2,)")
    expect_error(lambda: collectives.broadcast(tf.zeros([2], "complex64")), "complex64", "float32")
    function = compiled(collectives.all_gather)
    expect_error(lambda: function(x, axis=2), "all_gather", "(5, 7)", "axis 2")
    expect_error(lambda: function(x, axis=2), "all_gather", "(5, 7)", "axis 2")


@check(3)
def a_rank_that_is_not_in_the_group():
    group = job.new_group([0])
    if job.rank() > 0:
        for name in ("all_reduce_sum", "all_gather"):
            expect_error(
                lambda: getattr(collectives, name)(tf.zeros([2]), group=group),
                name,
                "(2,)",
                f"rank {job.rank()}",
                "not in the group",
            )
        expect_error(lambda: collectives.send(tf.zeros([2]), 0, group), "send", "not in the group")
    else:
        expect_equal(collectives.all_gather(tf.zeros([2]), group=group), np.zeros(2, "f"), "alone")


DISAGREEMENTS = {
    "shapes": (lambda: collectives.all_reduce_sum(tf.zeros(mine([2, 3]))), "(2,)", "(3,)"),
    "ranks_of_tensors": (lambda: collectives.all_gather(tf.zeros(mine([[2], [2, 1]]))), "(2, 1)"),
    "dtypes": (
        lambda: collectives.all_to_all(tf.zeros([12], mine(["float32", "int32"]))),
        "float32",
        "int32",
    ),
    "axes": (lambda: collectives.all_gather(tf.zeros([2, 2]), mine([0, 1])), "axis=0", "axis=1"),
    "roots": (lambda: collectives.broadcast(tf.zeros([2]), mine([0, 1])), "root=0", "root=1"),
    "functions": (
        lambda: getattr(collectives, mine(["all_reduce_sum", "all_reduce_max"]))(tf.zeros([2])),
        "all_reduce_sum",
        "all_reduce_max",
    ),
    "what_one_of_them_refuses": (
        lambda: collectives.scatter(tf.zeros([mine([12, 13])])),
        "(12,)",
        "(13,)",
    ),
}


def check_disagreement(function, *words):
    words = ("rank 0", "rank 1", "of a group has to make the same", *words)
    expect_error(function, *words)
    expect_error(compiled(function), *words)
    expect_error(compiled(function), *words)  # it is not forgotten
    y = collectives.all_reduce_sum(tf.ones([2]))  # and the group is as it was
    expect_equal(y, np.full(2, job.size(), "f"), "after the error")


for name, arguments in DISAGREEMENTS.items():
    CHECKS[f"disagreement_of_{name}"] = (3,), functools.partial(check_disagreement, *arguments)


@check(3)
def a_tape_on_one_rank_alone():
    def forward():
        x = tf.zeros([2])
        with tf.GradientTape() as tape:
            if job.rank() == 0:
                tape.watch(x)
            return collectives.broadcast(x)

    for how in (eager, compiled):
        expect_error(how(forward), "broadcast", "on a gradient tape", "rank 0", "rank 1")


@check(3)
def unknown_dimensions_are_compared_when_it_runs():
    function = compiled(
        lambda x: collectives.all_gather(x, axis=1), input_signature=[tf.TensorSpec([2, None])]
    )
    n = job.size()
    expect_equal(function(tf.ones([2, 3])), np.ones([2, 3 * n], "f"), "of unknown dimension")
    error_type = tf.errors.FailedPreconditionError
    expect_error(lambda: function(tf.ones([2, mine([3, 4])])), "3", "4", error_type=error_type)
    expect_equal(function(tf.ones([2, 1])), np.ones([2, n], "f"), "after the error")


@check(3)
def a_function_that_one_rank_traces_anew():
    """With tensors that agree it is no matter; with others it ends on every rank."""

    @compiled
    def total(local, common):
        return tf.reduce_sum(local) + tf.reduce_sum(collectives.all_reduce_sum(common))

    n = job.size()
    for length in ([2, 3], [4, 3], [4, 5]):
        y = total(tf.zeros(mine(length)), tf.ones([7]))
        expect_equal(y, np.float32(7 * n), "with another local shape")
    error_type = (ValueError, tf.errors.FailedPreconditionError)
    words = ["all_reduce_sum", "(8,)", "does not trace"] if job.rank() == 0 else []
    expect_error(lambda: total(tf.zeros([9]), tf.ones(mine([8, 7]))), *words, error_type=error_type)
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
        expect_error(lambda: collectives.recv(x, 2, group), "recv", "position 2", "0 to 1")
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
    for first, others in ([[0], [1]], [[0, 1], [1, 0]], [[0, 1], [0, n]], [[0], []]):
        ranks = mine([first, others])
        expect_error(lambda: job.new_group(ranks), str(tuple(first)), str(tuple(others)))
    setting = os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")
    expect_error(lambda: job.new_group([2, 3]), "HOROVOD_DYNAMIC", error_type=RuntimeError)
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = setting


@check(4)
def groups_are_made_once():
    n, rank = job.size(), job.rank()
    first, again, turned = map(job.new_group, ([0, 1], (0, 1), [1, 0]))
    expect(first is again, "the same ranks, another group")
    expect(first is not turned and turned.ranks == (1, 0), f"got {turned}")
    expect(first.process_set is turned.process_set, "one process set serves both orders")
    expect(first.index == (rank if rank < 2 else None), f"got {first.index}")
    expect(turned.index == (1 - rank if rank < 2 else None), f"got {turned.index}")
    expect(job.whole_job() is job.new_group(range(n)), "the whole job is one group")
    expect(job.whole_job().size == n and job.whole_job().index == rank, "the whole job")


# --- In a tf.function, TensorFlow must not take a collective for a pure function. ---


@check(2)
def constants_are_not_computed_beforehand():
    @compiled
    def function(x):
        if job.rank() == 0:
            return collectives.broadcast(x), collectives.broadcast(2 * x)
        return collectives.broadcast(tf.zeros([3])), collectives.broadcast(tf.zeros([3]))

    for value in (1.0, 5.0, 7.0):
        once, twice = function(tf.fill([3], value))
        expect_equal(once, np.full(3, value, "f"), "the first of two")
        expect_equal(twice, np.full(3, 2 * value, "f"), "the second of two")


@check(3)
def a_result_that_is_not_used_is_computed():
    @compiled
    def function(x):
        total = collectives.reduce_sum(x)
        everyone = collectives.all_gather(x)
        return total if job.rank() == 0 else everyone

    n = job.size()
    for _ in range(2):
        expected = mine([np.full(3, n, "f"), np.ones(3 * n, "f")])
        expect_equal(function(tf.ones([3])), expected, "what is used")


@check(2)
def gradients_in_another_order():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            terms = [k * collectives.all_reduce_sum(k * x) ** 2 for k in (1.0, 2.0, 3.0)]
            loss = tf.reduce_sum(functools.reduce(tf.add, terms[:: mine([1, -1])]))
        return tape.gradient(loss, x)

    for how in (eager, compiled):
        expect_error(lambda: how(gradient)(tf.ones([2])), "all_reduce_sum", "gradient of", "rank 0")


@check(2)
def a_function_inside_of_another_and_a_tape_around_it():
    @compiled
    def inner(x):
        return collectives.all_gather(x) ** 2

    @compiled
    def outer(x):
        return inner(x) + inner(2 * x) + tf.cond(x[0] > 0, lambda: inner(x), lambda: inner(3 * x))

    n, x = job.size(), tf.ones([2])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = outer(x)
    expect_equal(y, np.full(2 * n, 6, "f"), "the result")
    expect_equal(tape.gradient(y, x), np.full(2, 12.0 * n, "f"), "the gradient")


@check(2)
def a_loop():
    @compiled
    def power(x):
        return tf.while_loop(
            lambda i, x: i < 4, lambda i, x: (i + 1, collectives.all_reduce_sum(x)), [0, x]
        )[1]

    expect_equal(power(tf.ones([])), np.float32(job.size() ** 4), "four times")


@check(2)
def recomputed_and_in_a_custom_gradient():
    @tf.custom_gradient
    def to_everyone(x):  # the conjugate pair of tensor parallelism
        return tf.identity(x), collectives.all_reduce_sum

    @tf.custom_gradient
    def from_everyone(x):
        return collectives.all_reduce_sum(x), tf.identity

    weight = tf.Variable(2.0 + job.rank())
    block = tf.recompute_grad(lambda x: from_everyone(tf.tanh(to_everyone(x) * weight)))

    @compiled
    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = block(x)
        return tape.gradient(y, [x, weight])

    x, scales = 0.3, 2.0 + np.arange(job.size())
    of_x, of_weight = gradients(tf.constant(x))
    slopes = 1 - np.tanh(x * scales) ** 2
    expect(abs(of_x - np.sum(scales * slopes)) < 1e-5, f"got {of_x}")
    expect(abs(of_weight - x * slopes[job.rank()]) < 1e-5, f"got {of_weight}")


def checks():
    """Run all checks for this number of ranks; return their failures, by name."""
    all_groups()
    results = {}
    for name, (sizes, function) in CHECKS.items():
        if job.size() in sizes:
            failures.clear()
            try:
                function()
            except Exception:
                failures.append(traceback.format_exc()[-3000:])
            results[name] = list(failures)
    return results


def hybrid_example():
    """Train as examples/hybrid_parallel.py does; on several ranks with two of a model."""
    train = runpy.run_path(REPOSITORY / "examples/hybrid_parallel.py")["train"]
    return {"losses": train(mp=min(job.size(), 2))}


TASKS = {"checks": checks, "hybrid_example": hybrid_example}
