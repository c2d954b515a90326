"""Report of the distribution of an epoch's tokens over experts, and its communication on a mesh.

The volume is theoretical: a function of `MoEConfig` and the stream's shape (Lepikhin et al., 2020,
GShard, arXiv 2006.16668, §3).
"""

import dataclasses
import math
import os

import numpy as np
import tensorflow as tf

from dtransformer.errors import check_installed
from dtransformer.files import atomic_write
from dtransformer.layers.moe import MoE
from dtransformer.parallel.expert_parallel.capacity_slots import capacity
from dtransformer.parallel.expert_parallel.token_groups import get_group_axis
from dtransformer.parallel.mesh.axis_rules import axis_size, mesh_axis
from dtransformer.parallel.runtime import job
from dtransformer.tables import columns

# Values that a `MoE` reports after the token counts of its experts.
NUMBERS = "choices", "tokens", "entropy"


@dataclasses.dataclass(frozen=True)
class LayerLoad:
    """Load of the experts of one layer.

    Args:
        layer: Path of the `MoE`.
        accepted: Tuple with the number of tokens that each expert accepted.
        choices: Number of choices, including dropped ones.
        tokens: Number of tokens.
        entropy: Sum over tokens of the entropy of the router's probabilities, in nats.

    Example:

    >>> load = LayerLoad("moe", (36.0, 12.0), choices=64, tokens=64, entropy=32.0)
    >>> load.dropped_share, load.mean_entropy
    (0.25, 0.5)
    """

    layer: str
    accepted: tuple[float, ...]
    choices: float
    tokens: float
    entropy: float

    @classmethod
    def from_loads(cls, layer: str, loads: np.ndarray) -> "LayerLoad":
        """Return the load from the array [E + 3] that a `MoE` reports for `layer`."""
        accepted = loads[: -len(NUMBERS)]
        scalars = loads[-len(NUMBERS) :]
        return cls(layer, tuple(map(float, accepted)), *map(float, scalars))

    @property
    def dropped_share(self) -> float:
        """Fraction of choices that experts did not accept."""
        return 1 - sum(self.accepted) / self.choices if self.choices else 0.0

    @property
    def mean_entropy(self) -> float:
        """Mean entropy of the router's probabilities in nats, at most ln E."""
        return self.entropy / self.tokens if self.tokens else 0.0


@dataclasses.dataclass(frozen=True)
class ExpertLoad:
    """Load of the experts of all layers. `str(load)` is a table.

    Args:
        layers: Tuple of `LayerLoad`s.
    """

    layers: tuple[LayerLoad, ...]

    def __str__(self):
        lines = [("layer", "tokens", "dropped", "entropy", "maximum", "share of each expert")]
        for load in self.layers:
            total = max(sum(load.accepted), 1)
            shares = " ".join(f"{accepted / total:.1%}" for accepted in load.accepted)
            max_entropy = math.log(len(load.accepted))
            entropy = load.mean_entropy
            texts = f"{load.tokens:,.0f}", f"{load.dropped_share:.1%}", f"{entropy:.3f}"
            lines.append((load.layer, *texts, f"{max_entropy:.3f}", shares))
        return "\n".join(columns(lines, right=(1, 2, 3, 4)))

    def write(self, path: str | os.PathLike) -> None:
        """Write a .png picture with the load of each expert of each layer.

        Args:
            path: Path of the file.

        Raises:
            InputError: If matplotlib is missing or the file cannot be written.
        """
        figure = self.plot()
        with atomic_write(path) as fresh:
            figure.savefig(fresh, dpi=120, format="png")

    def plot(self):
        """Return a matplotlib figure with the load of each expert as a multiple of the mean."""
        check_installed("matplotlib", "Pictures")
        from matplotlib.figure import Figure

        max_experts = max(len(load.accepted) for load in self.layers)
        figure = Figure(
            figsize=(2 + 0.6 * max_experts, 1.5 + 0.4 * len(self.layers)), layout="constrained"
        )
        axes = figure.subplots()
        table = np.full((len(self.layers), max_experts), np.nan)
        for row, load in enumerate(self.layers):
            mean = max(sum(load.accepted), 1) / len(load.accepted)
            table[row, : len(load.accepted)] = np.asarray(load.accepted) / mean
        image = axes.imshow(table, vmin=0, vmax=2, cmap="RdBu_r", aspect="auto")
        figure.colorbar(image, label="load / mean load")
        names = [f"{load.layer} ({load.dropped_share:.1%} dropped)" for load in self.layers]
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.set_xticks(range(max_experts))
        axes.set_xlabel("expert")
        return figure


def buffer_elements(layer: MoE, stream_shape: tuple[int, int, int]) -> int:
    """Return the number of elements of the expert buffers [g, E, c, h] on a device.

    Args:
        layer: A `MoE`.
        stream_shape: Shape (b, s, h) of the residual stream.
    """
    batch, length, features = stream_shape
    config = layer.config
    shards = axis_size(mesh_axis("batch"))
    if config.expert_group_size is None:
        groups = 1
        size = batch * length // shards
        max_tokens = capacity(batch * length, config)
    else:
        size = min(config.expert_group_size, length)
        in_sequence = math.ceil(length / size) // axis_size(get_group_axis(length, size))
        groups = batch // shards * in_sequence
        max_tokens = capacity(size, config)
    slots = size if max_tokens is None else min(max_tokens, size)
    return groups * config.expert_num * slots * features


def summed_elements(layer: MoE, stream_shape: tuple[int, int, int]) -> int:
    """Return the number of elements that are all-reduced over the model axis in the forward pass.

    The backward pass has the same number. Experts' outputs are summed forward, and gradients of
    their inputs backward, with one sum for a gate and its mapping. A shared expert counts as an
    ordinary feed-forward layer.

    Args:
        layer: A `MoE`.
        stream_shape: Shape (b, s, h) of the residual stream.
    """
    elements = buffer_elements(layer, stream_shape)
    shared = 0
    if layer.shared_experts is not None:
        shards = axis_size(mesh_axis("batch")) * axis_size(mesh_axis("length_shards"))
        shared = math.prod(stream_shape) // shards
    return elements + shared


def all_to_all_bytes(layer: MoE, stream_shape: tuple[int, int, int], recomputes: bool) -> int:
    """Return the bytes that a device sends to devices with other experts.

    Each all-to-all sends the buffers' bytes · (e − 1) / e. There are four: tokens and outputs in
    the forward pass, and their gradients in the backward pass. Recomputation repeats the first two.

    Args:
        layer: A `MoE`.
        stream_shape: Shape (b, s, h) of the residual stream.
        recomputes: Boolean, whether the layer is recomputed.
    """
    shards = axis_size(mesh_axis("expert"))
    item_bytes = tf.as_dtype(layer.compute_dtype).size
    bytes_per_call = buffer_elements(layer, stream_shape) * item_bytes * (shards - 1) / shards
    return round(bytes_per_call * (6 if recomputes else 4))


def num_expert_rows(layer: MoE, stream_shape: tuple[int, int, int]) -> float:
    """Return the number of rows that experts compute per sequence, over all shards of the sequence.

    On one device this is k per token. On a mesh it is the number of rows in the buffers.

    Args:
        layer: A `MoE`.
        stream_shape: Shape (b, s, h) of the residual stream.
    """
    batch, length, features = stream_shape
    if job.mesh() is None:
        return length * layer.config.num_experts_chosen
    elements = buffer_elements(layer, stream_shape) * axis_size(mesh_axis("length_shards"))
    return elements / (features * batch / axis_size(mesh_axis("batch")))
