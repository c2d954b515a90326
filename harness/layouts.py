"""Named parallel layouts, and the sets of layouts that are tested."""

import dataclasses
import itertools
import re

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.config.topology import Topology


@dataclasses.dataclass(frozen=True)
class Layout:
    """Division of a job over ranks and devices.

    Args:
        data, model: Number of shards of the batch and of operations.
        ranks, devices: Number of ranks, and of devices per rank.
        context, mode: Number of shards of the sequence, and `context_parallel_mode`.
        rows: Boolean, whether embedding tables are sharded by rows (`vocab_emb_dp=False`).
        sequence: Boolean, whether the residual stream is sharded (`sequence_parallel=True`).
        level, partition: Level and partition of `optimizer_shard`. The threshold is 1 KB.
        reduces: Boolean, whether gradients are reduced in every micro-batch
            (`gradient_accumulation_shard=True`).
        experts: Number of shards of the experts, at most `data`.
        recompute: Boolean, whether blocks are recomputed in the backward pass.
        policy: Keras dtype policy.
        as_on_gpus: Boolean, whether to use the code path for GPUs, see `harness.gpu_branch`.
        stages, micro_batches, schedule, chunks: Pipeline settings. Without a pipeline,
            `micro_batches` is the number of micro-batches per step.
    """

    data: int = 1
    model: int = 1
    ranks: int = 1
    devices: int = 1
    rows: bool = False
    sequence: bool = False
    level: int = 0
    partition: str = "flat"
    reduces: bool = False
    stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    context: int = 1
    mode: str = "auto"
    experts: int = 1
    recompute: bool = False
    policy: str = "float32"
    as_on_gpus: bool = False

    @property
    def name(self):
        """Name with all settings, such as `dp2mp2@2x2+rows+sp` on two ranks with two devices each."""
        parts = f"dp{self.data}" * (self.data > 1) + f"cp{self.context}" * (self.context > 1)
        parts += f"mp{self.model}" * (self.model > 1)
        schedule = self.schedule + f"{self.chunks}" * (self.chunks > 1)
        parts += f"ep{self.experts}" * (self.experts > 1)
        parts += f"pp{self.stages}" * (self.stages > 1)
        parts += f"m{self.micro_batches}" * (self.micro_batches > 1 or self.stages > 1)
        parts += f"-{schedule}" * (self.stages > 1 or self.chunks > 1)
        options = "+rows" * self.rows + "+sp" * self.sequence
        options += f"+{self.mode}" * (self.mode != "auto")
        options += f"+{_PARTITIONS[self.partition]}{self.level}" * (self.level > 0)
        options += "+reduce" * self.reduces
        options += "+recompute" * self.recompute + _POLICIES[self.policy]
        options += "+gpu" * self.as_on_gpus
        return f"{parts or 'alone'}@{self.ranks}x{self.devices}{options}"

    @property
    def num_blocks(self):
        """Number of blocks of networks that are trained in a pipeline."""
        return max(4, self.stages * self.chunks)

    @property
    def config(self):
        """The layout as a `TransformerOpParallelConfig`."""
        return TransformerOpParallelConfig(
            data_parallel=self.data,
            model_parallel=self.model,
            context_parallel=self.context,
            context_parallel_mode=self.mode,
            expert_parallel=self.experts,
            vocab_emb_dp=not self.rows,
            sequence_parallel=self.sequence,
            optimizer_shard=self.level,
            optimizer_shard_partition=self.partition,
            gradient_accumulation_shard=self.reduces,
            parallel_optimizer_threshold=1,
            pipeline_stage=self.stages,
            micro_batch_num=self.micro_batches,
            pipeline_schedule=self.schedule,
            pipeline_chunks=self.chunks,
            recompute=self.recompute,
        )

    @property
    def ranks_of_mesh(self):
        """Number of ranks that share a mesh."""
        topology = Topology.from_config(self.config, self.ranks, self.devices)
        return len(topology.model_parallel_group(0))

    @property
    def joins_ranks(self):
        """True if a mesh contains devices of several ranks."""
        return self.ranks_of_mesh > 1

    def start(self):
        """Initialize this process with the layout."""
        import keras  # The import is local because reading the tables does not need Keras.

        import dtransformer
        from harness.gpu_branch import take_gpu_branch

        keras.config.set_dtype_policy(self.policy)
        dtransformer.init(self.config, local_devices=self.devices)
        take_gpu_branch(self.as_on_gpus)


