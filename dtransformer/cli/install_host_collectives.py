"""`dtransformer doctor --install-horovod`: the kernels of `parallel/host_collectives`, too.

They are compiled for the TensorFlow of this environment in some seconds, kept in the cache beside
Horovod's wheel, and copied into the environment, where `init` looks for them.
"""

import os
import shlex
import shutil

from dtransformer.cli.install_horovod import InstallError, cache_folder, compiler, run
from dtransformer.errors import InputError
from dtransformer.files import replacing
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
        with replacing(path, parents=True) as fresh:  # a job that uses the old one keeps it
            shutil.copy(cached, fresh)
    except InputError as error:
        raise InstallError(
            f"the kernels for ranks of one host are not installed: {error}"
        ) from error
    print(f"Kernels for ranks of one host are installed ({path})")


def _compile(path):
    import tensorflow as tf

    if compiler() is None:
        raise InstallError("no C++ compiler found, for the kernels for ranks of one host")
    files = [file for file in sources() if file.suffix == ".cc"]
    command = shlex.split(os.environ.get("CXX", "")) or [compiler()]
    command += [*OPTIONS, *tf.sysconfig.get_compile_flags(), *files]
    with replacing(path, parents=True) as fresh:
        # What is to be linked comes before what it is looked up in.
        command += ["-o", fresh, *tf.sysconfig.get_link_flags()]
        log = path.parent / "build.log"
        run(command, log, "the kernels for ranks of one host do not compile")
