"""Starting the kernels: the processes of a mesh find out whether they share a host's memory."""

import contextlib
import ctypes
import functools
import os
import stat
import types
import warnings

import tensorflow as tf

from dtransformer.parallel.host_collectives.library import library_path
from dtransformer.parallel.json_exchange import exchange_json
from dtransformer.parallel.watchdog.sealed import new_token


def start_host_collectives(
    ranks: tuple[int, ...], rank: int, num_devices: int, hvd: types.ModuleType | None
) -> None:
    """Let the collectives of this rank's mesh go through shared memory, if its ranks share any.

    Every rank of the job has to call, once its mesh is there. They do not where the environment of
    a rank of the mesh has DTRANSFORMER_HOST_COLLECTIVES=0. A process that has used the kernels once
    cannot go back to TensorFlow's.

    Args:
        ranks: numbers of the mesh's ranks.
        rank: this rank's number.
        num_devices: number of devices of each.
        hvd: the module `horovod.tensorflow`, started; None where there is one rank.

    Raises:
        RuntimeError: a mesh has ranks that share no memory, in processes that have used the
            kernels.
    """
    if len(ranks) == 1:  # TensorFlow's own are as fast
        if _is_loaded():
            _start(0, [], num_devices, 0)
        return
    gather = lambda text: hvd.allgather(text, name="dtransformer.host_collectives")
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.ExitStack() as opened:
        everyone = exchange_json(_offered(size, opened), gather)
        files = [_opened(everyone[r], opened) for r in ranks]
        shares_memory = exchange_json(None not in files, gather)
        if all(shares_memory[r] for r in ranks):
            _start(ranks.index(rank), files, num_devices, size)
            return
    if _is_loaded():
        raise RuntimeError(
            f"the ranks {ranks} of this mesh share no memory, and a mesh before in this process "
            "had ranks that do: start a job anew for this layout"
        )
    is_missing = not _is_switched_off() and not library_path().exists()
    if hvd.local_size() == hvd.size() and rank == 0 and is_missing:
        warnings.warn(
            "the mesh's ranks are on one host, and the kernels that let them share its memory are "
            "not compiled; without them a step takes up to a fifth longer: run 'dtransformer "
            "doctor --install-horovod'",
            stacklevel=5,
        )


def stop_host_collectives() -> None:
    """Stop, once every rank of the mesh is done; nothing where they were not started."""
    if _is_loaded():
        _library().dtransformer_stop()


@functools.cache
def _library():
    """Load the library, whose kernels TensorFlow prefers from then on."""
    path = str(library_path())
    tf.load_op_library(path)
    library = ctypes.CDLL(path)
    library.dtransformer_start.restype = ctypes.c_char_p
    return library


def _is_switched_off():
    return os.environ.get("DTRANSFORMER_HOST_COLLECTIVES") == "0"


def _is_loaded():
    return _library.cache_info().currsize > 0


def _start(index, files, num_devices, size):
    numbers = (ctypes.c_int * len(files))(*files)
    problem = _library().dtransformer_start(
        index, max(len(files), 1), num_devices, numbers, ctypes.c_size_t(size)
    )
    if problem:
        raise RuntimeError(f"the mesh's ranks cannot share memory: {problem.decode()}")


def _offered(size, opened):
    """Return where others find memory of this process, and a token that tells it; None without.

    It belongs to no file system, takes no room but what is written to, and ends with the processes
    that use it.
    """
    if _is_switched_off() or not library_path().exists():
        return None
    try:
        memory = os.memfd_create("dtransformer")
        opened.callback(os.close, memory)
        os.ftruncate(memory, size)
    except OSError:
        return None
    token = new_token()
    os.pwrite(memory, token.encode(), size - len(token))  # at the end, which is never used
    return {"path": f"/proc/{os.getpid()}/fd/{memory}", "token": token, "size": size}


def _opened(offered, opened):
    """Return the open file of the memory that a rank offers; None if it is not to be had here."""
    if offered is None:
        return None
    try:
        file = os.open(offered["path"], os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        opened.callback(os.close, file)
        is_file = stat.S_ISREG(os.fstat(file).st_mode)  # another host has other processes
        token, size = offered["token"].encode(), offered["size"]
        if is_file and os.pread(file, len(token), size - len(token)) == token:
            return file
    except OSError:
        pass
    return None
