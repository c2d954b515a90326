"""Layouts as columns of integers, so that a search evaluates all of them in one NumPy call."""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from dtransformer.errors import InputError, raise_as_input_error
from dtransformer.parallel.config.config import (
    TransformerOpParallelConfig,
    TransformerRecomputeConfig,
)
from dtransformer.parallel.schedules.schedules import SCHEDULES
from dtransformer.planner.clusters import Cluster

RECOMPUTES = ("none", "attention", "full")
SCHEDULE_NAMES = tuple(SCHEDULES)
# Config fields that a layout determines, and their columns in `Layouts`.
COLUMNS = {
    "data_parallel": "data", "model_parallel": "model", "pipeline_stage": "stage",
    "context_parallel": "context", "expert_parallel": "expert", "micro_batch_num": "micro_batches",
    "pipeline_chunks": "chunks", "pipeline_schedule": "schedule", "recompute": "recompute",
    "optimizer_shard": "level", "gradient_accumulation_shard": "reduces",
    "sequence_parallel": "sequence", "vocab_emb_dp": "rows",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Table of N layouts. Every field is an integer array [N].

    Args:
        model, stage, context, expert, data: Parallel degrees. Experts share the data axis.
        micro_batch: Sequences b per micro-batch of a replica.
        micro_batches: Number m of micro-batches per step.
        chunks: Number v of model chunks per stage.
        schedule: Index into `SCHEDULE_NAMES`.
        recompute: Index into `RECOMPUTES`.
        level: Value of `optimizer_shard`.
        reduces: 1 if each micro-batch reduces its gradients at level 2 and ranks accumulate shards.
        sequence: 1 if the residual stream is sharded over the model axis.
        rows: 1 if embedding tables are sharded over the model axis.
        local: Number of devices per rank.
    """

    model: np.ndarray
    stage: np.ndarray
    context: np.ndarray
    expert: np.ndarray
    data: np.ndarray
    micro_batch: np.ndarray
    micro_batches: np.ndarray
    chunks: np.ndarray
    schedule: np.ndarray
    recompute: np.ndarray
    level: np.ndarray
    reduces: np.ndarray
    sequence: np.ndarray
    rows: np.ndarray
    local: np.ndarray

    @classmethod
    def from_columns(cls, **columns) -> "Layouts":
        """Build layouts from columns. Scalars apply to every layout.

        Missing columns get their minimum: 0 for `recompute`, `level`, `reduces`, `sequence` and
        `schedule`, and 1 for all others.
        """
        arrays = {name: np.atleast_1d(np.asarray(value)) for name, value in columns.items()}
        count = max(map(len, arrays.values()))
        minimums = dict.fromkeys(("recompute", "level", "reduces", "sequence", "schedule"), 0)
        return cls(
            **{
                name: np.broadcast_to(arrays.get(name, minimums.get(name, 1)), count).astype(int)
                for name in cls.__dataclass_fields__
            }
        )

    @classmethod
    def concatenate(cls, parts: Iterable["Layouts"]) -> "Layouts":
        """Return the concatenation of several tables of layouts."""
        parts = list(parts)
        columns = {}
        for name in cls.__dataclass_fields__:
            columns[name] = np.concatenate([getattr(part, name) for part in parts])
        return cls(**columns)

    def __len__(self):
        return len(self.model)

    def __getitem__(self, index) -> "Layouts":
        """Return the layouts selected by an index array, a mask or a slice."""
        return Layouts(**{name: getattr(self, name)[index] for name in self.__dataclass_fields__})

    def by_pipeline(self) -> Iterator[tuple]:
        """Yield groups of layouts with the same schedule, number of stages and number of chunks.

        Yields:
            An `(indices, layouts, schedule, stages, chunks)` tuple: an integer array with the
            positions of the group's layouts, the layouts, the schedule's name and two integers.
        """
        keys = np.stack([self.schedule, self.stage, self.chunks])
        for schedule, stages, chunks in np.unique(keys, axis=1).T.tolist():
            indices = np.flatnonzero((keys.T == (schedule, stages, chunks)).all(axis=1))
            yield indices, self[indices], SCHEDULE_NAMES[schedule], stages, chunks

    @property
    def devices(self):
        """Number of devices per layout."""
        return self.model * self.stage * self.context * self.data

    @property
    def mesh_data(self):
        """Number of data shards on a mesh, equal to `Topology.mesh_data` below level 3."""
        return np.maximum(self.local // (self.model * self.context), self.expert)

    @property
    def is_on_mesh(self):
        """True for layouts whose ranks compute on a mesh."""
        return self.model * self.context * self.mesh_data > 1

    @property
    def sharing(self):
        """Number of ranks that optimizer sharding divides a weight over at levels 1 to 3."""
        spans = (self.level >= 3) & (self.model * self.context * self.expert > 1)
        return np.where(spans, self.data * self.context, self.data // self.mesh_data)

    @property
    def accumulates_full(self):
        """True for layouts whose ranks accumulate full gradients over several micro-batches."""
        return (self.level < 3) & (self.reduces == 0) & (self.micro_batches > 1)

    @property
    def shards_experts(self):
        """True for layouts that shard experts or their features, which need expert buffers."""
        return (self.model > 1) | (self.expert > 1)

    @property
    def techniques(self):
        """Number of techniques per layout. Fewer are simpler, which decides between equal times."""
        used = [self.model > 1, self.stage > 1, self.context > 1, self.expert > 1, self.chunks > 1]
        used += [self.schedule > 0, self.recompute > 0, self.recompute > 1, self.sequence > 0]
        return sum(flag.astype(int) for flag in used) + self.level + self.reduces

    def config(self, index: int, fixed: dict | None = None) -> TransformerOpParallelConfig:
        """Return a layout as a config for training.

        Args:
            index: Integer. Index of the layout.
            fixed: Dict of other config fields.
        """
        columns = {name: int(getattr(self, name)[index]) for name in self.__dataclass_fields__}
        recomputes = False, TransformerRecomputeConfig(select=("attention",)), True
        fields = {name: columns[column] for name, column in COLUMNS.items()} | {
            "pipeline_schedule": SCHEDULE_NAMES[columns["schedule"]],
            "recompute": recomputes[columns["recompute"]],
            "gradient_accumulation_shard": bool(columns["reduces"]),
            "sequence_parallel": bool(columns["sequence"]),
            "vocab_emb_dp": not (columns["rows"] and columns["model"] > 1),
        }
        return TransformerOpParallelConfig(**{**(fixed or {}), **fields})

    def describe(self, index: int) -> str:
        """Return a short description of the layout at index `index`."""
        columns = {name: int(getattr(self, name)[index]) for name in self.__dataclass_fields__}
        axes = ("data", "model", "stage", "context", "expert")
        parts = [f"{axis} {columns[axis]}" for axis in axes if columns[axis] > 1]
        parts = parts or ["one device"]
        if columns["sequence"]:
            parts.append("sequence parallel")
        if columns["micro_batches"] > 1:
            parts.append(f"{columns['micro_batches']} micro-batches of {columns['micro_batch']}")
        else:
            parts.append(f"batch {columns['micro_batch']}")
        if columns["stage"] > 1:
            chunks = f" of {columns['chunks']} chunks" if columns["chunks"] > 1 else ""
            parts.append(SCHEDULE_NAMES[columns["schedule"]] + chunks)
        if columns["level"]:
            reduces = ", reduced per micro-batch" if columns["reduces"] else ""
            parts.append(f"optimizer_shard {columns['level']}{reduces}")
        if columns["recompute"]:
            parts.append(f"recompute {RECOMPUTES[columns['recompute']]}")
        return " · ".join(parts)


def layout_from_config(
    config: TransformerOpParallelConfig, global_batch: int, cluster: Cluster
) -> Layouts:
    """Return the layout of a config, as `Layouts` of length 1.

    Args:
        config: A `TransformerOpParallelConfig`.
        global_batch: Integer. Sequences per step over all replicas.
        cluster: A `Cluster`.

    Raises:
        InputError: If the product of the degrees is not the number of devices, or if
            `data_parallel · micro_batch_num` does not divide the batch.
    """
    with raise_as_input_error(kinds=ValueError):
        config = config.resolve(cluster.num_devices)
    parts = config.data_parallel * config.micro_batch_num
    if global_batch % parts:
        raise InputError(
            f"global_batch={global_batch} is not divisible by data_parallel={config.data_parallel} "
            f"· micro_batch_num={config.micro_batch_num}. Use a multiple of {parts}."
        )
    columns = {
        column: column_value(name, getattr(config, name)) for name, column in COLUMNS.items()
    }
    columns["local"] = cluster.local_devices
    return Layouts.from_columns(micro_batch=global_batch // parts, **columns)


def column_value(name: str, value) -> int:
    """Return the value of a config field as an integer for its column in `Layouts`.

    Args:
        name: Name of a config field, a key of `COLUMNS`.
        value: Value of the field.
    """
    if name == "pipeline_schedule":
        return SCHEDULE_NAMES.index(value)
    if name == "recompute":
        return RECOMPUTES.index(get_recompute_level(value))
    return int(not value) if name == "vocab_emb_dp" else int(value)


def get_recompute_level(value: bool | TransformerRecomputeConfig) -> str:
    """Return the entry of `RECOMPUTES` that is closest to a config's `recompute`.

    Example:

    >>> get_recompute_level(True), get_recompute_level(TransformerRecomputeConfig(select=("attention",)))
    ('full', 'attention')
    """
    if isinstance(value, bool):
        return "full" if value else "none"
    if value.recompute:
        return "full"
    return "attention" if "attention" in value.select else "none"
