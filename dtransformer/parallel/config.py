"""How a job is divided: the config dataclasses, the global config and its scope.

Every field is checked on construction and on every assignment; a refused value
leaves the old one in place. A wrong type is a TypeError, a wrong value a
ValueError, and a bool is not an int. Both name the field, what came and what is
allowed.
"""

import contextlib
import dataclasses
import difflib
import math
import re

RECOMPUTE_PARTS = ("attention", "feed_forward", "norm")
MESH_AXES = ("data", "model", None)
GRADIENT_DTYPES = ("float32", "float16", "bfloat16")
PIPELINE_SCHEDULES = ("1f1b", "gpipe", "interleaved")


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def _count(name, value):
    """Check a degree of parallelism or another count: an int of at least 1."""
    if not _is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _optional_count(name, value):
    if value is not None:
        _count(name, value)


def _flag(name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")


def _non_negative(name, value):
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be finite and at least 0, got {value}")


def _positive(name, value):
    _non_negative(name, value)
    if value == 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")


def _shard_level(name, value):
    if isinstance(value, bool):
        return
    if not _is_int(value):
        raise TypeError(
            f"{name} must be False, True (level 1) or a level 0 to 3, "
            f"got {value!r} ({type(value).__name__})"
        )
    if not 0 <= value <= 3:
        raise ValueError(f"{name} must be False, True (level 1) or a level 0 to 3, got {value}")


def _recompute(name, value):
    if not isinstance(value, (bool, TransformerRecomputeConfig)):
        raise TypeError(
            f"{name} must be True, False or a TransformerRecomputeConfig, "
            f"got {value!r} ({type(value).__name__})"
        )


def _parts(name, value):
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of names, got {value!r} ({type(value).__name__})")
    for part in value:
        if part not in RECOMPUTE_PARTS:
            raise ValueError(f"{name} may hold {', '.join(RECOMPUTE_PARTS)}; got {part!r}")


def _patterns(name, value):
    if not isinstance(value, (tuple, list)) or not all(isinstance(v, str) for v in value):
        raise TypeError(
            f"{name} must be a tuple of regular expressions, got {value!r} ({type(value).__name__})"
        )
    for pattern in value:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{name} takes regular expressions, got {value!r}: {pattern!r} is none ({error})"
            ) from error


def _one_of(*allowed):
    def check(name, value):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, got {value!r} ({type(value).__name__})")
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")

    return check


def _rules(name, value):
    if value is None:
        return
    if not isinstance(value, dict):
        raise TypeError(f"{name} must be a dict, got {value!r} ({type(value).__name__})")
    for logical, axis in value.items():
        if not isinstance(logical, str) or axis not in MESH_AXES:
            raise ValueError(
                f"{name} maps names to one of {', '.join(map(repr, MESH_AXES))}; got {value!r}"
            )


def _field(default, check):
    return dataclasses.field(default=default, metadata={"check": check})


class _Checked:
    """Checks every field on assignment, by the function in its metadata."""

    def __setattr__(self, name, value):
        field = self.__dataclass_fields__.get(name)
        if field is None:
            names = list(self.__dataclass_fields__)
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names)}"
            raise AttributeError(f"{type(self).__name__} has no field {name!r}{hint}")
        field.metadata["check"](name, value)
        copies = {list: tuple, dict: dict}
        object.__setattr__(self, name, copies.get(type(value), lambda x: x)(value))


@dataclasses.dataclass
class OpParallelConfig(_Checked):
    """Degrees of parallelism of one operation.

    Args:
        data_parallel: number of slices of the batch.
        model_parallel: number of slices of the weights.
    """

    data_parallel: int = _field(1, _count)
    model_parallel: int = _field(1, _count)


@dataclasses.dataclass
class EmbeddingOpParallelConfig(_Checked):
    """Degrees of parallelism of an embedding.

    Args:
        data_parallel: number of slices of the batch.
        model_parallel: number of slices of the weights.
        vocab_emb_dp: whether every rank holds the whole table (True), or row
            slices of it over the model axis (False).
    """

    data_parallel: int = _field(1, _count)
    model_parallel: int = _field(1, _count)
    vocab_emb_dp: bool = _field(True, _flag)

    @property
    def dp_mp_config(self):
        """The degrees alone, as an `OpParallelConfig`."""
        return OpParallelConfig(self.data_parallel, self.model_parallel)


@dataclasses.dataclass
class MoEParallelConfig(_Checked):
    """Degrees of parallelism of a mixture of experts.

    Args:
        data_parallel: number of slices of the batch.
        model_parallel: number of slices of each expert's weights.
        expert_parallel: number of slices of the experts.
    """

    data_parallel: int = _field(1, _count)
    model_parallel: int = _field(1, _count)
    expert_parallel: int = _field(1, _count)


