"""`dtransformer doctor --install-horovod`: the kernels of `parallel/host_collectives`, too.

They are compiled for the TensorFlow of this environment in some seconds, kept in the cache beside
Horovod's wheel, and copied into the environment, where `init` looks for them.
"""

import os
import shlex
import shutil

from dtransformer.cli.install_horovod import (
    EXIT_NO_COMPILER,
    InstallError,
    cache_folder,
    compiler,
    run,
)
from dtransformer.parallel.host_collectives.library import OPTIONS, library_path, sources


def install_host_collectives():
    """Install the kernels in this environment, from the cache or else from their sources.

    Raises:
        InstallError: there is no compiler, they do not compile, or a folder cannot be written.
    """
    path = library_path()
    cached = cache_folder() / path.name
    try:
        if not cached.exists():
            _compile(cached)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        shutil.copy(cached, partial)
        partial.rename(path)  # a job that uses the one that was there keeps it
    except OSError as error:
        raise InstallError(
            f"the kernels for ranks of one host cannot be put into {path.parent} ({error})"
        ) from error
    print(f"Kernels for ranks of one host are installed ({path})")


def _compile(path):
    import tensorflow as tf

    if compiler() is None:
        raise InstallError("no C++ compiler found, for ranks of one host", EXIT_NO_COMPILER)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    files = [file for file in sources() if file.suffix == ".cc"]
    command = shlex.split(os.environ.get("CXX", "")) or [compiler()]
    # What is to be linked comes before what it is looked up in.
    command += [*OPTIONS, *tf.sysconfig.get_compile_flags(), *files, "-o", partial]
    command += tf.sysconfig.get_link_flags()
    run(command, path.parent / "build.log", "the kernels for ranks of one host do not compile")
    partial.rename(path)
