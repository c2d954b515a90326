"""Parallel configs: dataclasses, the global config and its scope.

Fields are checked at construction and at every assignment. An invalid value raises a `ValueError` and
leaves the field unchanged. A bool is not an int.
"""

import contextlib
import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal

import pydantic

from dtransformer.parallel.config import validators
from dtransformer.parallel.schedules.schedules import SCHEDULES

# Keras optimizers whose updates depend on full weights.
NOT_ELEMENTWISE = ("adafactor", "lamb", "muon")


@dataclasses.dataclass
class OpParallelConfig(validators.Checked):
    """Degrees of parallelism of one operation.

    Args:
        data_parallel: Integer. Number of batch shards. Defaults to `1`.
        model_parallel: Integer. Number of weight shards. Defaults to `1`.
    """

    data_parallel: validators.Count = 1
    model_parallel: validators.Count = 1


@dataclasses.dataclass
class EmbeddingOpParallelConfig(validators.Checked):
    """Degrees of parallelism of an embedding.

    Args:
        data_parallel: Integer. Number of batch shards. Defaults to `1`.
        model_parallel: Integer. Number of weight shards. Defaults to `1`.
        vocab_emb_dp: Boolean. Whether to replicate the table. `False` shards its rows over the model
            axis. Defaults to `True`.
    """

    data_parallel: validators.Count = 1
    model_parallel: validators.Count = 1
    vocab_emb_dp: bool = True

    @property
    def dp_mp_config(self) -> OpParallelConfig:
        """Degrees without `vocab_emb_dp`, as an `OpParallelConfig`."""
        return OpParallelConfig(self.data_parallel, self.model_parallel)


@dataclasses.dataclass
class MoEParallelConfig(validators.Checked):
    """Degrees of parallelism of a mixture of experts.

    Args:
        data_parallel: Integer. Number of batch shards. Defaults to `1`.
        model_parallel: Integer. Number of shards of each expert's weights. Defaults to `1`.
        expert_parallel: Integer. Number of expert shards. Defaults to `1`.
    """

    data_parallel: validators.Count = 1
    model_parallel: validators.Count = 1
    expert_parallel: validators.Count = 1


