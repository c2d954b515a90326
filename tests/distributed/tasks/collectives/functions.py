"""Checks that TensorFlow does not treat collectives in a `tf.function` as pure functions."""

import functools

import numpy as np
import tensorflow as tf

from dtransformer.parallel import collectives
from dtransformer.parallel.runtime import job
from tests.distributed.tasks.collectives.checks import (
    check,
    compiled,
    eager,
    expect,
    expect_equal,
    expect_error,
    value_for_rank,
)


@check(2)
def collectives_of_constants_are_not_folded():
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
def unused_results_are_computed():
    @compiled
    def function(x):
        total = collectives.reduce_sum(x)
        everyone = collectives.all_gather(x)
        return total if job.rank() == 0 else everyone

    n = job.size()
    for _ in range(2):
        expected = value_for_rank([np.full(3, n, "f"), np.ones(3 * n, "f")])
        expect_equal(function(tf.ones([3])), expected, "what is used")


@check(2)
def gradients_in_another_order():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            terms = [k * collectives.all_reduce_sum(k * x) ** 2 for k in (1.0, 2.0, 3.0)]
            loss = tf.reduce_sum(functools.reduce(tf.add, terms[:: value_for_rank([1, -1])]))
        return tape.gradient(loss, x)

    for how in (eager, compiled):
        expect_error(lambda: how(gradient)(tf.ones([2])), "all_reduce_sum", "gradient of", "rank 0")


@check(2)
def nested_functions_inside_a_tape():
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
def collective_in_a_loop():
    @compiled
    def power(x):
        return tf.while_loop(
            lambda i, x: i < 4, lambda i, x: (i + 1, collectives.all_reduce_sum(x)), [0, x]
        )[1]

    expect_equal(power(tf.ones([])), np.float32(job.size() ** 4), "four times")


@check(2)
def recomputed_and_in_a_custom_gradient():
    @tf.custom_gradient
    def to_everyone(x):  # Tensor parallelism uses this pair of functions.
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
    x_gradient, weight_gradient = gradients(tf.constant(x))
    slopes = 1 - np.tanh(x * scales) ** 2
    expect(abs(x_gradient - np.sum(scales * slopes)) < 1e-5, f"got {x_gradient}")
    expect(abs(weight_gradient - x * slopes[job.rank()]) < 1e-5, f"got {weight_gradient}")
