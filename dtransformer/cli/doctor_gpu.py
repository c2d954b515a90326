"""GPU checks of `dtransformer doctor`: cards, driver, CUDA libraries and NCCL."""

import collections
import contextlib
import ctypes
import os
import pathlib

import tensorflow as tf

from dtransformer import nvidia_driver
from dtransformer.cli.checks import check
from dtransformer.parallel.runtime.devices import unused_driver

# Libraries that TensorFlow 2.21 opens by name. If one is missing, it finds no GPU.
_CUDA_LIBRARIES = (
    *("libcublas.so.12", "libcublasLt.so.12", "libcudart.so.12", "libcudnn.so.9"),
    *("libcufft.so.11", "libcusolver.so.11", "libcusparse.so.12"),
)
# TensorFlow's wheel contains machine code for compute capabilities 6.0 to 8.9, which needs a driver
# for CUDA 12.0 or later. It also contains PTX code for 9.0, compiled by CUDA 12.5, which the drivers
# of newer cards compile when it is first used.
_MIN_CAPABILITY = (6, 0)
_DRIVER_COMPILED_CAPABILITY = (9, 0)
_UNTESTED_CAPABILITY = (10, 0)
_CUDA = 12050
_MIN_CUDA = 12000
_INSTALL = "pip install 'tensorflow[and-cuda]~=2.21.0', in a clone make setup GPU=1"
_DRIVER = "install a driver of version 555 or later"


def examine_gpus() -> list[dict]:
    """Check this machine's GPUs and NCCL. Returns a list of checks, see `checks.check`."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return [_explain_no_gpu()]
    for gpu in gpus:  # Leave memory to other programs that use the card.
        with contextlib.suppress(RuntimeError):  # TensorFlow may already have initialized the GPU.
            tf.config.experimental.set_memory_growth(gpu, True)
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    kinds = collections.Counter(
        (str(card.get("device_name")), tuple(card.get("compute_capability", _MIN_CAPABILITY)))
        for card in details
    )
    return [*(_check_cards(*kind, count) for kind, count in kinds.items()), _check_nccl(len(gpus))]


def _check_cards(name, capability, count):
    """Check whether TensorFlow's wheel has code for `number` GPUs of one kind."""
    cuda = nvidia_driver.cuda_version()
    by_driver = capability >= _DRIVER_COMPILED_CAPABILITY
    text = f"{count} × {name}, compute capability {'.'.join(map(str, capability))}"
    if capability < _MIN_CAPABILITY:
        problem = (
            f"{text}: TensorFlow's wheel requires at least {'.'.join(map(str, _MIN_CAPABILITY))}"
        )
        return check("GPU", False, problem, "set CUDA_VISIBLE_DEVICES=-1 to compute on CPUs")
    if 0 < cuda < (_CUDA if by_driver else _MIN_CUDA):
        return check("GPU", False, f"{text}: {_describe_old_driver(cuda)}", _DRIVER)
    if by_driver:
        text += ": its driver compiles kernels on their first use (takes minutes) and caches them"
    if capability >= _UNTESTED_CAPABILITY:
        text += "; TensorFlow's wheel is older than this card and untested on it"
    return check("GPU", True, text)


def _describe_old_driver(cuda):
    version = f"{cuda // 1000}.{cuda % 1000 // 10}"
    return f"its driver supports CUDA {version}, but TensorFlow's wheel was built with 12.5"


def _explain_no_gpu():
    """Explain why TensorFlow finds no GPU on this machine."""
    driver = unused_driver()
    if driver is None:
        return check("GPU", None, "none", f"optional; on a machine with a driver: {_INSTALL}")
    missing = [name for name in _CUDA_LIBRARIES if not _can_be_opened(name)]
    cuda = nvidia_driver.cuda_version()
    code = nvidia_driver.cuda_start()
    fix = _INSTALL
    if 0 < cuda < (_MIN_CUDA if missing else _CUDA):
        reason = _describe_old_driver(cuda)
        fix = _DRIVER
    elif missing:
        reason = f"{missing[0]} and {len(missing) - 1} others cannot be opened"
    elif code is None:
        reason = "libcuda.so.1 cannot be opened"
        fix = "in a container: docker run --gpus all"
    elif code:
        reason = f"CUDA does not start (error {code} of cuInit)"
        fix = "check that nvidia-smi lists the GPUs"
    else:
        reason = "all CUDA libraries were found"
        fix = "set TF_CPP_MIN_LOG_LEVEL=0 to see TensorFlow's log"
    return check("GPU", False, f"driver {driver}, but TensorFlow finds no GPU: {reason}", fix)


def _can_be_opened(library):
    """Return whether a library is in NVIDIA's pip packages or in the linker's path."""
    if any(pathlib.Path(tf.__file__).parents[1].glob(f"nvidia/*/lib/{library}")):
        return True
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _framework():
    """Return TensorFlow's library. It forwards NCCL calls to the NCCL library that it opens."""
    return ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))


def _check_nccl(num_gpus):
    """Check NCCL, which is required for several GPUs."""
    version = ctypes.c_int(0)
    code = _framework().ncclGetVersion(ctypes.byref(version))
    if code:
        problem = f"cannot be opened (error {code} of ncclGetVersion), but several GPUs need it"
        return check("NCCL", None if num_gpus == 1 else False, problem, _INSTALL)
    major, rest = divmod(version.value, 10_000)
    return check("NCCL", True, f"{major}.{rest // 100}.{rest % 100}")
