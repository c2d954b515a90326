"""Sums over ranks, among them the phases of an optimizer step that need other ranks."""

import tensorflow as tf

from dtransformer.parallel.collectives import flat_shards, transport
from dtransformer.parallel.collectives.transport import by_dtype, never_constant
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer.optimizer_step import with_stored_types


def reduce_sum(scalars: dict, name: str) -> dict:
    """Sum tensors over the data-parallel group in one collective.

    Args:
        scalars: Dict of tensors of one dtype.
        name: String. Name of the collective, identical on all ranks.

    Returns:
        A dict with the same keys.
    """
    local = [never_constant(x) for x in scalars.values()]
    sums = transport.all_reduce_together(local, job.data_parallel_group(), name)
    return dict(zip(scalars, sums))


class Reduction:
    """Sum of gradients over the data-parallel group, one collective per bucket and dtype.

    The gradients of an engine are divided by the normalizer of the global batch. Their sum over the
    group is the gradient of the mean over the global batch.

    Args:
        shards: List of `PlannedShard`s.
        buckets: List of lists of positions in `shards`.

    Call arguments:
        gradients: List of tensors, one per planned shard, as an engine returns them. `None` for
            gradients that a later call reduces.

    Returns:
        List of tensors. Shards with a division over the group get their flat local shard of the
        sum (reduce-scatter), other shards the full sum. `None` for gradients that are `None`.
    """

    def __init__(self, shards, buckets):
        self._shards = shards
        self._group = job.data_parallel_group()
        dtype = get_parallel_config().gradient_dtype
        self._dtype = None if dtype == "float32" else dtype
        self._collectives = []  # (positions, name)
        for bucket in buckets:
            summed = [i for i in bucket if not shards[i].is_reduced]
            sharded = [i for i in summed if shards[i].division is not None]
            replicated = [i for i in summed if shards[i].division is None]
            self._collectives.append((sharded, "shards"))
            self._collectives.append((replicated, "gradients"))

    def __call__(self, gradients):
        reduced = with_stored_types(self._shards, gradients)
        for positions, name in self._collectives:
            existing = [i for i in positions if reduced[i] is not None]
            if existing:
                self._sum(reduced, existing, f"{name}_{existing[0]}")
        return reduced

    def reduce_weights(self, gradients):
        """Return the sums of some weights' gradients.

        Args:
            gradients: Dict from ids of weights to lists of their shards' gradients.

        Returns:
            A dict with the same keys.
        """
        remaining = {key: iter(shards) for key, shards in gradients.items()}
        keys = [id(shard.weight) for shard in self._shards]
        with transport.global_names():
            sums = self([next(remaining[key]) if key in remaining else None for key in keys])
        reduced = {key: [] for key in gradients}
        for key, total in zip(keys, sums):
            if key in gradients:
                reduced[key].append(total)
        return reduced

    def _sum(self, gradients, positions, name):
        """Replace gradients at some positions, all sharded or all replicated, by their sums."""

        def collective(tensors, divisions, dtype):
            arguments = (tensors, self._group, f"{name}_{dtype}", self._dtype)
            if divisions[0] is None:
                return flat_shards.all_reduce(*arguments)
            return flat_shards.reduce_scatter(*arguments, divisions)

        divisions = [self._shards[i].division for i in positions]
        sums = by_dtype(collective, [gradients[i] for i in positions], divisions)
        for i, total in zip(positions, sums):
            gradients[i] = total


def reduce_gradients(reduction, data):
    """Sum gradients over the data-parallel group; see `Reduction`."""
    data.gradients = reduction(data.gradients)


def sum_square_norms(shards, data):
    """Sum squared norms over the ranks that store other shards of the same gradient."""
    squares = data.square_norms
    sharded = [i for i, shard in enumerate(shards) if shard.division is not None]
    squares = _all_reduce(squares, sharded, job.data_parallel_group(), "square_norms_of_shards")
    fractions = [shard.mesh_fraction for shard in shards]
    on_mesh = [i for i, fraction in enumerate(fractions) if fraction is not None]
    if on_mesh:
        squares *= tf.constant([1.0 if x is None else x for x in fractions], "float32")
    data.square_norms = _all_reduce(squares, on_mesh, job.model_parallel_group(), "square_norms")


def _all_reduce(vector, positions, group, name):
    """Return a vector with its elements at some positions summed over a group."""
    if group.size == 1 or not positions:
        return vector
    sums = transport.all_reduce(tf.gather(vector, positions), "Sum", group, name)
    return tf.tensor_scatter_nd_update(vector, [[i] for i in positions], sums)


def sum_over_stages(sums):
    """Return a vector summed over the pipeline, in one all-reduce."""
    return transport.all_reduce(sums, "Sum", job.pipeline_group(), "sum_of_stages")


def select_units(units, data):
    """Replace the shards' gradients by gradients of the local update units."""
    data.values = units.proxy_values()
    data.gradients = units.gradients(data.gradients)
