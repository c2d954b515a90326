"""Enable oneDNN's matrix products where TensorFlow disables them by default."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable

_VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
# TensorFlow 2.21 enables oneDNN if the CPU has any of these features
# (tensorflow/core/util/port.cc).
_DEFAULT_FEATURES = {
    "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16",
}  # fmt: skip


def is_off_by_default(cpuinfo: Iterable[str]) -> bool:
    """Return whether TensorFlow disables oneDNN by default on this processor.

    This is the case for x86 processors with AVX2 but without newer features. For all other
    processors the result is False.

    Args:
        cpuinfo: Lines of `/proc/cpuinfo`.
    """
    flags = next((line.split() for line in cpuinfo if line.startswith("flags")), ())
    return "avx2" in flags and _DEFAULT_FEATURES.isdisjoint(flags)


def turn_on() -> None:
    """Enable oneDNN unless the environment already sets `TF_ENABLE_ONEDNN_OPTS`.

    Warns if TensorFlow was imported before, because the setting then has no effect.
    """
    if _VARIABLE in os.environ:
        return
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        if not is_off_by_default(cpuinfo):
            return
        os.environ[_VARIABLE] = "1"
        is_first_rank = os.environ.get("HOROVOD_LOCAL_RANK", "0") == "0"
        if "tensorflow" in sys.modules and is_first_rank:
            warnings.warn(
                "TensorFlow was imported before dtransformer, so oneDNN is off and training is "
                f"slower on this processor. Import dtransformer first or set {_VARIABLE}=1.",
                stacklevel=3,
            )
