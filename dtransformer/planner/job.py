"""Training job to plan, and the properties of the training system."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dtransformer.errors import InputError, check_int, short_repr
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.clusters import Device
from dtransformer.planner.layouts import Layouts

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
# State values per parameter. Adafactor's row and column statistics are negligible.
OPTIMIZERS = {
    "sgd": 0, "lion": 1, "rmsprop": 1, "adagrad": 1, "muon": 1, "adam": 2, "adamw": 2, "nadam": 2,
    "adamax": 2, "lamb": 2, "adafactor": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ParameterBytes:
    """Unsharded bytes per parameter of a training system.

    Args:
        weights, gradients, states: Bytes per parameter.
        table_states: Additional state bytes per parameter of tables and heads.
        copies_weights: Boolean, whether a rank without a mesh computes with a 16-bit copy of the
            weights at levels 1 and 2 and shards the float32 weights with the states.
    """

    weights: float
    gradients: float
    states: float
    table_states: float = 0
    copies_weights: bool = False

    def at_level(self, level, is_on_mesh, accumulates_full=False):
        """Return the bytes of a layout, as a `(weights, gradients, states)` tuple.

        Args:
            level: Integer from 0 to 3, or an array of them.
            is_on_mesh: Boolean or array of booleans, whether operations are sharded.
            accumulates_full: See `formulas.state_bytes`.
        """
        level = np.asarray(level)
        copies = self.copies_weights & ((level == 1) | (level == 2)) & ~np.asarray(is_on_mesh)
        # Shards of gradients are float32. Full gradients have the type of the copy.
        gradients = np.where(copies & ((level == 1) | accumulates_full), 2, self.gradients)
        states = self.states + np.where(copies, self.weights, 0)
        return np.where(copies, 2, self.weights), gradients, states


@dataclasses.dataclass(frozen=True)
class System:
    """Properties of a training system that determine its memory and communication.

    Args:
        parameter_bytes: `ParameterBytes`.
        sent_gradient_bytes: Bytes per gradient element in the reduction between replicas.
        hidden_share: Fraction of the reduction that overlaps with the backward pass.
        hides_on_mesh: Boolean, whether reductions also overlap on a mesh and in a pipeline.
        repeats_last_sum: Boolean, whether a recomputed block also repeats its last all-reduce.
        shards_sends: Boolean, whether each device of a stage sends only its shard to the next
            stage.
        gathers_per_block: Number of all-gathers per block at level 3: 1 if a single all-gather
            covers all weights of the block.
        waits: Tuple with the number of data-parallel collectives per step for each level. Counts
            serialized collectives without overlap, except the gradient reduction.
        stage_waits, mesh_waits: Same count for the additional collectives of a pipeline and of a
            mesh.
        loss_sums: Number of all-reduces over the model axis with one value per token that a
            sharded vocabulary needs: the largest logit, the sum of exponentials and the label's
            logit for cross entropy.
        sum_bytes: Bytes per element in sums over the model axis. `None` uses the size of an
            activation.
        kernels: "unfused" if attention scores are written to memory, "fused" if fused kernels
            compute attention, or "library" for this library, which fuses attention except on
            meshes and takes `Constants.slowdown` times longer.
        logit_items: Items that the head and the loss read and write per logit.
        hidden_sum_share: Fraction of the sums over the model axis and of the sends between stages
            that overlaps with products.
    """

    parameter_bytes: ParameterBytes
    sent_gradient_bytes: float
    hidden_share: float
    hides_on_mesh: bool = False
    repeats_last_sum: bool = False
    shards_sends: bool = False
    gathers_per_block: int = 1
    waits: tuple[int, int, int, int] = (0, 0, 0, 0)
    stage_waits: int = 0
    mesh_waits: int = 0
    loss_sums: int = 3
    sum_bytes: int | None = None
    kernels: str = "unfused"
    logit_items: int = 10
    hidden_sum_share: float = 0.0

    def fuses_attention(self, layouts: Layouts):
        """Return whether fused kernels compute attention, as a Boolean or an array [N]."""
        return self.kernels == "fused" or (self.kernels == "library") & ~layouts.is_on_mesh


# Megatron-LM with fused attention, sharded optimizer states and overlapped communication.
REFERENCE = System(
    ParameterBytes(weights=2, gradients=4, states=12),
    sent_gradient_bytes=3,  # Gradients are reduced as float32, new weights gathered as bfloat16.
    hidden_share=0.9,
    hides_on_mesh=True,
    shards_sends=True,
    kernels="fused",
    # Its loss casts logits to float32 and passes over them five times, and twice over gradients.
    logit_items=29,
    hidden_sum_share=0.5,
)


@dataclasses.dataclass(frozen=True)
class Job:
    """Training job to plan: batch size, precision, optimizer and fixed config fields.

    Args:
        global_batch: Integer. Sequences per step over all replicas.
        precision: "float32", "mixed_bfloat16" or "mixed_float16" with float32 weights, or
            "bfloat16" with bfloat16 weights. `None` selects mixed precision in the device's
            16-bit type, see `on`.
        optimizer: Name of a Keras optimizer in lower case.
        fixed: Dict of `TransformerOpParallelConfig` fields that the planner must not change.
        averages: Boolean, whether the optimizer keeps moving averages of the weights.

    Raises:
        InputError: If a value is invalid.
    """

    global_batch: int
    precision: str | None = None
    optimizer: str = "adamw"
    fixed: Mapping = dataclasses.field(default_factory=dict)
    averages: bool = False

    def __post_init__(self):
        check_int("global_batch", self.global_batch)
        if self.precision not in (None, *PRECISIONS):
            raise InputError(
                f"`precision` must be one of {', '.join(PRECISIONS)}, got {short_repr(self.precision)}."
            )
        if self.optimizer not in OPTIMIZERS:
            raise InputError(
                f"`optimizer` must be one of {', '.join(OPTIMIZERS)}, got {short_repr(self.optimizer)}."
            )

    def on(self, device: Device) -> "Job":
        """Return a copy of the job with a precision that `device` supports.

        Raises:
            InputError: If the job sets bfloat16 and the device lacks it.
        """
        if "bfloat16" in (self.precision or "") and not device.has_bfloat16:
            raise InputError(
                f"{device.name} does not support the precision {self.precision}. "
                "Use mixed_float16 or float32."
            )
        default = "mixed_bfloat16" if device.has_bfloat16 else "mixed_float16"
        return dataclasses.replace(self, precision=self.precision or default)

    @property
    def is_mixed(self) -> bool:
        """True if products use 16-bit numbers."""
        return self.precision != "float32"

    @property
    def item_bytes(self) -> int:
        """Bytes of one activation element."""
        return 2 if self.is_mixed else 4

    def fixed_config(self) -> TransformerOpParallelConfig:
        """Return a config with the fixed fields. `recompute` may be a dict of its fields.

        Raises:
            TypeError, ValueError: If a field has an invalid value.
        """
        return TransformerOpParallelConfig(**self.fixed)

    def system(self) -> System:
        """Return the properties of this library when it trains the job.

        Variables, gradients and states are float32 except with the precision "bfloat16" and, for
        states, with `optimizer_state_dtype`.
        """
        value_bytes = 2 if self.precision == "bfloat16" else 4
        config = self.fixed_config()
        moment_bytes = 2 if config.optimizer_state_dtype == "bfloat16" else value_bytes
        parameter_bytes = ParameterBytes(
            weights=value_bytes,
            gradients=value_bytes,
            states=moment_bytes * OPTIMIZERS[self.optimizer] + value_bytes * self.averages,
            # Muon updates tables and heads with AdamW, which has a second state.
            table_states=moment_bytes * (self.optimizer == "muon"),
            copies_weights=self.is_mixed and value_bytes == 4,
        )
        return System(
            parameter_bytes,
            sent_gradient_bytes=value_bytes if config.gradient_dtype == "float32" else 2,
            # Assumption: a single compiled function can overlap half of the reductions.
            hidden_share=0.5,
            # All levels count the gradient rows of embedding tables. Levels 1 and 2 also exchange
            # sizes, norms and new weights.
            waits=(1, 4, 4, 1),
            # Pipelines and meshes compare batches and reduce norms. Pipelines also reduce logs.
            stage_waits=3,
            mesh_waits=2,
            loss_sums=5,  # Accuracy needs two more than the loss.
            # DTensor sends bfloat16 as float32.
            sum_bytes=4 if "bfloat16" in (self.precision or "") else None,
            kernels="library",
        )
