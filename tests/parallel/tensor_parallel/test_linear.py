"""Sharded linear layers match unsharded ones."""

import numpy as np
import tensorflow as tf

from dtransformer import layers
from dtransformer.parallel.mesh.axis_rules import relayout
from dtransformer.parallel.mesh.batch import local_value, put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.runtime import job
from tests.on_mesh import (
    on_mesh,
    start,
    stop,
)


@on_mesh
def test_column_and_row_parallel_layers_match_one_device():
    x = np.random.default_rng(0).normal(size=(4, 8, 16)).astype("float32")
    parts = [("column", "row"), ("row", "column"), (None, None)]

    def outputs(kinds, rank):
        first, second = (
            layers.Linear(16, parallel=kind, name=f"l{i}") for i, kind in enumerate(kinds)
        )
        first.build((None, 16)), second.build((None, 16))

        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = second(tf.nn.tanh(first(x)))
                loss = tf.reduce_sum(y * y)
            return y, tape.gradient(loss, x)

        inputs = x if rank == 3 else x[:, 0]
        if job.mesh() is None:
            return run(tf.constant(inputs))
        run_replicated = lambda x: [relayout(part, (None,) * rank) for part in run(x)]
        variables = [*first.variables, *second.variables]
        return [
            local_value(part)
            for part in MeshFunction(run_replicated, variables, True)(put_replicated(inputs))
        ]

    for rank in (2, 3):
        reference = [outputs(kinds, rank) for kinds in parts]
        start()
        for kinds, expected in zip(parts, reference):
            for part, expected_part in zip(outputs(kinds, rank), expected):
                np.testing.assert_allclose(part, expected_part, rtol=1e-4, atol=1e-5)
        stop()