_PARTITIONS = {"flat": "shard", "whole": "whole"}
_POLICIES = {"float32": "", "mixed_bfloat16": "+bf16", "mixed_float16": "+fp16"}
ALONE = Layout()
_NAME = re.compile(
    r"(?:alone)?(?:dp(?P<data>\d+))?(?:cp(?P<context>\d+))?(?:mp(?P<model>\d+))?"
    r"(?:ep(?P<experts>\d+))?(?:pp(?P<stages>\d+))?"
    r"(?:m(?P<micro_batches>\d+))?(?:-(?P<schedule>1f1b|zb_h1|[a-z_]+)(?P<chunks>\d+)?)?"
    r"@(?P<ranks>\d+)x(?P<devices>\d+)"
    r"(?P<rows>\+rows)?(?P<sequence>\+sp)?(?:\+(?P<mode>ulysses_ring|ulysses|all_gather|ring))?(?:\+(?P<partition>shard|whole)(?P<level>\d))?"
    r"(?P<reduces>\+reduce)?(?P<recompute>\+recompute)?(?P<policy>\+bf16|\+fp16)?(?P<as_on_gpus>\+gpu)?"
)


def parse_layout(name):
    """Return the `Layout` with a given name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"Invalid layout name {name!r}. A valid name is 'dp2mp2@2x2+rows+sp'.")
    fields = {field: value for field, value in match.groupdict().items() if value}
    return Layout(**{k: int(v) if v.isdigit() else _WORDS.get(v, v) for k, v in fields.items()})


_WORDS = dict.fromkeys(("+rows", "+sp", "+reduce", "+recompute", "+gpu"), True)
_WORDS["shard"] = "flat"
_WORDS |= {word: policy for policy, word in _POLICIES.items()}

# Columns: data, model, ranks, devices per rank.
_GRIDS = (
    *[(2, 1, 1, 2), (1, 2, 1, 2), (2, 2, 1, 4), (1, 4, 1, 4)],
    *[(8, 1, 1, 8), (4, 2, 1, 8), (2, 4, 1, 8), (1, 8, 1, 8)],
    *[(2, 1, 2, 1), (1, 2, 2, 1), (2, 2, 2, 2), (1, 4, 2, 2)],
    *[(4, 1, 4, 1), (2, 2, 4, 1), (1, 4, 4, 1)],
)
_OPTIONS = tuple(itertools.product((False, True), repeat=2))
DIVIDED = tuple(
    Layout(*grid, *options) for grid in _GRIDS for options in _OPTIONS[: None if grid[1] > 1 else 1]
)

_SHARDED_GRIDS = (2, 1, 2, 1), (4, 1, 4, 1), (2, 2, 2, 2), (4, 2, 4, 2)
SHARDED = tuple(
    Layout(*grid, level=level, partition=partition)
    for grid in _SHARDED_GRIDS
    for partition, levels in {"flat": (1, 2, 3), "whole": (1, 2)}.items()
    for level in levels
)

# Columns: stages, micro-batches.
_PIPELINES = (2, 2), (2, 4), (2, 8), (4, 4), (4, 8)
_SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2}
# Pipelines with other parallelism. Columns: ranks, devices per rank, other settings.
_COMBINED_PIPELINES = (
    (2, 2, {"model": 2}),
    (4, 1, {"model": 2}),
    (4, 1, {"model": 2, "rows": True, "sequence": True}),
    (4, 2, {"model": 2, "data": 2}),
    (2, 2, {"model": 2, "schedule": "interleaved", "chunks": 2}),
    (4, 1, {"data": 2}),
    (4, 1, {"data": 2, "level": 1}),
    (4, 1, {"data": 2, "level": 2}),
    (4, 2, {"data": 2, "model": 2, "level": 2}),
    (2, 2, {"data": 2}),
)
PIPELINES = (
    *(
        Layout(
            ranks=stages,
            stages=stages,
            micro_batches=micro_batches,
            schedule=schedule,
            chunks=chunks,
        )
        for schedule, chunks in _SCHEDULES.items()
        for stages, micro_batches in _PIPELINES
    ),
    *(
        Layout(ranks=ranks, devices=devices, stages=2, micro_batches=2, **others)
        for ranks, devices, others in _COMBINED_PIPELINES
    ),
)

# Context parallelism on all devices of a rank. Columns: ranks, other settings.
_CONTEXT_GRIDS = (
    (1, {}),
    (1, {"model": 2}),
    (2, {"data": 2}),
    (2, {"stages": 2, "micro_batches": 2}),
    *((2, {"data": 2, "level": level}) for level in (1, 2, 3)),
)
_MODES = "ulysses", "all_gather", "ring"
CONTEXT = (
    *(
        Layout(
            ranks=ranks,
            devices=context * others.get("model", 1),
            context=context,
            mode=mode,
            **others,
        )
        for context in (2, 4)
        for mode in _MODES
        for ranks, others in _CONTEXT_GRIDS
    ),
    # Two rings of two shards.
    *(
        Layout(
            ranks=ranks,
            devices=4 * others.get("model", 1),
            context=4,
            mode="ulysses_ring",
            **others,
        )
        for ranks, others in _CONTEXT_GRIDS
    ),
    # Each rank has one device.
    *(Layout(ranks=context, context=context, mode=mode) for context in (2, 4) for mode in _MODES),
    *(Layout(ranks=4, context=2, mode=mode, stages=2, micro_batches=2) for mode in _MODES),
)

# Expert parallelism with other parallelism. Levels 1 and 2 have two replicas.
_EXPERTS_GRID = tuple(
    Layout(
        data=max(experts, 2) if not level else 2 * experts,
        model=model,
        experts=experts,
        ranks=stages * (2 if level else 1),
        devices=(experts if level else max(experts, 2)) * model,
        stages=stages,
        micro_batches=stages,
        level=level,
    )
    for stages in (1, 2)
    for experts in (1, 2, 4)
    for model in (1, 2)
    for level in (0, 1, 2)
    if not (stages == 2 and level and experts == 4)  # This has more micro-batches than rows.
)
# Experts over ranks, at level 3, and with sharded rows and sequences. Columns: data, model,
# experts, ranks, devices per rank, other settings.
_EXPERTS = (
    *[(2, 2, 2, 1, 4, {"sequence": True}), (2, 1, 2, 2, 1, {}), (2, 2, 2, 2, 2, {"rows": True})],
    *[(2, 1, 2, 2, 1, {"level": 3}), (2, 2, 2, 2, 2, {"level": 3})],
    *[(4, 1, 2, 4, 1, {"level": level}) for level in (0, 1, 2)],
    *[(4, 1, 4, 4, 1, {}), (2, 2, 2, 4, 1, {}), (2, 1, 2, 4, 1, {"stages": 2, "micro_batches": 2})],
)
EXPERTS = (
    *_EXPERTS_GRID,
    *(
        Layout(data, model, ranks, devices, experts=experts, **others)
        for data, model, experts, ranks, devices, others in _EXPERTS
    ),
)

# Expert and context parallelism together, on up to 16 devices.
TOGETHER = (
    Layout(data=2, context=2, experts=2, devices=4),
    Layout(data=2, context=2, model=2, experts=2, devices=8),
    Layout(data=4, context=2, model=2, experts=4, devices=16),
    Layout(data=2, context=4, model=2, experts=2, devices=16),
    Layout(data=2, context=2, model=4, experts=2, devices=16),
    Layout(data=4, context=4, experts=4, devices=16),
    Layout(data=2, context=2, experts=2, ranks=2, devices=4, stages=2, micro_batches=2),
)

# Each kind of parallelism alone, for recomputation and 16-bit precision.
_AXES_ALONE = (
    {"data": 2, "ranks": 2},
    {"data": 2, "ranks": 2, "level": 2},
    {"model": 2, "sequence": True, "devices": 2},
    {"context": 2, "mode": "ring", "devices": 2},
    {"data": 2, "experts": 2, "devices": 2},
    {"stages": 2, "micro_batches": 2, "ranks": 2},
)
RECOMPUTED = tuple(Layout(**axes, recompute=True) for axes in _AXES_ALONE)
IN_16_BITS = tuple(
    Layout(**axes, policy=policy)
    for policy in ("mixed_bfloat16", "mixed_float16")
    for axes in _AXES_ALONE
)

# Layouts of benchmarks/parity.py. Tests can name any other layout.
LAYOUTS = {
    layout.name: layout
    for layout in itertools.chain(
        *(DIVIDED, SHARDED, PIPELINES, EXPERTS, CONTEXT, TOGETHER, RECOMPUTED, IN_16_BITS)
    )
}
