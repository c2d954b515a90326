"""Report of the sharding of every weight, as a table."""

import dataclasses
import math

import tensorflow as tf

from dtransformer.parallel.keras_layers.shard import storage_specs
from dtransformer.parallel.mesh.axis_rules import axis_size
from dtransformer.parallel.mesh.variable import MeshVariable, sharding_specs
from dtransformer.parallel.runtime import job
from dtransformer.parallel.zero.variables import FullyShardedVariable
from dtransformer.tables import columns


@dataclasses.dataclass(frozen=True)
class WeightRow:
    """Sharding of one weight.

    Args:
        path: Path of the weight in the network.
        shape: Shape of the full weight.
        dtype: Name of its dtype.
        rule: Rule that determined the layout: the logical axes of the dimensions, or the rule of
            `parallel.keras_layers` for layers without logical axes.
        sharded_over: Tuple with the mesh axis, or `None`, that shards each dimension.
            `("ranks",)` if each data-parallel rank has a flat shard.
        num_shards: Number of distinct shards.
    """

    path: str
    shape: tuple
    dtype: str
    rule: str
    sharded_over: tuple
    num_shards: int

    @property
    def elements_per_device(self):
        """Number of elements on each device, rounded up."""
        return -(-math.prod(self.shape) // self.num_shards)

    @property
    def bytes_per_device(self):
        """Number of bytes on each device."""
        return self.elements_per_device * tf.as_dtype(self.dtype).size


@dataclasses.dataclass(frozen=True)
class WeightPlan:
    """Sharding of a network's weights. `str(plan)` is a table.

    Args:
        rows: Tuple of `WeightRow`s of this rank's pipeline stage.
        num_local_devices: Number of devices per rank.
        shard: `dtransformer.parallel.zero.partition.Partition` to print below the table, or
            `None`.
        stages: Tuple with the layer names of each pipeline stage. Empty without a pipeline.
    """

    rows: tuple
    num_local_devices: int = 1
    shard: object = None
    stages: tuple = ()

    @classmethod
    def from_variables(cls, variables, shard=None, stages=(), layouts=()):
        """Build the plan from a list of Keras variables.

        Args:
            variables: List of Keras variables.
            shard, stages: See the class.
            layouts: Iterable of the `WeightLayout`s of weights without logical axes. They also
                cover weights that are not sharded yet.
        """
        rules = {id(layout.variable): layout for layout in layouts}
        mesh = job.mesh()
        rows = tuple(
            WeightRow(
                v.path,
                tuple(v.shape),
                tf.as_dtype(v.dtype).name,
                _rule(v, rules.get(id(v))),
                *_shards(v, rules.get(id(v))),
            )
            for v in variables
        )
        devices = 1 if mesh is None else mesh.num_local_devices()
        return cls(rows, devices, shard, tuple(map(tuple, stages)))

    @property
    def elements_per_device(self):
        """Number of elements of all weights on each device."""
        return sum(row.elements_per_device for row in self.rows)

    @property
    def bytes_per_device(self):
        """Number of bytes of all weights on each device."""
        return sum(row.bytes_per_device for row in self.rows)

    def __str__(self):
        header = ("weight", "shape", "type", "rule", "sharded over", "bytes per device")
        table = [header]
        for row in self.rows:
            shape = "×".join(map(str, row.shape)) or "scalar"
            axes = _axis_names(row.sharded_over)
            num_bytes = f"{row.bytes_per_device:,}"
            table.append((row.path, shape, row.dtype, row.rule, axes, num_bytes))
        lines = columns(table, right=(len(header) - 1,))
        elements = sum(math.prod(row.shape) for row in self.rows)
        sharded = sum(row.bytes_per_device for row in self.rows if any(row.sharded_over))
        lines += [
            lines[1],
            f"{len(self.rows)} weights with {elements:,} elements. Each device stores "
            f"{self.elements_per_device:,} of them: {sharded:,} bytes of sharded weights and "
            f"{self.bytes_per_device - sharded:,} bytes of replicated weights, "
            f"{self.bytes_per_device:,} bytes in total. Devices per rank: {self.num_local_devices}.",
        ]
        for i, names in enumerate(self.stages):
            lines.append(f"Stage {i}: {', '.join(names) or 'no layers'}")
        if self.shard is not None:
            lines += ["", str(self.shard)]
        return "\n".join(lines)


def _axis_names(axes):
    return "(" + ", ".join(axis or "–" for axis in axes) + ")"


def _rule(variable, layout):
    """Return the rule of a weight; see `WeightRow`."""
    if layout is not None:
        return layout.rule
    return _axis_names(getattr(variable, "logical_axes", ()))


def _shards(variable, layout):
    """Return the mesh axes that shard a weight's dimensions, and the number of distinct shards."""
    if isinstance(variable, FullyShardedVariable):
        return ("ranks",), job.data_parallel_group().size
    is_pending = layout is not None and not isinstance(variable, MeshVariable)
    axes = storage_specs(layout) if is_pending else sharding_specs(variable)
    return axes, math.prod(map(axis_size, axes))
