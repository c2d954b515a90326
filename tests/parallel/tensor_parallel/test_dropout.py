"""Dropout on a mesh keeps the requested fraction and has the masks of one device."""

import numpy as np
import tensorflow as tf

from dtransformer.parallel.mesh.axis_rules import relayout
from dtransformer.parallel.mesh.batch import local_value, put_replicated, put_seed
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.mesh.random_numbers import kept_elements, random_floats
from tests.on_mesh import on_mesh, start


def mask_on_mesh(shape, rate, index, specs):
    """Return an unsharded mask that was computed in the layout `specs`."""

    def run(seed):
        mask = relayout(kept_elements(shape, rate, seed, index), specs)
        return relayout(mask, [None] * len(shape))

    seed = put_replicated(np.array([5, index], "int32"))
    return local_value(MeshFunction(run, [])(seed))


@on_mesh
def test_keep_fraction_and_independence_on_a_mesh():
    start(model_parallel=2)
    for specs in ((None, None), ("model", None), (None, "model")):
        for rate in (0.1, 0.3, 0.5, 0.9):
            masks = np.array([mask_on_mesh([400, 64], rate, i, specs) for i in range(4)])
            deviation = np.sqrt(rate * (1 - rate))
            assert abs(masks.mean() - (1 - rate)) < 4 * deviation / np.sqrt(masks.size), (
                specs,
                rate,
            )
            # Columns may share a random word. Columns and rows must be independent anyway.
            rows = np.moveaxis(masks, 2, 0).reshape(64, -1) - (1 - rate)
            correlation = np.abs(rows @ rows.T / rows.shape[1] / deviation**2)
            assert correlation[~np.eye(64, dtype=bool)].max() < 0.15, (specs, rate)
            assert len(np.unique(masks.reshape(-1, 64), axis=0)) > 1500 * deviation
    for shape in ([], [3], [2, 3]):
        assert mask_on_mesh(shape, 0.3, 1, [None] * len(shape)).shape == tuple(shape)


@on_mesh
def test_masks_on_a_mesh_equal_the_masks_of_one_device():
    shape = [4, 6, 10]
    seed = tf.constant([5, 6, 2], "int64")
    one_device_seed = tf.constant([5, 6, 2, 4], "int64")
    expected_mask = kept_elements(shape, 0.3, one_device_seed, 7).numpy()
    expected_floats = random_floats(shape, one_device_seed, 7).numpy()
    start(data_parallel=2, model_parallel=2)
    for specs in (("data", None, None), ("data", "model", None), ("data", None, "model")):

        def run(seed, specs=specs):
            num_rows = tf.constant([4], "int64")
            row_seed = tf.concat([seed[:3], num_rows, seed[3:4]], 0)
            mask = relayout(kept_elements(shape, 0.3, row_seed, 7), specs)
            floats = relayout(random_floats(shape, row_seed, 7), specs)
            return [relayout(x, [None] * 3) for x in (mask, floats)]

        mask, floats = map(local_value, MeshFunction(run, [])(put_seed(seed)))
        np.testing.assert_array_equal(mask, expected_mask)
        np.testing.assert_array_equal(floats, expected_floats)
