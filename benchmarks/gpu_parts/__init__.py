"""Parts of benchmarks/gpu.py in order, with their time limits and environments."""

import contextlib
import dataclasses
import fcntl
import importlib
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "peers"))  # These files import each other.
_NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Args:
        where: "MODULE:FUNCTION" of this package. The function takes `smoke`, `torch` and `variant`
            and yields dicts.
        seconds: Time limit in seconds.
        environment: Dict of environment variables of the process.
        variants: Tuple of variants. Each runs in a separate process.
    """

    where: str
    seconds: int
    environment: dict = dataclasses.field(default_factory=dict)
    variants: tuple = ()

    def function(self):
        module, _, name = self.where.partition(":")
        return getattr(importlib.import_module(f"benchmarks.gpu_parts.{module}"), name)


PARTS = {
    "card": Part("card:describe", 120),
    "peaks": Part("card:peaks", 120),
    "numbers": Part("numbers:compare", 300, _NO_TF32),
    "numbers_tf32": Part("numbers:compare", 300),
    "cudnn": Part("fused:check", 300, _NO_TF32),
    "cudnn_time": Part("fused:measure", 300),
    "mesh": Part("layouts:mesh", 400, {**_NO_TF32, "DTRANSFORMER_LOGICAL_GPUS": "4"}),
    "ranks": Part("layouts:ranks", 400, {**_NO_TF32, "DTRANSFORMER_LOGICAL_GPUS": "4"}),
    "speed": Part(
        "speed:ours",
        300,
        variants=tuple(
            f"{size}/{compiled}/{attention}"
            for size in ("355m", "1.3b")
            for compiled in ("none", "clusters", "whole")
            for attention in ("reference", "blockwise", "cudnn")
        ),
    ),
    "peer": Part(
        "speed:pytorch",
        300,
        variants=("355m/eager", "355m/compiled", "1.3b/eager", "1.3b/compiled"),
    ),
    "profile": Part(
        "speed:profile",
        300,
        variants=("355m/none/cudnn", "355m/clusters/cudnn", "355m/whole/cudnn"),
    ),
    "largest": Part("speed:largest", 300),
    "uses": Part("uses:use", 300, _NO_TF32),
    "nccl": Part("nccl:operations", 120),
    "sums": Part("several:sums", 600),
    "layouts": Part("several:layouts", 900, _NO_TF32),
    "stress": Part("several:stress", 1000),
}


@contextlib.contextmanager
def alone():
    """Hold the lock for timed sections in a `with` block."""
    file = pathlib.Path("build/gpu/timed.lock")
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
