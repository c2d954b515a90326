"""Dropout on a mesh keeps the requested fraction for every sharding."""

import numpy as np

from dtransformer.parallel.mesh.axis_rules import relayout
from dtransformer.parallel.mesh.batch import local_value, put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.mesh.random_numbers import kept_elements
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
