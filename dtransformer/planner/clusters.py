"""Data classes and tables of devices, links and clusters.

Device figures are the vendors' published ones: 16-bit products without sparsity, memory in
10^9 bytes, one-way link bandwidth. `Constants` contains the fractions that training reaches.
"""

import dataclasses
import pathlib
from collections.abc import Mapping

from dtransformer.errors import InputError, check_int, short_repr
from dtransformer.tables import read_table


@dataclasses.dataclass(frozen=True)
class Constants:
    """Efficiency of a device and its links: fractions of published figures that training reaches.

    A product [M, K] × [K, N] takes `2·M·K·N / (peak · product_share)` seconds, times
    (1 + half_rows / M), (1 + half_features / K) and (1 + half_features / N).

    Args:
        product_share: Fraction of the peak FLOP/s that large matrix products reach.
        half_rows: Number of rows M that halves the speed of a product.
        half_features: Number of features K or N that halves the speed of a product.
        memory_share: Fraction of the memory bandwidth that other operations reach.
        pass_overhead_us: Fixed overhead of a block's forward pass in microseconds, such as
            kernel launches.
        inside_share: Fraction of the link bandwidth inside a node that a ring reaches.
        between_share: Fraction of the network bandwidth that a ring reaches.
        hop_us: Latency of one ring step in microseconds, independent of its size.
        half_head_features: The value of `half_features` for products with attention scores.
            Defaults to `half_features`.
        attention_share: Fraction of the peak FLOP/s that fused attention reaches, forward and
            backward pass together. 0 if the device has no such kernels.
        slowdown: Time of this library's forward and backward passes, divided by the time that
            the other values predict.
        source: Origin of these values.
    """

    product_share: float
    half_rows: float
    half_features: float
    memory_share: float
    pass_overhead_us: float
    inside_share: float
    between_share: float
    hop_us: float
    half_head_features: float | None = None
    attention_share: float = 0.0
    slowdown: float = 1.0
    source: str = ""


_TABLES = read_table(pathlib.Path(__file__).with_name("devices.yaml"))
A100, CPU = (Constants(**_TABLES["constants"][name]) for name in ("a100", "cpu"))
HOPPER = dataclasses.replace(A100, **_TABLES["constants"]["hopper"])


@dataclasses.dataclass(frozen=True)
class Link:
    """Measured speed along one axis of the device grid while all groups of the axis communicate.

    Args:
        gb_per_second: One-way bandwidth of each device in 10^9 bytes/s.
        latency_us: Latency of one ring step in microseconds, independent of its size.
        call_us: Fixed cost of a collective in microseconds, independent of its size and group.
    """

    gb_per_second: float
    latency_us: float
    call_us: float = 0.0


@dataclasses.dataclass(frozen=True)
class Device:
    """Published or measured figures of one kind of device.

    Args:
        name: Name of the device.
        tflops_16_bit: Peak of float16 or bfloat16 products, 10^12 FLOP/s.
        tflops_32_bit: Peak of float32 products in TensorFlow (TF32 on newer GPUs), 10^12 FLOP/s.
        memory_gb: Memory in 10^9 bytes.
        memory_gb_per_second: Memory bandwidth in 10^9 bytes/s.
        inside_gb_per_second: One-way bandwidth to devices of the same node, 10^9 bytes/s.
        between_gb_per_second: Device's share of its node's network bandwidth, 10^9 bytes/s.
        devices_per_node: Integer. Number of devices in a node.
        constants: `Constants`, the fractions of these figures that training reaches.
        source: Publication of the figures.
        links: Dict from "model", "data" or "stage" to the measured `Link` of that axis. Axes
            without an entry use the bandwidths above.
        sharing: Float, at least 1. Number of ranks per CPU core. While some of them wait, the
            others run faster by up to this factor.
        hides_reductions: Boolean, whether gradient reductions can overlap with products.
        has_bfloat16: Boolean, whether products can use bfloat16. Otherwise they use float16.
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

        >>> get_device("h200").accuracy().split(".")[0]
        'No job on several of these GPUs was compared with a measured one'
        """
        texts = _TABLES["accuracy"]
        if self == DEVICES.get(self.name):
            return texts.get(self.name[:4], texts["gpu"])
        return texts[{"measured": "measured", CPU.source: "cpu"}.get(self.source, "custom")]


_NVIDIA = "NVIDIA's data sheets; 16 bits dense, TF32 dense for float32"


def _device(name, *figures):
    has_bfloat16 = not name.startswith("v100")
    constants = A100 if name[:4] in ("v100", "a100") else HOPPER
    constants = dataclasses.replace(constants, **_TABLES["constants"].get(name[:4], {}))
    return Device(name, *figures, 8, constants, _NVIDIA, has_bfloat16=has_bfloat16)


DEVICES = {name: _device(name, *figures) for name, figures in _TABLES["gpus"].items()}
FAMILIES = _TABLES["families"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Devices of one kind, grouped into nodes.

    Args:
        device: A `Device`.
        num_devices: Integer. Total number of devices.
        devices_per_node: Integer. Defaults to the device's value, at most `num_devices`.
        usable_share: Fraction of a device's memory that training may use. The rest is left for
            the framework, NCCL's buffers (`formulas.NCCL_BYTES`) and fragmentation, see
            docs/gpus.md.
        local_devices: Integer. Number of devices per rank.

    Raises:
        InputError: If a number is not a positive integer, or if `devices_per_node` does not
            divide `num_devices`.
    """

    device: Device
    num_devices: int
    devices_per_node: int | None = None
    usable_share: float = 0.92
    local_devices: int = 1

    def __post_init__(self):
        check_int("num_devices", self.num_devices)
        if self.devices_per_node is None:
            default = min(self.device.devices_per_node, self.num_devices)
            object.__setattr__(self, "devices_per_node", default)
        check_int("devices_per_node", self.devices_per_node)
        if self.num_devices % self.devices_per_node:
            raise InputError(
                f"`num_devices={self.num_devices}` is not a multiple of "
                f"`devices_per_node={self.devices_per_node}`. Use full nodes or set "
                "--devices-per-node."
            )

    @property
    def memory_bytes(self) -> float:
        """Memory of a device that training may use, in bytes."""
        return self.device.memory_gb * 1e9 * self.usable_share

    def __str__(self):
        nodes = self.num_devices // self.devices_per_node
        where = f"{nodes} nodes of {self.devices_per_node}" if nodes > 1 else "one node"
        return f"{self.num_devices} × {self.device.name} ({where})"


def get_device(name: str) -> Device:
    """Return a device from the table of GPUs.

    Args:
        name: Name such as "a100-80", or a family such as "a100". Case does not matter, and "_"
            is read as "-".

    Raises:
        InputError: If the table has no such device. The message lists all names.

    Example:

    >>> get_device("a100").memory_gb
    80
    """
    key = str(name).lower().replace("_", "-")
    key = FAMILIES.get(key, key)
    if key not in DEVICES:
        raise InputError(
            f"Unknown device {short_repr(name)}, expected one of {', '.join([*DEVICES, *FAMILIES])}, or "
            "a file written by --measure."
        )
    return DEVICES[key]
