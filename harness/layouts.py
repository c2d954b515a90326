"""How a job may be divided: layouts, and the tables of those that are tried."""

import dataclasses
import itertools
import re

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.config.topology import Topology


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a job is divided.

    Args:
        data, model: into how many the batch and the operations are divided.
        ranks, devices: number of ranks, and of devices of each rank.
        context, mode: into how many the sequence is divided, and how attention sees all of it.
        rows: whether tables of embeddings are sharded by rows (`vocab_emb_dp=False`).
        sequence: whether the residual stream is sharded too (`sequence_parallel=True`).
        level, partition: of optimizer sharding; weights of 1 KB and more are sharded.
        experts: over how many of the data shards experts are sharded.
        recompute: whether the backward pass computes blocks again.
        policy: Keras' dtype policy.
        as_on_gpus: whether steps go the way of GPUs; see `harness.gpu_branch`.
        stages, micro_batches, schedule, chunks: of a pipeline, or of one stage of several chunks;
            without both, the number of micro-batches of a step.
    """

    data: int = 1
    model: int = 1
    ranks: int = 1
    devices: int = 1
    rows: bool = False
    sequence: bool = False
    level: int = 0
    partition: str = "flat"
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
        """All of it, as in `dp2mp2@2x2+rows+sp`: two ranks of two devices each."""
        axes = f"dp{self.data}" * (self.data > 1) + f"cp{self.context}" * (self.context > 1)
        axes += f"mp{self.model}" * (self.model > 1)
        schedule = self.schedule + f"{self.chunks}" * (self.chunks > 1)
        axes += f"ep{self.experts}" * (self.experts > 1)
        axes += f"pp{self.stages}" * (self.stages > 1)
        axes += f"m{self.micro_batches}" * (self.micro_batches > 1 or self.stages > 1)
        axes += f"-{schedule}" * (self.stages > 1 or self.chunks > 1)
        options = "+rows" * self.rows + "+sp" * self.sequence
        options += f"+{self.mode}" * (self.mode != "auto")
        options += f"+{_PARTITIONS[self.partition]}{self.level}" * (self.level > 0)
        options += "+recompute" * self.recompute + _POLICIES[self.policy]
        options += "+gpu" * self.as_on_gpus
        return f"{axes or 'alone'}@{self.ranks}x{self.devices}{options}"

    @property
    def num_blocks(self):
        """The number of blocks of the networks that are trained in a pipeline."""
        return max(4, self.stages * self.chunks)

    @property
    def config(self):
        """The `TransformerOpParallelConfig` of it."""
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
            parallel_optimizer_threshold=1,
            pipeline_stage=self.stages,
            micro_batch_num=self.micro_batches,
            pipeline_schedule=self.schedule,
            pipeline_chunks=self.chunks,
            recompute=self.recompute,
        )

    @property
    def ranks_of_mesh(self):
        """The number of ranks whose devices a mesh has."""
        topology = Topology.from_config(self.config, self.ranks, self.devices)
        return len(topology.model_parallel_group(0))

    @property
    def joins_ranks(self):
        """Whether a mesh has devices of several ranks."""
        return self.ranks_of_mesh > 1

    def start(self):
        """Join the job under this layout."""
        import keras  # the tables are read without it

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
    r"(?P<rows>\+rows)?(?P<sequence>\+sp)?(?:\+(?P<mode>ulysses|all_gather|ring))?(?:\+(?P<partition>shard|whole)(?P<level>\d))?"
    r"(?P<recompute>\+recompute)?(?P<policy>\+bf16|\+fp16)?(?P<as_on_gpus>\+gpu)?"
)


def layout_of(name):
    """Return the `Layout` of a name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"no layout has the name {name!r}; one is 'dp2mp2@2x2+rows+sp'")
    fields = {field: value for field, value in match.groupdict().items() if value}
    return Layout(**{k: int(v) if v.isdigit() else _WORDS.get(v, v) for k, v in fields.items()})


_WORDS = {"+rows": True, "+sp": True, "+recompute": True, "+gpu": True, "shard": "flat"}
_WORDS |= {word: policy for policy, word in _POLICIES.items()}

# data, model, ranks, devices of each rank
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

# stages, micro-batches
_PIPELINES = (2, 2), (2, 4), (2, 8), (4, 4), (4, 8)
_SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2}
# With the other ways to divide the work: ranks, devices of each, and what else there is.
_PIPELINES_OF_MORE = (
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
        for ranks, devices, others in _PIPELINES_OF_MORE
    ),
)

# Shards of the sequence: ranks, and what else there is; each rank drives the devices of a replica.
_CONTEXT_WITH = (
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
        for ranks, others in _CONTEXT_WITH
    ),
    # Of a device each.
    *(Layout(ranks=context, context=context, mode=mode) for context in (2, 4) for mode in _MODES),
    *(Layout(ranks=4, context=2, mode=mode, stages=2, micro_batches=2) for mode in _MODES),
)

# Shards of the experts, with the others: of levels 1 and 2 there are two replicas.
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
    if not (stages == 2 and level and experts == 4)  # more micro-batches than rows
)
# Over ranks, at level 3, and by rows and sequences: data, model, experts, ranks, devices of each
# rank, and what else there is.
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

# Experts and sequences together; of 16 devices, too.
TOGETHER = (
    Layout(data=2, context=2, experts=2, devices=4),
    Layout(data=2, context=2, model=2, experts=2, devices=8),
    Layout(data=4, context=2, model=2, experts=4, devices=16),
    Layout(data=2, context=4, model=2, experts=2, devices=16),
    Layout(data=2, context=2, model=4, experts=2, devices=16),
    Layout(data=4, context=4, experts=4, devices=16),
    Layout(data=2, context=2, experts=2, ranks=2, devices=4, stages=2, micro_batches=2),
)

# Blocks that are computed again, and 16 bits: for each of the axes that divide.
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

# What benchmarks/parity.py tries. Tests name what they need: any layout has a name.
LAYOUTS = {
    layout.name: layout
    for layout in itertools.chain(
        *(DIVIDED, SHARDED, PIPELINES, EXPERTS, CONTEXT, TOGETHER, RECOMPUTED, IN_16_BITS)
    )
}
