"""oneDNN's products on processors where TensorFlow leaves them off."""

import contextlib
import os
import sys
import warnings
from collections.abc import Iterable

_VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
# With any of these features TensorFlow 2.21 turns oneDNN on by default (tensorflow/core/util/port.cc).
_DEFAULT_FEATURES = {
    *("avx512_vnni", "avx512_bf16", "avx_vnni", "amx_tile", "amx_int8", "amx_bf16"),
}


def is_off_by_default(cpuinfo: Iterable[str]) -> bool:
    """Return whether TensorFlow leaves oneDNN off on an x86 processor with AVX2.

    Other processors return False: their default stays.

    Args:
        cpuinfo: Lines of `/proc/cpuinfo`.
    """
    flags = next((line.split() for line in cpuinfo if line.startswith("flags")), ())
    return "avx2" in flags and _DEFAULT_FEATURES.isdisjoint(flags)


def turn_on() -> None:
    """Turn oneDNN on, unless the environment decides. Warn if TensorFlow was imported before."""
    if _VARIABLE in os.environ:
        return
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as cpuinfo:
        if not is_off_by_default(cpuinfo):
            return
        os.environ[_VARIABLE] = "1"
        is_first_rank = os.environ.get("HOROVOD_LOCAL_RANK", "0") == "0"
        if "tensorflow" in sys.modules and is_first_rank:
            warnings.warn(
                "TensorFlow was imported before dtransformer, so that oneDNN is off on this "
                f"processor and training on it is slower: import dtransformer first, or set "
                f"{_VARIABLE}=1",
                stacklevel=3,
            )
