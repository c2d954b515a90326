"""Time of collectives: rings of α–β, over the slowest link that a group crosses.

A step of a ring takes α, whatever it sends; what is sent takes its bytes over the bandwidth. A ring
that crosses nodes goes in and out of each once, so that it has the network cards of all of its
members there, and shares the node's with the other groups that cross it at once.
"""

import dataclasses

import numpy as np

from dtransformer.planner.clusters import Cluster
from dtransformer.planner.formulas import ring_elements


@dataclasses.dataclass(frozen=True)
class Group:
    """Groups of devices that send to each other along an axis of the grid.

    Args:
        members: number n of each, an array [N].
        stride: devices from one member to the next, an array [N].
        axis: "model", "context", "data", "expert" or "stage": some machines have links of their
            own for it.
    """

    members: np.ndarray
    stride: np.ndarray
    axis: str


def bytes_per_second(cluster: Cluster, group: Group):
    """Return the bandwidth that a ring of a group has, one way: an array [N]."""
    device, constants, node = cluster.device, cluster.device.constants, cluster.devices_per_node
    own = device.of_axis(group.axis)
    if own is not None:
        return np.full(np.shape(group.members), own.gb_per_second * 1e9)
    inside = device.inside_gb_per_second * constants.inside_share * 1e9
    between = device.between_gb_per_second * constants.between_share * 1e9
    per_node = np.clip(node // np.maximum(group.stride, 1), 1, group.members)
    crosses = group.members * group.stride > node
    return np.where(crosses, np.minimum(inside, between * per_node), inside)


def hop_seconds(cluster: Cluster, axis: str) -> float:
    """Return the seconds of a step of a ring along an axis, whatever it sends."""
    own = cluster.device.of_axis(axis)
    return (cluster.device.constants.hop_us if own is None else own.latency_us) * 1e-6


def call_seconds(cluster: Cluster, axis: str) -> float:
    """Return the seconds of a collective along an axis, whatever it sends and to how many."""
    own = cluster.device.of_axis(axis)
    return 0.0 if own is None else own.call_us * 1e-6


def collective_seconds(cluster: Cluster, kind: str, num_bytes, group: Group):
    """Return the seconds of a collective: an array [N], 0 where a group has one member.

    Args:
        cluster: the `Cluster`.
        kind: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all".
        num_bytes: bytes of the whole.
        group: the `Group`.
    """
    steps = (2 if kind == "all-reduce" else 1) * (group.members - 1)
    sent = ring_elements(kind, num_bytes, group.members)
    seconds = sent / bytes_per_second(cluster, group) + steps * hop_seconds(cluster, group.axis)
    seconds = seconds + call_seconds(cluster, group.axis)
    return np.where(group.members > 1, seconds, 0.0)


def send_seconds(cluster: Cluster, num_bytes, stride):
    """Return the seconds to send to the device that is `stride` further: an array [N]."""
    device, constants = cluster.device, cluster.device.constants
    own = device.of_axis("stage")
    inside = device.inside_gb_per_second * constants.inside_share
    between = device.between_gb_per_second * constants.between_share
    rate = np.where(np.asarray(stride) >= cluster.devices_per_node, between, inside)
    if own is not None:
        rate = own.gb_per_second
    begins = hop_seconds(cluster, "stage") + call_seconds(cluster, "stage")
    return num_bytes / (rate * 1e9) + begins
