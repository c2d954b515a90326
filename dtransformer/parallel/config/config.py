"""Config dataclasses of how a job is divided, the global config and its scope.

Every field is checked on construction and on every assignment; a refused value leaves the old one
in place, with a ValueError that names the field, what is allowed and what came. A bool is not an int.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import pydantic

from dtransformer.parallel.config import validators
from dtransformer.parallel.schedules.schedules import SCHEDULES

# Keras' optimizers that compute from all elements of a weight together.
NOT_ELEMENTWISE = ("adafactor", "lamb", "muon")


@dataclasses.dataclass
class OpParallelConfig(validators.Checked):
    """Degrees of parallelism of one operation.

    Args:
        data_parallel: number of shards of the batch.
        model_parallel: number of shards of the weights.
    """

    data_parallel: validators.Count = 1
    model_parallel: validators.Count = 1


@dataclasses.dataclass
class EmbeddingOpParallelConfig(validators.Checked):
    """Degrees of parallelism of an embedding.

    Args:
        data_parallel: number of shards of the batch.
        model_parallel: number of shards of the weights.
        vocab_emb_dp: whether the table is replicated (True), or its rows are sharded over
            the model axis (False).
    """

    data_parallel: validators.Count = 1
    model_parallel: validators.Count = 1
    vocab_emb_dp: bool = True

    @property
    def dp_mp_config(self) -> OpParallelConfig:
        """The degrees alone, as an `OpParallelConfig`."""
        return OpParallelConfig(self.data_parallel, self.model_parallel)


@dataclasses.dataclass
class MoEParallelConfig(validators.Checked):
    """Degrees of parallelism of a mixture of experts.

    Args:
        data_parallel: number of shards of the batch.
        model_parallel: number of shards of each expert's weights.
        expert_parallel: number of shards of the set of experts.
    """

    data_parallel: validators.Count = 1
    model_parallel: validators.Count = 1
    expert_parallel: validators.Count = 1


@dataclasses.dataclass
class MoEConfig(validators.Checked):
    """A mixture of experts in place of a feed-forward layer; see `layers.MoE`.

    Args:
        expert_num: number E of experts; 1 is an ordinary feed-forward layer.
        capacity_factor: tokens an expert takes, as a multiple of an even share.
        aux_loss_factor: weight of the load-balancing loss.
        num_experts_chosen: number k of experts that each token is sent to.
        expert_group_size: most tokens of a sequence that share experts' places; None for the batch.
        z_loss_factor: weight of the mean square of the router's logsumexp (arXiv 2202.08906, §3.3).
        router_jitter: the router's inputs are multiplied with random numbers of 1 ± this in
            training (Fedus et al., 2021, arXiv 2101.03961, §2.4).
        router_type: `"softmax"`; or `"sigmoid"`, with a bias of the choice; see `Router`.
        router_bias: whether logits have one.
        shared_experts: number of experts that every token is sent to besides.
        dropless: whether experts take all tokens that are sent to them, whatever their capacity.
        routing_groups: number of groups of experts.
        routing_groups_chosen: of how many of them a token may choose, by `group_score`: `"top2"` or
            `"max"`; see `Router`.
        normalizes_gates: whether the gates of the chosen experts are divided by their sum.
        gate_scale: what gates are multiplied with in the end.
        ffn_hidden_size: inner size of each expert; that of other feed-forward layers where None.
    """

    expert_num: validators.Count = 1
    capacity_factor: validators.Positive = 1.1
    aux_loss_factor: validators.NotNegative = 0.05
    num_experts_chosen: validators.Count = 1
    expert_group_size: validators.Count | None = None
    z_loss_factor: validators.NotNegative = 0.0
    router_jitter: validators.Fraction = 0.0
    router_type: Literal["softmax", "sigmoid"] = "softmax"
    shared_experts: validators.CountOrZero = 0
    dropless: bool = False
    routing_groups: validators.Count = 1
    routing_groups_chosen: validators.Count = 1
    group_score: Literal["top2", "max"] = "top2"
    normalizes_gates: bool = True
    gate_scale: validators.Positive = 1.0
    ffn_hidden_size: validators.Count | None = None
    router_bias: bool = False


@dataclasses.dataclass
class TransformerRecomputeConfig(validators.Checked):
    """What the backward pass computes again instead of keeping it.

    Args:
        recompute: whether whole blocks are recomputed.
        mp_comm_recompute: whether outputs of model-parallel collectives are
            recomputed too (True), or kept (False).
        parallel_optimizer_comm_recompute: whether weights that `optimizer_shard=3` shards
            are all-gathered once more for the backward pass (True), or kept (False).
        recompute_slice_activation: whether a block's kept input is sharded over
            the model axis.
        select: parts of a block that are recomputed where the whole block is not:
            `"attention"`, `"feed_forward"`, `"norm"`.
    """

    recompute: bool = False
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = False
    recompute_slice_activation: bool = False
    select: tuple[Literal["attention", "feed_forward", "norm"], ...] = ()


@dataclasses.dataclass
class TransformerOpParallelConfig(validators.Checked):
    """How a Transformer's training is divided over the ranks of a job.

    The product of `data_parallel`, `model_parallel`, `context_parallel` and
    `pipeline_stage` is the number of devices: that of ranks, where each drives one.

    Args:
        data_parallel: number of shards of the batch; None for as many as the other
            degrees leave devices for.
        model_parallel: number of shards of each operation's weights.
        pipeline_stage: number of stages that the blocks are spread over.
        pipeline_schedule: `"1f1b"`, which keeps the activations of at most as many
            micro-batches as there are stages; `"gpipe"`, which keeps all;
            `"interleaved"`: 1F1B with several model chunks on each stage; `"zb_h1"`: 1F1B
            whose gradients of weights fill the time in which stages would wait; or
            `"zb_v"`, the same with two chunks a stage, there and back.
        pipeline_chunks: number of model chunks of each stage, with `"interleaved"` any and with
            `"zb_v"` 2: with more of them, stages wait less and send more. A single stage may have
            several, too: on a mesh, chunks of blocks that are alike are compiled once, so that deep
            networks start sooner.
        context_parallel: number of shards of the sequence.
        context_parallel_mode: how attention sees all of it: `"ulysses"`, by an all-to-all from the
            sequence to the heads and back; `"all_gather"` of keys and values; `"ring"`, the same
            in as many rounds as there are shards; or `"auto"`, by their shapes.
        expert_parallel: number of shards of the set of experts, over ranks that share the batch:
            it divides `data_parallel`.
        micro_batch_num: number of micro-batches that a batch is split into.
        optimizer_shard: False or 0, True or 1 (optimizer states are sharded over the
            data-parallel group), 2 (gradients too), 3 (weights too).
        optimizer_shard_partition: `"flat"`: each weight is flattened and divided over those
            ranks; or `"whole"`, at levels 1 and 2: one rank updates all of it, for
            optimizers that compute with full weights (Lamb, Adafactor, Muon).
        parallel_optimizer_threshold: weights of fewer KB are replicated.
        parallel_optimizer_exclude: tuple of regular expressions; weights in whose path
            one is found are replicated, too.
        gradient_accumulation_shard: whether the gradients of micro-batches are added up
            as shards, at levels 2 and 3: they are sent once for every micro-batch.
        gradient_dtype: `"float32"`, or `"float16"` or `"bfloat16"`, in which gradients
            are sent between the ranks of the data-parallel group.
        gradient_aggregation_group: number of buckets that gradients are spread over; those of
            a bucket are reduced together.
        recompute: True, False or a `TransformerRecomputeConfig`, or a dict of its fields.
        vocab_emb_dp: whether the embedding table is replicated (True), or its rows are
            sharded over the model axis (False).
        sequence_parallel: whether the residual stream is sharded over the model axis
            along the sequence.
        parallel_rules: dict of logical names of dimensions to the mesh axis that shards
            them, `"data"`, `"context"`, `"model"` or None; rows that replace, or are added to, those
            of `dtransformer.parallel.mesh.axis_rules.rules`.

    Raises:
        ValueError: a field has a value that is not allowed.

    Example:

    >>> config = TransformerOpParallelConfig(data_parallel=2, model_parallel=4)
    >>> config.dp_mp_config
    OpParallelConfig(data_parallel=2, model_parallel=4)
    """

    data_parallel: validators.Count | None = None
    model_parallel: validators.Count = 1
    pipeline_stage: validators.Count = 1
    pipeline_schedule: validators.Schedule = "1f1b"
    pipeline_chunks: validators.Count = 1
    context_parallel: validators.Count = 1
    context_parallel_mode: Literal["auto", "ulysses", "all_gather", "ring"] = "auto"
    expert_parallel: validators.Count = 1
    micro_batch_num: validators.Count = 1
    optimizer_shard: bool | validators.Level = False
    optimizer_shard_partition: Literal["flat", "whole"] = "flat"
    parallel_optimizer_threshold: validators.NotNegative = 64
    parallel_optimizer_exclude: tuple[validators.Pattern, ...] = ()
    gradient_accumulation_shard: bool = False
    gradient_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    gradient_aggregation_group: validators.Count = 4
    recompute: bool | pydantic.InstanceOf[TransformerRecomputeConfig] = False
    vocab_emb_dp: bool = True
    sequence_parallel: bool = False
    parallel_rules: dict[str, validators.MeshAxis | None] | None = None

    def __setattr__(self, name, value):
        if name == "recompute" and value and isinstance(value, dict):  # of YAML, JSON
            value = TransformerRecomputeConfig(**value)
        super().__setattr__(name, value)

    @classmethod
    def auto(cls, model, global_batch: int, **options) -> "TransformerOpParallelConfig":
        """Return the layout that the planner chooses for this job; rank 0 prints it, and why.

        Every rank gets the same. A network that is given may be one that is not built, made before
        `dtransformer.init`; give its name or its `planner.ModelShape` where it is made later.

        Args:
            model: a network, a `planner.ModelShape`, or the name of a published model.
            global_batch: sequences of a step, of all replicas.
            **options: as `planner.automatic.automatic_plan` has them: `device`, `precision`,
                `optimizer`, `local_devices`, and `fixed`, a dict of fields that are given.

        Raises:
            InputError: nothing fits, or no layout has what is fixed.

        Example:

        >>> config = TransformerOpParallelConfig.auto("gpt2_small", 8, device="a100")
        Layout: one device · 2 micro-batches of 4, by the planner: ...
        >>> config.resolve(1).data_parallel
        1
        """
        from dtransformer.planner.automatic import automatic_plan, summary  # it knows the config

        found = automatic_plan(model, global_batch, **options)
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            print(summary(found))
        return found.best.config

    def _known_data_parallel(self):
        if self.data_parallel is None:
            raise ValueError(
                "data_parallel is None (what the ranks leave) and the number of ranks is not known "
                "yet: call dtransformer.init(config) first, or set data_parallel"
            )
        return self.data_parallel

    @property
    def placement(self):
        """The `Placement` of the network's model chunks on the stages of the pipeline."""
        schedule = SCHEDULES[self.pipeline_schedule]
        return schedule.place(self.pipeline_stage, self.pipeline_chunks)

    @property
    def dp_mp_config(self) -> OpParallelConfig:
        """The degrees of an ordinary operation, as an `OpParallelConfig`."""
        return OpParallelConfig(self._known_data_parallel(), self.model_parallel)

    @property
    def embedding_dp_mp_config(self) -> EmbeddingOpParallelConfig:
        """The degrees of an embedding, as an `EmbeddingOpParallelConfig`."""
        return EmbeddingOpParallelConfig(
            self._known_data_parallel(), self.model_parallel, self.vocab_emb_dp
        )

    @property
    def moe_parallel_config(self) -> MoEParallelConfig:
        """The degrees of a mixture of experts, as a `MoEParallelConfig`."""
        return MoEParallelConfig(
            self._known_data_parallel(), self.model_parallel, self.expert_parallel
        )

    def why_replicated(
        self, path: str, shape: Sequence[int], item_bytes: int, has_constraint: bool
    ) -> str:
        """Return why `optimizer_shard` does not shard a weight; "" where it does.

        Args:
            path: its path in the network.
            shape: its shape on this rank.
            item_bytes: bytes of an element.
            has_constraint: whether Keras projects it after every update.
        """
        if has_constraint and self.optimizer_shard_partition == "flat":
            return "its constraint needs the whole"
        if math.prod(shape) * item_bytes < self.parallel_optimizer_threshold * 1024:
            return f"less than {self.parallel_optimizer_threshold} KB"
        if any(re.search(pattern, path) for pattern in self.parallel_optimizer_exclude):
            return "excluded"
        return ""

    def resolve(self, num_ranks: int, local_devices: int = 1) -> "TransformerOpParallelConfig":
        """Return a copy whose `data_parallel` is known, for a job's ranks and their devices.

        Raises:
            ValueError: the degrees do not multiply to the number of devices.
        """
        others = self.model_parallel * self.context_parallel * self.pipeline_stage
        num_devices = num_ranks * local_devices
        data = self.data_parallel if self.data_parallel is not None else num_devices // others
        if data * others != num_devices:
            asked = "what is left" if self.data_parallel is None else self.data_parallel
            context = f"context_parallel={self.context_parallel} · " * (self.context_parallel > 1)
            needed = others if self.data_parallel is None else data * others
            multiple = "a multiple of " if self.data_parallel is None else ""
            devices = f" of {local_devices} local devices each" * (local_devices > 1)
            kind = "devices" if local_devices > 1 else "ranks"
            ranks = -(-needed // local_devices)
            can_start = ranks == 1 or importlib.util.find_spec("horovod") is not None
            first = "" if can_start else " (run 'dtransformer doctor --install-horovod' first)"
            raise ValueError(
                f"data_parallel={asked} · model_parallel={self.model_parallel} · {context}"
                f"pipeline_stage={self.pipeline_stage} needs {multiple}{needed} {kind}, but the "
                f"job has {num_ranks}{f' ranks{devices}' * bool(devices)}: start it with "
                f"dtransformer launch -np {ranks}{first}, or change the config"
            )
        return dataclasses.replace(self, data_parallel=data)


_current = TransformerOpParallelConfig()


def get_parallel_config() -> TransformerOpParallelConfig:
    """Return the parallel config that layers and trainers read.

    Example:

    >>> get_parallel_config().model_parallel
    1
    """
    return _current


def set_parallel_config(config: TransformerOpParallelConfig) -> None:
    """Make `config` the parallel config of this process.

    Args:
        config: a `TransformerOpParallelConfig`.

    Raises:
        TypeError: `config` is something else.
    """
    global _current
    check_config(config)
    _current = config


def check_config(config: object) -> None:
    """Raise a TypeError of what is no `TransformerOpParallelConfig`."""
    if not isinstance(config, TransformerOpParallelConfig):
        raise TypeError(f"config must be a TransformerOpParallelConfig, got {config!r}")


@contextlib.contextmanager
def parallel_config(
    config: TransformerOpParallelConfig | None = None, **fields
) -> Iterator[TransformerOpParallelConfig]:
    """Use another parallel config inside a `with` block.

    Args:
        config: a `TransformerOpParallelConfig`; the current one by default.
        **fields: fields that replace the config's.

    Example:

    >>> with parallel_config(model_parallel=4):
    ...     get_parallel_config().model_parallel
    4
    """
    outer = get_parallel_config()
    set_parallel_config(dataclasses.replace(outer if config is None else config, **fields))
    try:
        yield get_parallel_config()
    finally:
        set_parallel_config(outer)
