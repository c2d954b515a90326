"""Upper limit of speed: TensorFlow computes only the products of a step and their gradients."""

import time

import tensorflow as tf
from workloads import serve


def make_run(workload):
    functions = []
    for (batch, rows, inner, columns), count in workload.products().items():
        shape = [] if batch == 1 else [batch]
        x = tf.random.normal([*shape, rows, inner])
        w = tf.random.normal([*shape, inner, columns])
        y = tf.random.normal([*shape, rows, columns])
        products = (
            ((x, w), {}),
            ((y, w), {"transpose_b": True}),
            ((x, y), {"transpose_a": True}),
        )
        for arguments, options in products[: workload.passes]:
            functions.append((_products(count, **options), arguments))

    def run(steps):
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            for function, arguments in functions:
                function(*arguments)
            seconds.append(time.perf_counter() - start)
        return seconds

    return run


def _products(count, **options):
    """Return a function that computes a product `count` times in a loop."""

    @tf.function(autograph=False)
    def run(a, b):
        def again(i, before):
            with tf.control_dependencies([before]):
                return i + 1, tf.matmul(a, b, **options)

        # TensorFlow computes the product again in each iteration of a loop.
        start = tf.matmul(a, b, **options)
        return tf.while_loop(
            lambda i, _: i < count,
            again,
            (1, start),
            parallel_iterations=1,
            maximum_iterations=count,
        )[1]

    return run


if __name__ == "__main__":
    serve(make_run)
