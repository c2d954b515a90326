"""Starting the kernels: ranks find out which of their groups share a host's memory."""

import contextlib
import ctypes
import functools
import mmap
import os
import stat
import types
import warnings

import tensorflow as tf

from dtransformer.parallel.host_collectives.library import (
    is_available,
    is_forbidden,
    library_path,
)
from dtransformer.parallel.json_exchange import exchange_json
from dtransformer.parallel.topology import Topology
from dtransformer.parallel.watchdog.address import own_host
from dtransformer.parallel.watchdog.sealed import new_token

# Keys of groups. TensorFlow numbers a mesh's by itself, from 1.
MESH, DATA_PARALLEL = 0, 1 << 30
_started = []  # keys
_MOST_RANKS = 256  # of a group: kMostProcesses


def start_host_collectives(
    topology: Topology, rank: int, hvd: types.ModuleType | None
) -> int | None:
    """Let collectives of this rank's mesh and of its data-parallel group go through shared memory.

    They do so where all ranks of the group are on one host, the kernels are compiled, and no rank's
    environment has DTRANSFORMER_HOST_COLLECTIVES=0. A mesh of a process that has used the kernels
    once cannot go back to TensorFlow's. Every rank of the job has to call, once its mesh is there.

    Args:
        topology: the job's `Topology`.
        rank: this rank's number.
        hvd: the module `horovod.tensorflow`, started; None where there is one rank.

    Returns:
        The key by which the kernels know this rank's data-parallel group; None where they do not
        serve it.

    Raises:
        RuntimeError: a mesh has ranks that share no memory, in processes that have used the
            kernels; on every rank of the job.
    """
    groups, shared = _groups(topology, rank), frozenset()
    num_devices = {MESH: topology.local_devices, DATA_PARALLEL: 1}
    if any(len(ranks) > 1 for ranks in groups.values()):  # on every rank or on none
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        gather = lambda text: hvd.allgather(text, name="dtransformer.host_collectives")
        with contextlib.ExitStack() as opened:
            offered = {
                key: _offered(size, opened) if len(ranks) > 1 else None
                for key, ranks in groups.items()
            }
            everyone = exchange_json(offered, gather)
            files = {
                key: [_opened(everyone[r][str(key)], opened) for r in ranks]
                for key, ranks in groups.items()
            }
            everyone = exchange_json([_can_be_mapped(files, size), _is_loaded()], gather)
            found = [keys for keys, _ in everyone]
            _check_meshes(topology, found, [loaded for _, loaded in everyone])
            shared = shared_groups(topology, rank, found)
            for key in sorted(shared):
                _start(key, groups[key].index(rank), files[key], num_devices[key], size)
        _warn_of_missing_kernels(rank, hvd)
    if _is_loaded() and MESH not in shared:  # one rank's, and no slower than by TensorFlow's own
        _start(MESH, 0, [], num_devices[MESH], 0)
    return DATA_PARALLEL if DATA_PARALLEL in shared else None


def shared_groups(topology: Topology, rank: int, found: list[list[int]]) -> frozenset[int]:
    """Return the keys of a rank's groups, of several ranks each, that go through shared memory.

    A data-parallel group does not where a mesh of one of its ranks does not: the kernels would have
    to serve that mesh, too.

    Args:
        topology: the job's `Topology`.
        rank: the rank's number.
        found: for each rank of the job, the keys of its groups whose memory it can read.
    """

    def share(key, rank):
        ranks = _groups(topology, rank)[key]
        return len(ranks) == 1 or all(key in found[other] for other in ranks)

    groups = _groups(topology, rank)
    meshes_share = all(share(MESH, other) for other in groups[DATA_PARALLEL])
    does_share = {
        MESH: share(MESH, rank),
        DATA_PARALLEL: share(DATA_PARALLEL, rank) and meshes_share,
    }
    return frozenset(key for key, ranks in groups.items() if len(ranks) > 1 and does_share[key])


def stop_host_collectives() -> None:
    """Stop, once every rank of the groups is done; nothing where they were not started."""
    while _started:
        _library().dtransformer_stop(_started.pop())


def fail_host_collectives() -> None:
    """Let all that goes on in this rank's groups be an error on every rank: this one leaves."""
    for key in _started:
        _library().dtransformer_fail(key)


def is_any_started() -> bool:
    """Return whether the kernels serve a group."""
    return bool(_started)


@functools.cache
def _library():
    """Load the library, whose kernels TensorFlow prefers from then on."""
    path = str(library_path())
    tf.load_op_library(path)
    library = ctypes.CDLL(path)
    library.dtransformer_start.restype = ctypes.c_char_p
    return library


def _is_loaded():
    return _library.cache_info().currsize > 0


def _groups(topology, rank):
    """Return the groups of a rank that may share memory, a dict of keys and tuples of ranks."""
    mesh, data = topology.model_parallel_group(rank), topology.data_parallel_group(rank)
    return {MESH: mesh, DATA_PARALLEL: data}


def _warn_of_missing_kernels(rank, hvd):
    if rank or hvd.local_size() != hvd.size() or is_forbidden() or is_available():
        return
    warnings.warn(
        "the ranks are on one host, and the kernels that let them share its memory are not "
        "compiled; without them a step takes up to a fifth longer: run 'dtransformer doctor "
        "--install-horovod'",
        stacklevel=4,
    )


def _check_meshes(topology, found, is_loaded):
    """Raise on every rank if a mesh without shared memory has a process with the kernels."""
    for rank, loaded in enumerate(is_loaded):
        mesh = topology.model_parallel_group(rank)
        if loaded and len(mesh) > 1 and MESH not in shared_groups(topology, rank, found):
            raise RuntimeError(
                f"the ranks {mesh} of a mesh share no memory, and a group before in a process of "
                "theirs had ranks that do: start a job anew for this layout"
            )


def _start(key, index, files, num_devices, size):
    numbers = (ctypes.c_int * len(files))(*files)
    problem = _library().dtransformer_start(
        key, index, max(len(files), 1), num_devices, numbers, ctypes.c_size_t(size)
    )
    if problem:
        raise RuntimeError(f"ranks of one host cannot share memory: {problem.decode()}")
    _started.append(key)


def _offered(size, opened):
    """Return where others find memory of this process, and a token that tells it; None without.

    It belongs to no file system, takes no room but what is written to, and ends with the processes
    that use it.
    """
    if not is_available():
        return None
    try:
        memory = os.memfd_create("dtransformer")
        opened.callback(os.close, memory)
        os.ftruncate(memory, size)
    except OSError:
        return None
    token = new_token()
    os.pwrite(memory, token.encode(), size - len(token))  # at the end, which is never used
    path = f"/proc/{os.getpid()}/fd/{memory}"
    return {"host": own_host(), "path": path, "token": token, "size": size}


def _can_be_mapped(files, size):
    """Return the keys of groups of whose ranks all memory is there, and has room for addresses."""
    keys = []
    with contextlib.ExitStack() as mapped:
        for key, of_ranks in files.items():
            try:
                if None not in of_ranks and len(of_ranks) <= _MOST_RANKS:
                    for file in of_ranks:
                        mapped.enter_context(mmap.mmap(file, size))
                    keys.append(key)
            except (OSError, ValueError):  # what 'ulimit -v' says
                pass
    return keys


def _opened(offered, opened):
    """Return the open file of the memory that a rank offers; None if it is not to be had here."""
    if offered is None or offered["host"] != own_host():
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
