"""The library of kernels: what it is compiled from, and where this environment keeps it."""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import sysconfig

_FOLDER = pathlib.Path(__file__).parent
# Not for this machine's processor alone: the environment may be used on another.
OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-Wall")


def sources() -> list[pathlib.Path]:
    """Return the paths of the C++ files, headers among them."""
    return sorted(path for path in _FOLDER.iterdir() if path.suffix in (".cc", ".h"))


@functools.cache
def library_name() -> str:
    """Return the library's file name, which tells its sources and TensorFlow's version."""
    content = b"".join(path.read_bytes() for path in sources()) + " ".join(OPTIONS).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    return f"host_collectives-tf{importlib.metadata.version('tensorflow')}-{digest}.so"


def library_path() -> pathlib.Path:
    """Return the library's path in this environment, whether it is there or not."""
    return pathlib.Path(sysconfig.get_path("data")) / "lib" / "dtransformer" / library_name()


def is_forbidden() -> bool:
    """Return whether DTRANSFORMER_HOST_COLLECTIVES forbids it."""
    return os.environ.get("DTRANSFORMER_HOST_COLLECTIVES") == "0"


def is_available() -> bool:
    """Return whether the library is there, and not forbidden."""
    return not is_forbidden() and library_path().exists()
