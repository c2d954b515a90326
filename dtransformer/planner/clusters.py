"""Devices, links and clusters, as data.

Figures are the vendors' own: products of 16 bits without sparsity, memory of 10^9 bytes, links one
way. What of them training reaches, `Constants` says.
"""

import dataclasses
from collections.abc import Mapping

from dtransformer.errors import InputError, check_int, shown


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


# benchmarks/fit_planner.py prints those that it fits; the others are set, for these reasons.
A100 = Constants(
    product_share=0.876,  # fitted
    half_rows=349,  # fitted
    half_features=191,  # fitted
    memory_share=0.9,  # set: copies of large tensors reach 1.8 of 2.04 TB/s
    pass_overhead_us=12.1,  # fitted
    inside_share=0.7,  # set: NCCL's rings reach 210 of 300 GB/s
    between_share=0.509,  # fitted
    hop_us=8.34,  # fitted
    source="fitted on Narayanan et al., 2021, table 1, and on the measured layouts of the 3.6 B and "
    "18.4 B models; those of the 39.1 B and 175 B models were held out",
)
# Of one H200 (docs/gpus.md): 8192³ in 16 bits runs at 735 of 989 TFLOP/s, which with the A100's halves
# is this share of the peak; copies reach 3.9 of 4.8 TB/s. Newer cards have it, too.
HOPPER = dataclasses.replace(
    A100,
    product_share=0.81,
    memory_share=0.81,
    source="products and copies are those of one H200, the others the A100's",
)
# Those of the A100 that steps which were measured on it have in them.
CHECKED = (
    *("product_share", "half_rows", "half_features", "pass_overhead_us"),
    *("between_share", "hop_us"),
)


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

    def of_axis(self, axis: str) -> Link | None:
        """Return the measured link of an axis of the grid; None where the figures hold."""
        return self.links.get(axis)

    def checked_constants(self) -> tuple[list[str], list[str]]:
        """Return the names of constants that were checked against measurements, and of the others.

        Example:

        >>> device_named("a100").checked_constants()[1], device_named("h100").checked_constants()[0]
        (['memory_share', 'inside_share'], [])
        """
        own = dataclasses.asdict(self.constants)
        source = own.pop("source")
        if source not in (A100.source, HOPPER.source):  # of a machine that was measured
            return list(own), []
        is_checked = lambda name: name in CHECKED and own[name] == getattr(A100, name)
        found = [x for x in own if self.name.startswith("a100") and is_checked(x)]
        return found, [name for name in own if name not in found]


_NVIDIA = "NVIDIA's data sheets; 16 bits dense, TF32 dense for float32"


def _device(name, *figures):
    has_bfloat16 = not name.startswith("v100")  # from the A100 on
    constants = A100 if name[:4] in ("v100", "a100") else HOPPER
    return Device(name, *figures, 8, constants, _NVIDIA, has_bfloat16=has_bfloat16)


DEVICES = {
    device.name: device
    for device in (
        _device("v100-16", 125, 15.7, 16, 900, 150, 12.5),
        _device("v100-32", 125, 15.7, 32, 900, 150, 12.5),
        _device("a100-40", 312, 156, 40, 1555, 300, 25),
        _device("a100-80", 312, 156, 80, 2039, 300, 25),
        _device("h100-80", 989, 494, 80, 3350, 450, 50),
        _device("h200-141", 989, 494, 141, 4800, 450, 50),
        _device("b200-180", 2250, 1125, 180, 7700, 900, 50),
    )
}
_SHORT = {"v100": "v100-32", "a100": "a100-80", "h100": "h100-80"}
_SHORT |= {"h200": "h200-141", "b200": "b200-180"}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices of one kind, in nodes.

    Args:
        device: the `Device`.
        num_devices: how many there are.
        devices_per_node: how many a node has; the device's own by default.
        usable_share: share of a device's memory that training may take; the rest is the
            framework's, NCCL's buffers (`formulas.NCCL_BYTES`) and fragmentation (docs/gpus.md).

    Raises:
        InputError: a number is not a positive integer, or nodes are not full.
    """

    device: Device
    num_devices: int
    devices_per_node: int | None = None
    usable_share: float = 0.92

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
    key = _SHORT.get(key, key)
    if key not in DEVICES:
        raise InputError(
            f"there is no device {shown(name)}, expected one of {', '.join([*DEVICES, *_SHORT])}, "
            "or a file of --measure"
        )
    return DEVICES[key]
