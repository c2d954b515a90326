"""Start of the watchdog: rank 0 listens, the others connect to its address."""

import os
import socket

from dtransformer.errors import InputError, shown
from dtransformer.parallel.config import validators
from dtransformer.parallel.runtime.process_groups import exchange_json
from dtransformer.parallel.watchdog.activity_tracker import ActivityTracker
from dtransformer.parallel.watchdog.address import own_address, own_host
from dtransformer.parallel.watchdog.links import Hub, Member, new_token
from dtransformer.parallel.watchdog.stop_barrier import StopBarrier
from dtransformer.parallel.watchdog.thread import Watchdog

STALL_SECONDS = 50.0  # a job ends within a minute of any fault
_LEAST = 10.0  # beats come every second, and half of it is silence enough
_FROM_ENVIRONMENT = "DTRANSFORMER_STALL_SECONDS"
_SECONDS_TO_CONNECT = 20.0


def stall_seconds_of(value: float | None) -> float:
    """Return `stall_seconds`, from the argument, the environment, or by default.

    Raises:
        TypeError, ValueError: it is no number that can be one.
    """
    if value is None:
        text = os.environ.get(_FROM_ENVIRONMENT) or str(STALL_SECONDS)
        try:
            value = float(text)
        except ValueError:
            raise InputError(
                f"{_FROM_ENVIRONMENT} must be a number of seconds, got {shown(text)}"
            ) from None
    validators.non_negative("stall_seconds", value)
    if 0 < value < _LEAST:
        raise ValueError(f"stall_seconds must be 0 for none, or at least {_LEAST}, got {value}")
    return float(value)


def start_watchdog(
    hvd,
    stall_seconds: float,
    recorder: ActivityTracker,
    gates: StopBarrier,
    running: Watchdog | None,
) -> Watchdog | None:
    """Return the watchdog of this rank; None where there is none. All ranks have to call.

    Args:
        hvd: the module `horovod.tensorflow`, started; None where the process runs alone.
        stall_seconds: how long a step may take; 0 for no watchdog.
        recorder, gates: as `Watchdog` takes them.
        running: the watchdog of a job that is joined anew.

    Raises:
        RuntimeError: rank 0 cannot be reached.
    """
    if running is not None and running.stall_seconds == stall_seconds:
        return running
    if running is not None:
        running.leave()
    if hvd is None or stall_seconds == 0:
        return None
    rank, size = hvd.rank(), hvd.size()
    own, listener = {"host": own_host()}, None
    if rank == 0:
        host = own_address(is_local=hvd.local_size() == size)
        listener = socket.create_server((host, 0), backlog=min(size, 4096))
        own |= {"address": listener.getsockname()[:2], "token": new_token()}
    everyone = exchange_json(own, lambda text: hvd.allgather(text, name="dtransformer.watchdog"))
    address, token = everyone[0]["address"], everyone[0]["token"]
    if rank == 0:
        link = Hub(listener, token, size)
    else:
        try:
            link = Member(address, token, rank, _SECONDS_TO_CONNECT)
        except OSError as error:
            raise RuntimeError(
                f"rank {rank} on host {own['host']} cannot reach the watchdog of rank 0 at "
                f"{address[0]}:{address[1]} ({error}): let the hosts of the job reach each other at "
                f"any port, or give stall_seconds=0, without a watchdog"
            ) from None
    hosts = [one["host"] for one in everyone]
    return Watchdog(rank, hosts, link, stall_seconds, recorder, gates)
