"""Promise: on a mesh dropout keeps what it should, sharded or not, and each device the same."""

import numpy as np

from dtransformer.parallel.mesh.axis_rules import relayout
from dtransformer.parallel.mesh.batch import local_value, put_replicated
from dtransformer.parallel.mesh.function import MeshFunction
from dtransformer.parallel.tracing.dropout_seed import kept_elements
from tests.on_mesh import on_mesh, start


def kept_on_mesh(shape, rate, number, specs):
    """Return a mask that is laid out as told, and then gathered."""

    def run(seed):
        kept = relayout(kept_elements(shape, rate, seed, number), specs)
        return relayout(kept, [None] * len(shape))

    seed = put_replicated(np.array([5, number], "int32"))
    return local_value(MeshFunction(run, [])(seed))


@on_mesh
def test_shares_and_independence():
    start(model_parallel=2)
    for specs in ((None, None), ("model", None), (None, "model")):
        for rate in (0.1, 0.3, 0.5, 0.9):
            masks = np.array([kept_on_mesh([400, 64], rate, n, specs) for n in range(4)])
            spread = np.sqrt(rate * (1 - rate))
            assert abs(masks.mean() - (1 - rate)) < 4 * spread / np.sqrt(masks.size), (specs, rate)
            # No two columns, which may share a word, know of each other; nor do two rows.
            rows = np.moveaxis(masks, 2, 0).reshape(64, -1) - (1 - rate)
            alike = np.abs(rows @ rows.T / rows.shape[1] / spread**2)
            assert alike[~np.eye(64, dtype=bool)].max() < 0.15, (specs, rate)
            assert len(np.unique(masks.reshape(-1, 64), axis=0)) > 1500 * spread
    for shape in ([], [3], [2, 3]):
        assert kept_on_mesh(shape, 0.3, 1, [None] * len(shape)).shape == tuple(shape)