@dataclasses.dataclass
class MoEConfig(_Checked):
    """A mixture of experts in place of a feed-forward layer.

    Args:
        expert_num: number of experts; 1 is an ordinary feed-forward layer.
        capacity_factor: tokens an expert takes, as a multiple of an even share.
        aux_loss_factor: weight of the load-balancing loss.
        num_experts_chosen: experts that each token is sent to.
    """

    expert_num: int = _field(1, _count)
    capacity_factor: float = _field(1.1, _positive)
    aux_loss_factor: float = _field(0.05, _non_negative)
    num_experts_chosen: int = _field(1, _count)


@dataclasses.dataclass
class TransformerRecomputeConfig(_Checked):
    """What the backward pass computes again instead of keeping it.

    Args:
        recompute: whether whole blocks are recomputed.
        mp_comm_recompute: whether outputs of model-parallel collectives are
            recomputed too (True), or kept (False).
        parallel_optimizer_comm_recompute: whether parameters gathered by the
            sharded optimizer are gathered again.
        recompute_slice_activation: whether a block's kept input is sliced over
            the model axis.
        select: parts of a block to recompute instead of the whole:
            `"attention"`, `"feed_forward"`, `"norm"`.
    """

    recompute: bool = _field(False, _flag)
    mp_comm_recompute: bool = _field(True, _flag)
    parallel_optimizer_comm_recompute: bool = _field(False, _flag)
    recompute_slice_activation: bool = _field(False, _flag)
    select: tuple = _field((), _parts)


@dataclasses.dataclass
class TransformerOpParallelConfig(_Checked):
    """How a Transformer's training is divided over the ranks of a job.

    The product of `data_parallel`, `model_parallel`, `context_parallel` and
    `pipeline_stage` is the number of ranks.

    Args:
        data_parallel: number of slices of the batch; None takes what the ranks
            leave.
        model_parallel: number of slices of each operation's weights.
        pipeline_stage: number of stages that the blocks are spread over.
        pipeline_schedule: `"1f1b"`, which keeps the activations of at most as many
            micro-batches as there are stages; `"gpipe"`, which keeps all; or
            `"interleaved"`: 1F1B with several chunks of the network on each stage.
        pipeline_chunks: number of chunks of each stage, with `"interleaved"`. Stages
            wait less, and send more.
        context_parallel: number of slices of the sequence in attention.
        expert_parallel: number of slices of the experts.
        micro_batch_num: number of micro-batches that a batch is split into.
        optimizer_shard: False or 0, True or 1 (optimizer states are cut over the
            data group), 2 (gradients too), 3 (parameters too).
        parallel_optimizer_threshold: weights of fewer KB stay whole on every rank.
        parallel_optimizer_exclude: tuple of regular expressions; weights in whose path
            one is found stay whole, too.
        gradient_accumulation_shard: whether the gradients of micro-batches are added up
            as slices, at levels 2 and 3: they are sent once for every micro-batch.
        gradient_dtype: `"float32"`, or `"float16"` or `"bfloat16"`, in which gradients
            are sent between the ranks of the data group.
        gradient_aggregation_group: number of groups that gradients are fused
            into for communication.
        recompute: True, False or a `TransformerRecomputeConfig`.
        vocab_emb_dp: whether every rank holds the whole embedding table (True),
            or row slices of it over the model axis (False).
        sequence_parallel: whether the residual stream is cut over the model axis
            along the sequence.
        parallel_rules: dict of logical names of dimensions to the mesh axis that cuts
            them, `"data"`, `"model"` or None; rows that replace, or are added to, those
            of `dtransformer.parallel.layout.rules`.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that is not allowed.

    Example:

    >>> config = TransformerOpParallelConfig(data_parallel=2, model_parallel=4)
    >>> config.dp_mp_config
    OpParallelConfig(data_parallel=2, model_parallel=4)
    """

    data_parallel: int | None = _field(None, _optional_count)
    model_parallel: int = _field(1, _count)
    pipeline_stage: int = _field(1, _count)
    pipeline_schedule: str = _field("1f1b", _one_of(*PIPELINE_SCHEDULES))
    pipeline_chunks: int = _field(1, _count)
    context_parallel: int = _field(1, _count)
    expert_parallel: int = _field(1, _count)
    micro_batch_num: int = _field(1, _count)
    optimizer_shard: bool | int = _field(False, _shard_level)
    parallel_optimizer_threshold: float = _field(64, _non_negative)
    parallel_optimizer_exclude: tuple = _field((), _patterns)
    gradient_accumulation_shard: bool = _field(False, _flag)
    gradient_dtype: str = _field("float32", _one_of(*GRADIENT_DTYPES))
    gradient_aggregation_group: int = _field(4, _count)
    recompute: bool | TransformerRecomputeConfig = _field(False, _recompute)
    vocab_emb_dp: bool = _field(True, _flag)
    sequence_parallel: bool = _field(False, _flag)
    parallel_rules: dict | None = _field(None, _rules)

    def _known_data_parallel(self):
        if self.data_parallel is None:
            raise ValueError(
                "data_parallel is None (what the ranks leave) and the number of ranks is not known "
                "yet: call dtransformer.init(config) first, or set data_parallel"
            )
        return self.data_parallel

    @property
    def num_pipeline_parts(self):
        """The number of parts that the network is divided into: chunks of all stages."""
        return self.pipeline_stage * self.pipeline_chunks

    @property
    def dp_mp_config(self):
        """The degrees of an ordinary operation, as an `OpParallelConfig`."""
        return OpParallelConfig(self._known_data_parallel(), self.model_parallel)

    @property
    def embedding_dp_mp_config(self):
        """The degrees of an embedding, as an `EmbeddingOpParallelConfig`."""
        return EmbeddingOpParallelConfig(
            self._known_data_parallel(), self.model_parallel, self.vocab_emb_dp
        )

    @property
    def moe_parallel_config(self):
        """The degrees of a mixture of experts, as a `MoEParallelConfig`."""
        return MoEParallelConfig(
            self._known_data_parallel(), self.model_parallel, self.expert_parallel
        )

    def why_whole(self, path, shape, item_bytes, has_constraint):
        """Return why `optimizer_shard` does not cut a weight; "" where it does.

        Args:
            path: its path in the network.
            shape: its shape on this rank.
            item_bytes: bytes of an entry.
            has_constraint: whether Keras projects it after every update.
        """
        if has_constraint:
            return "its constraint needs the whole"
        if math.prod(shape) * item_bytes < self.parallel_optimizer_threshold * 1024:
            return f"less than {self.parallel_optimizer_threshold} KB"
        if any(re.search(pattern, path) for pattern in self.parallel_optimizer_exclude):
            return "excluded"
        return ""

    def resolve(self, num_ranks, local_devices=1):
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
            raise ValueError(
                f"data_parallel={asked} · model_parallel={self.model_parallel} · {context}"
                f"pipeline_stage={self.pipeline_stage} needs {multiple}{needed} {kind}, but the job "
                f"has {num_ranks}{f' ranks{devices}' * bool(devices)}: start it with horovodrun -np "
                f"{ranks}, or change the config"
            )
        return dataclasses.replace(self, data_parallel=data)


