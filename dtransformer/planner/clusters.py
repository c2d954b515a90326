"""Devices, links and clusters, as data.

Figures are the vendors' own: products of 16 bits without sparsity, memory of 10^9 bytes, links one
way. What of them training reaches, `Constants` says.
"""

import dataclasses
import pathlib
from collections.abc import Mapping

from dtransformer.errors import InputError, check_int, shown
from dtransformer.tables import read_table


@dataclasses.dataclass(frozen=True)
class Constants:
    """What of a device's and its links' figures training reaches.

    A product [M, K] × [K, N] takes 2·M·K·N / (peak · product_share), times (1 + half_rows / M),
    (1 + half_features / K) and (1 + half_features / N).

    Args:
        product_share: share of the peak that large products reach.
        half_rows: rows M at which a product reaches half of that.
        half_features: features K or N at which a product reaches half of that.
        memory_share: share of the memory's bandwidth that what is no product reaches.
        pass_overhead_us: microseconds of a block's pass that no figure explains: starts of kernels.
        inside_share: share of the links' bandwidth inside of a node that a ring reaches.
        between_share: share of the network's bandwidth that a ring reaches.
        hop_us: microseconds of a step of a ring, whatever it sends.
        source: where they come from.
    """

    product_share: float
    half_rows: float
    half_features: float
    memory_share: float
    pass_overhead_us: float
    inside_share: float
    between_share: float
    hop_us: float
    source: str = ""


_TABLES = read_table(pathlib.Path(__file__).with_name("devices.yaml"))
A100, CPU = (Constants(**_TABLES["constants"][name]) for name in ("a100", "cpu"))
HOPPER = dataclasses.replace(A100, **_TABLES["constants"]["hopper"])


@dataclasses.dataclass(frozen=True)
class Link:
    """What one axis of the grid is measured to send, all of its groups at once.

    Args:
        gb_per_second: one way, from each device, 10^9 bytes/s.
        latency_us: microseconds of a step of a ring, whatever it sends.
        call_us: microseconds of a collective, whatever it sends and to how many.
    """

    gb_per_second: float
    latency_us: float
    call_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Device:
    """A device.

    Args:
        name: what it is called.
        tflops_16_bit: products of float16 or bfloat16, 10^12 FLOP/s.
        tflops_32_bit: products of float32 as TensorFlow computes them, on newer GPUs in TF32.
        memory_gb: its memory, 10^9 bytes.
        memory_gb_per_second: what it reads and writes of that, 10^9 bytes/s.
        inside_gb_per_second: what it sends to devices of its node, 10^9 bytes/s.
        between_gb_per_second: its share of its node's network, 10^9 bytes/s.
        devices_per_node: how many a node has.
        constants: what of these figures training reaches.
        source: where the figures are published.
        links: dict of an axis, "model", "data" or "stage", and its `Link`, where it is measured.
        sharing: ranks that share a core: while some wait, others are as many times as fast.
        hides_reductions: whether what it sends leaves its products as fast as they are.
        has_bfloat16: whether it computes products of bfloat16; else of float16.
    """

    name: str
    tflops_16_bit: float
    tflops_32_bit: float
    memory_gb: float
    memory_gb_per_second: float
    inside_gb_per_second: float
    between_gb_per_second: float
    devices_per_node: int = 8
    constants: Constants = A100
    source: str = ""
    links: Mapping = dataclasses.field(default_factory=dict)
    sharing: float = 1.0
    hides_reductions: bool = True
    has_bfloat16: bool = True

    def accuracy(self) -> str:
        """Return a sentence on the error of planned step times on this device.

        Example:

        >>> device_named("h100").accuracy().split(".")[0]
        'No step on this GPU was compared with a measured one'
        """
        kind = {"measured": "measured", CPU.source: "cpu"}.get(self.source, "custom")
        if self == DEVICES.get(self.name):
            kind = "a100" if self.name.startswith("a100") else "gpu"
        return _TABLES["accuracy"][kind]


_NVIDIA = "NVIDIA's data sheets; 16 bits dense, TF32 dense for float32"


def _device(name, *figures):
    has_bfloat16 = not name.startswith("v100")  # from the A100 on
    constants = A100 if name[:4] in ("v100", "a100") else HOPPER
    return Device(name, *figures, 8, constants, _NVIDIA, has_bfloat16=has_bfloat16)


DEVICES = {name: _device(name, *figures) for name, figures in _TABLES["gpus"].items()}
FAMILIES = _TABLES["families"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices of one kind, in nodes.

    Args:
        device: the `Device`.
        num_devices: how many there are.
        devices_per_node: how many a node has; the device's own by default.
        usable_share: share of a device's memory that training may take; the rest is the
            framework's, NCCL's buffers (`formulas.NCCL_BYTES`) and fragmentation (docs/gpus.md).
        local_devices: how many each rank drives.

    Raises:
        InputError: a number is not a positive integer, or nodes are not full.
    """

    device: Device
    num_devices: int
    devices_per_node: int | None = None
    usable_share: float = 0.92
    local_devices: int = 1

    def __post_init__(self):
        check_int("num_devices", self.num_devices)
        if self.devices_per_node is None:
            usual = min(self.device.devices_per_node, self.num_devices)
            object.__setattr__(self, "devices_per_node", usual)
        check_int("devices_per_node", self.devices_per_node)
        if self.num_devices % self.devices_per_node:
            raise InputError(
                f"num_devices={self.num_devices} is not a multiple of "
                f"devices_per_node={self.devices_per_node}: give full nodes, or --devices-per-node"
            )

    @property
    def memory_bytes(self) -> float:
        """The bytes that training may take of a device."""
        return self.device.memory_gb * 1e9 * self.usable_share

    def __str__(self):
        nodes = self.num_devices // self.devices_per_node
        where = f"{nodes} nodes of {self.devices_per_node}" if nodes > 1 else "one node"
        return f"{self.num_devices} × {self.device.name} ({where})"


def device_named(name: str) -> Device:
    """Return a device by its name.

    Raises:
        InputError: there is none; lists what exists.

    Example:

    >>> device_named("a100").memory_gb
    80
    """
    key = str(name).lower().replace("_", "-")
    key = FAMILIES.get(key, key)
    if key not in DEVICES:
        raise InputError(
            f"there is no device {shown(name)}, expected one of {', '.join([*DEVICES, *FAMILIES])}, "
            "or a file of --measure"
        )
    return DEVICES[key]