@dataclasses.dataclass
class MoEConfig(validators.Checked):
    """Mixture of experts that replaces a feed-forward layer; see `layers.MoE`.

    Args:
        expert_num: Integer. Number of experts E. `1` is a plain feed-forward layer. Defaults to `1`.
        capacity_factor: Float. Capacity of an expert as a multiple of its even share of tokens. Defaults
            to `1.1`.
        aux_loss_factor: Float. Weight of the load-balancing loss. Defaults to `0.05`.
        num_experts_chosen: Integer. Number of experts k per token. Defaults to `1`.
        expert_group_size: Integer. Maximum tokens of a sequence that share expert capacity. `None`
            shares capacity over the global batch. Defaults to `None`.
        z_loss_factor: Float. Weight of the mean logsumexp² (arXiv 2202.08906, §3.3). Defaults to `0.0`.
        router_jitter: Float. In training, multiplies router inputs by random factors in 1 ± this value
            (Fedus et al., 2021, arXiv 2101.03961, §2.4). Defaults to `0.0`.
        router_type: String. `"softmax"`, or `"sigmoid"` with a biased choice; see `Router`. Defaults to
            `"softmax"`.
        router_bias: Boolean. Whether router logits have a trained bias. Defaults to `False`.
        shared_experts: Integer. Number of experts that process every token. Defaults to `0`.
        dropless: Boolean. Whether experts ignore their capacity and drop no tokens. Defaults to `False`.
        routing_groups: Integer. Number of expert groups. Defaults to `1`.
        routing_groups_chosen: Integer. Number of groups that a token may choose from. Defaults to `1`.
        group_score: String. Score of a group: `"top2"`, the sum of its two best experts, or `"max"`, its
            best expert. Defaults to `"top2"`.
        normalizes_gates: Boolean. Whether to divide the chosen gates by their sum. Defaults to `True`.
        gate_scale: Float. Factor on the final gates. Defaults to `1.0`.
        ffn_hidden_size: Integer. Inner size of experts. `None` uses the model's. Defaults to `None`.
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
    """Activations to recompute in the backward pass instead of storing them.

    Args:
        recompute: Boolean. Whether to recompute full blocks. Defaults to `False`.
        mp_comm_recompute: Boolean. Whether to also recompute the results of model-parallel collectives.
            `False` stores them. Defaults to `True`.
        parallel_optimizer_comm_recompute: Boolean. Whether to free a block's weights after the
            repeated forward pass under `optimizer_shard=3`, and all-gather them a third time. `False`
            keeps them for the gradients. Defaults to `False`.
        recompute_slice_activation: Boolean. Whether to shard stored block inputs over the model axis.
            Defaults to `False`.
        select: Tuple of the parts `"attention"`, `"feed_forward"` and `"norm"` to recompute in blocks
            that are not recomputed in full. Defaults to `()`.
    """

    recompute: bool = False
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = False
    recompute_slice_activation: bool = False
    select: tuple[Literal["attention", "feed_forward", "norm"], ...] = ()


@dataclasses.dataclass
class TransformerOpParallelConfig(validators.Checked):
    """Layout of a training job over its devices.

    The product of `data_parallel`, `model_parallel`, `context_parallel` and `pipeline_stage` is the
    number of devices. It equals the number of ranks if each rank controls one device.

    Args:
        data_parallel: Integer. Number of batch shards. `None` uses all devices that the other degrees
            leave. Defaults to `None`.
        model_parallel: Integer. Number of shards of each operation's weights. Defaults to `1`.
        pipeline_stage: Integer. Number of pipeline stages. Defaults to `1`.
        pipeline_schedule: String. `"1f1b"` stores the activations of at most `pipeline_stage`
            micro-batches. `"gpipe"` stores all activations. `"interleaved"` is 1F1B with several model
            chunks per stage. `"zb_h1"` computes weight gradients in idle time. `"zb_v"` is `"zb_h1"`
            with two chunks per stage, placed in a V. Defaults to `"1f1b"`.
        pipeline_chunks: Integer. Number of model chunks per stage: any with `"interleaved"`, 2 with
            `"zb_v"`. More chunks mean less idle time and more communication. On a mesh, equal chunks are
            compiled once, so deep networks start sooner, even with one stage. Defaults to `1`.
        context_parallel: Integer. Number of sequence shards. Defaults to `1`.
        context_parallel_mode: String. Communication of attention: `"ulysses"` (all-to-all between
            sequence and heads), `"all_gather"` of keys and values, `"ring"` (keys and values travel from
            rank to rank), `"ulysses_ring"` (a ring for each part of the heads) or `"auto"` (chosen from
            the shapes). Defaults to `"auto"`.
        ulysses_shards: Integer. Number of parts of the heads with `"ulysses_ring"`; must divide
            `context_parallel`. `None` uses the largest divisor below `context_parallel` that divides the
            query and the key heads of a device. Defaults to `None`.
        expert_parallel: Integer. Number of expert shards; must divide `data_parallel`. Defaults to `1`.
        micro_batch_num: Integer. Number of micro-batches per batch. Defaults to `1`.
        optimizer_shard: Boolean or integer. ZeRO level: `1` or `True` shards optimizer states over the
            data-parallel group, `2` also gradients, `3` also weights. `0` or `False` disables sharding.
            Defaults to `False`.
        optimizer_shard_partition: String. `"flat"` divides every weight over the ranks. `"whole"`, for
            levels 1 and 2, lets one rank update a full weight (Lamb, Adafactor). Defaults to `"flat"`.
        parallel_optimizer_threshold: Float. Weights with fewer KB stay replicated. Defaults to `64`.
        parallel_optimizer_exclude: Tuple of regular expressions of paths that stay replicated. Defaults
            to `()`.
        gradient_accumulation_shard: Boolean. Whether every micro-batch reduces its gradients, so that
            level 2 accumulates shards. `False` accumulates full gradients and reduces them once per
            step. Level 3 always accumulates shards. Defaults to `False`.
        gradient_dtype: String. Type of gradients sent between data-parallel ranks: `"float32"`,
            `"float16"` or `"bfloat16"`. Defaults to `"float32"`.
        optimizer_state_dtype: String. Type of optimizer states in the shape of a weight: `"float32"`, or
            `"bfloat16"` with float32 updates and stochastic rounding. Moving averages (`use_ema`) keep
            the type of the weights. Defaults to `"float32"`.
        gradient_aggregation_group: Integer. Number of gradient buckets, reduced one by one. Defaults to
            `4`.
        recompute: Boolean, `TransformerRecomputeConfig` or a dict of its fields. Defaults to `False`.
        vocab_emb_dp: Boolean. Whether to replicate the embedding table. `False` shards its rows over the
            model axis. Defaults to `True`.
        sequence_parallel: Boolean. Whether to shard residuals over the model axis by position. Defaults
            to `False`.
        parallel_rules: Dict of logical axes to `"data"`, `"context"`, `"model"` or `None`. Extends
            `dtransformer.parallel.mesh.axis_rules.rules`, for layers of `dtransformer.layers`. Defaults
            to `None`.
        layout_map: Dict of regular expressions to a tuple with `"model"`, `"data"` or `None` for each
            dimension, or a `keras.distribution.LayoutMap`, whose axis `"batch"` means `"data"`. Shards
            the weights of other Keras layers whose paths contain the expression and replicates the
            rest. `"data"` stores shards that are all-gathered for use. `None` uses default rules by
            layer type. Defaults to `None`.

    Raises:
        ValueError: If a field has an invalid value.

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
    context_parallel_mode: Literal["auto", "ulysses", "all_gather", "ring", "ulysses_ring"] = "auto"
    ulysses_shards: validators.Count | None = None
    expert_parallel: validators.Count = 1
    micro_batch_num: validators.Count = 1
    optimizer_shard: bool | validators.Level = False
    optimizer_shard_partition: Literal["flat", "whole"] = "flat"
    parallel_optimizer_threshold: validators.NotNegative = 64
    parallel_optimizer_exclude: tuple[validators.Pattern, ...] = ()
    gradient_accumulation_shard: bool = False
    gradient_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    optimizer_state_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_aggregation_group: validators.Count = 4
    recompute: bool | pydantic.InstanceOf[TransformerRecomputeConfig] = False
    vocab_emb_dp: bool = True
    sequence_parallel: bool = False
    parallel_rules: dict[str, validators.MeshAxis | None] | None = None
    layout_map: dict[validators.Pattern, tuple[validators.LayoutAxis | None, ...]] | None = None

    def __setattr__(self, name, value):
        if name == "layout_map":
            value = validators.layout_dict(value)
        # YAML and JSON files have a dict.
        if name == "recompute" and value and isinstance(value, dict):
            value = TransformerRecomputeConfig(**value)
        super().__setattr__(name, value)

    def _known_data_parallel(self):
        if self.data_parallel is None:
            raise ValueError(
                "`data_parallel` is None and depends on the number of ranks, which is unknown before "
                "`init`. Call `dtransformer.init(config)` first, or set `data_parallel`."
            )
        return self.data_parallel

    @property
    def mesh_spans_data(self) -> bool:
        """True if weights are all-gathered over data ranks inside a computation on the mesh."""
        operations = self.model_parallel * self.context_parallel * self.expert_parallel
        if self.optimizer_shard == 3 and operations > 1:
            return True
        return any("data" in axes for axes in (self.layout_map or {}).values())

    @property
    def placement(self):
        """`Placement` of model chunks on pipeline stages."""
        schedule = SCHEDULES[self.pipeline_schedule]
        return schedule.place(self.pipeline_stage, self.pipeline_chunks)

    @property
    def dp_mp_config(self) -> OpParallelConfig:
        """Degrees of a plain operation, as an `OpParallelConfig`."""
        return OpParallelConfig(self._known_data_parallel(), self.model_parallel)

    @property
    def embedding_dp_mp_config(self) -> EmbeddingOpParallelConfig:
        """Degrees of an embedding, as an `EmbeddingOpParallelConfig`."""
        return EmbeddingOpParallelConfig(
            self._known_data_parallel(), self.model_parallel, self.vocab_emb_dp
        )

    @property
    def moe_parallel_config(self) -> MoEParallelConfig:
        """Degrees of a mixture of experts, as a `MoEParallelConfig`."""
        return MoEParallelConfig(
            self._known_data_parallel(), self.model_parallel, self.expert_parallel
        )

    def why_replicated(
        self, path: str, shape: Sequence[int], item_bytes: int, has_constraint: bool
    ) -> str:
        """Return the reason why `optimizer_shard` keeps a weight replicated, or `""` if it shards it.

        A weight stays replicated if it has a constraint (with `"flat"`), is smaller than
        `parallel_optimizer_threshold`, or matches `parallel_optimizer_exclude`.

        Args:
            path: Path of the weight in the network.
            shape: Shape on this rank.
            item_bytes: Bytes per element.
            has_constraint: Whether Keras applies a constraint after every update.
        """
        if has_constraint and self.optimizer_shard_partition == "flat":
            return "its constraint needs the full weight"
        if math.prod(shape) * item_bytes < self.parallel_optimizer_threshold * 1024:
            return f"less than {self.parallel_optimizer_threshold} KB"
        if any(re.search(pattern, path) for pattern in self.parallel_optimizer_exclude):
            return "excluded"
        return ""

    def resolve(self, num_ranks: int, local_devices: int = 1) -> "TransformerOpParallelConfig":
        """Return a copy with `data_parallel` set for a job.

        Args:
            num_ranks: Integer. Number of ranks.
            local_devices: Integer. Devices per rank. Defaults to `1`.

        Raises:
            ValueError: If the product of the degrees is not the number of devices.
        """
        other_degrees = self.model_parallel * self.context_parallel * self.pipeline_stage
        num_devices = num_ranks * local_devices
        data = (
            self.data_parallel if self.data_parallel is not None else num_devices // other_degrees
        )
        if data * other_degrees != num_devices:
            needed = other_degrees if self.data_parallel is None else data * other_degrees
            multiple = "a multiple of " if self.data_parallel is None else ""
            devices = f" of {local_devices} local devices each" if local_devices > 1 else ""
            kind = "devices" if local_devices > 1 else "ranks"
            ranks = -(-needed // local_devices)
            can_start = ranks == 1 or importlib.util.find_spec("horovod") is not None
            first = "" if can_start else " (run 'dtransformer doctor --install-horovod' first)"
            raise ValueError(
                f"data_parallel={self.data_parallel} · model_parallel={self.model_parallel} · "
                f"context_parallel={self.context_parallel} · "
                f"pipeline_stage={self.pipeline_stage} needs {multiple}{needed} {kind}, but the "
                f"job has {num_ranks} ranks{devices}. Start it with `dtransformer launch -np {ranks}`"
                f"{first}, or change the config."
            )
        return dataclasses.replace(self, data_parallel=data)


_current = TransformerOpParallelConfig()


def get_parallel_config() -> TransformerOpParallelConfig:
    """Return the global parallel config, which layers and trainers use.

    Example:

    >>> get_parallel_config().model_parallel
    1
    """
    return _current


def set_parallel_config(config: TransformerOpParallelConfig) -> None:
    """Set the global parallel config of this process.

    Args:
        config: A `TransformerOpParallelConfig`.

    Raises:
        TypeError: If `config` has another type.
    """
    global _current
    check_config(config)
    _current = config


def check_config(config: object) -> None:
    """Raise a `TypeError` if `config` is not a `TransformerOpParallelConfig`."""
    if not isinstance(config, TransformerOpParallelConfig):
        raise TypeError(f"`config` must be a `TransformerOpParallelConfig`, got {config!r}.")


@contextlib.contextmanager
def parallel_config(
    config: TransformerOpParallelConfig | None = None, **fields
) -> Iterator[TransformerOpParallelConfig]:
    """Context manager that replaces the global parallel config.

    Args:
        config: A `TransformerOpParallelConfig`. `None` uses the current config.
        **fields: Fields to replace in it.

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
