"""Job to plan: what is trained, and how a system carries it out."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dtransformer.errors import InputError, check_int, shown
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.clusters import Device

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
# States of a parameter, in float32 numbers; of those that keep rows and columns, as good as none.
OPTIMIZERS = {
    "sgd": 0, "lion": 1, "rmsprop": 1, "adagrad": 1, "muon": 1, "adam": 2, "adamw": 2, "nadam": 2,
    "adamax": 2, "lamb": 2, "adafactor": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class System:
    """How a training system carries a layout out.

    Args:
        weight_bytes, gradient_bytes, state_bytes: of a parameter, on its rank, unsharded.
        sent_gradient_bytes: of a gradient as it is reduced between replicas.
        hidden_share: share of that reduction that is hidden behind the backward pass.
        hides_on_mesh: whether that is so on a mesh and in a pipeline, too.
        repeats_last_sum: whether a recomputed block repeats its last all-reduce, too.
        shards_sends: whether the devices of a stage send a shard each to the next, not all of it.
        gathers_a_block: all-gathers of a block's weights at level 3: one for all of them, or for
            each.
        waits: by level the collectives of a step of replicas that nothing is computed beside, and
            that wait for each other, but for the reduction of gradients itself.
        stage_waits, mesh_waits: those of a step of a pipeline, and of a mesh.
        loss_sums: sums of a number a token, over the model axis, that a sharded vocabulary takes:
            the largest logit, the exponentials and the label's logit of cross entropy.
        sum_bytes: of a number in a sum over the model axis; None for an activation's.
        copies_weights: whether, without a mesh, a rank computes with a 16-bit copy of the weights at
            levels 1 and 2, and shards float32 ones with the states.
    """

    weight_bytes: float
    gradient_bytes: float
    state_bytes: float
    sent_gradient_bytes: float
    hidden_share: float
    hides_on_mesh: bool = False
    repeats_last_sum: bool = False
    shards_sends: bool = False
    gathers_a_block: int = 1
    waits: tuple[int, int, int, int] = (0, 0, 0, 0)
    stage_waits: int = 0
    mesh_waits: int = 0
    loss_sums: int = 3
    sum_bytes: int | None = None
    copies_weights: bool = False

    def bytes_a_parameter(self, level, is_on_mesh):
        """Return the bytes of a parameter's weight, gradient and states, before they are sharded.

        Args:
            level: 0 to 3, or an array of them.
            is_on_mesh: whether operations are sharded.
        """
        level = np.asarray(level)
        copies = self.copies_weights & ((level == 1) | (level == 2)) & ~np.asarray(is_on_mesh)
        gradients = np.where(copies & (level == 1), 2, self.gradient_bytes)
        states = self.state_bytes + np.where(copies, self.weight_bytes, 0)
        return np.where(copies, 2, self.weight_bytes), gradients, states


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained.

    Args:
        global_batch: sequences of a step, of all replicas.
        precision: "float32", "mixed_bfloat16" or "mixed_float16", whose weights are float32, or
            "bfloat16", whose are not; None for the mixed 16 bits of the device, see `on`.
        optimizer: name of a Keras optimizer.
        fixed: dict of fields of `TransformerOpParallelConfig` that are given.
        averages: whether the optimizer keeps moving averages of the weights, too.

    Raises:
        InputError: a value is not one that there is.
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
                f"precision must be one of {', '.join(PRECISIONS)}; got {shown(self.precision)}"
            )
        if self.optimizer not in OPTIMIZERS:
            raise InputError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {shown(self.optimizer)}"
            )

    def on(self, device: Device) -> "Job":
        """Return the job as a device carries it out: in a precision that it has.

        Raises:
            InputError: it has not the one that is given.
        """
        if "bfloat16" in (self.precision or "") and not device.has_bfloat16:
            raise InputError(
                f"{device.name} has no bfloat16: give precision mixed_float16, or float32"
            )
        usual = "mixed_bfloat16" if device.has_bfloat16 else "mixed_float16"
        return dataclasses.replace(self, precision=self.precision or usual)

    @property
    def is_mixed(self) -> bool:
        """Whether products are computed in 16 bits."""
        return self.precision != "float32"

    @property
    def item_bytes(self) -> int:
        """The bytes of an activation."""
        return 2 if self.is_mixed else 4

    def fixed_config(self) -> TransformerOpParallelConfig:
        """Return a config of the fixed fields; `recompute` may be a dict of its own fields.

        Raises:
            TypeError, ValueError: a field has a wrong value.
        """
        return TransformerOpParallelConfig(**self.fixed)

    def system(self) -> System:
        """Return how this library carries the job out.

        Variables, gradients and states are float32, also where products are of mixed 16 bits.
        """
        number = 2 if self.precision == "bfloat16" else 4
        return System(
            weight_bytes=number,
            gradient_bytes=number,
            state_bytes=number * (OPTIMIZERS[self.optimizer] + self.averages),
            sent_gradient_bytes=number if self.fixed_config().gradient_dtype == "float32" else 2,
            hidden_share=0.5,  # assumed: one compiled function, whose reductions run beside products
            # Rows of tables: how many, then which. Then with sharded states the sizes of what is
            # exchanged, norms, and new weights.
            waits=(1, 4, 4, 1),
            # Batches are compared; norms; and of a pipeline what logs tell.
            stage_waits=3,
            mesh_waits=2,
            loss_sums=5,  # two for the accuracy
            # DTensor sends bfloat16 as float32.
            sum_bytes=4 if "bfloat16" in (self.precision or "") else None,
            copies_weights=self.is_mixed and number == 4,
        )