def check_schedule(name, num_stages, num_micro_batches, num_chunks=1):
    """Check that a schedule of a pipeline can be carried out.

    Args:
        name: one of `PIPELINE_SCHEDULES`.
        num_stages: number p of stages.
        num_micro_batches: number m of micro-batches of a step.
        num_chunks: number v of chunks of each stage.

    Raises:
        ValueError: there is no such schedule, there are fewer micro-batches than stages,
            or the chunks are not what the schedule takes.
    """
    _one_of(*PIPELINE_SCHEDULES)("pipeline_schedule", name)
    if num_micro_batches < num_stages:
        raise ValueError(
            f"micro_batch_num={num_micro_batches} is less than pipeline_stage={num_stages}: some "
            f"stages would never work at the same time; set micro_batch_num={num_stages} or more"
        )
    if name != "interleaved":
        if num_chunks != 1:
            raise ValueError(
                f"pipeline_chunks={num_chunks} needs pipeline_schedule='interleaved', got {name!r}"
            )
        return
    if num_chunks < 2:
        raise ValueError(
            f"pipeline_schedule='interleaved' needs pipeline_chunks of 2 or more, got {num_chunks}"
        )
    if num_micro_batches % num_stages:
        raise ValueError(
            f"pipeline_schedule='interleaved' needs a multiple of pipeline_stage={num_stages} as "
            f"micro_batch_num, got {num_micro_batches}"
        )


_current = TransformerOpParallelConfig()


def get_parallel_config():
    """Return the parallel config that layers and trainers read.

    Example:

    >>> get_parallel_config().model_parallel
    1
    """
    return _current


def set_parallel_config(config):
    """Make `config` the parallel config of this process.

    Args:
        config: a `TransformerOpParallelConfig`.

    Raises:
        TypeError: `config` is something else.
    """
    global _current
    if not isinstance(config, TransformerOpParallelConfig):
        raise TypeError(
            f"expected a TransformerOpParallelConfig, got {config!r} ({type(config).__name__})"
        )
    _current = config


@contextlib.contextmanager
def parallel_config(config=None, **fields):
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
