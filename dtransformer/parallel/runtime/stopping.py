"""Coordinated stops: ranks agree on a gate that each passes between the same two steps.

Nothing is sent until a rank asks to stop.
"""

from dtransformer.parallel.runtime import job

LEAVE = "leave"  # Purpose of ranks that leave the job.


def ask_to_stop(purpose: str = LEAVE) -> None:
    """Ask all ranks to stop at the same gate, the next one or the one after.

    Any rank may call this function.

    Args:
        purpose: String. Identifies the gates.
    """
    if job.watchdog() is not None:
        job.watchdog().ask_to_stop(purpose)
    else:
        gates = job.current().gates[purpose]
        gates.open_until(gates.hold())


def can_stop() -> bool:
    """Return whether ranks can agree on a stop: with a watchdog, or in a job of one rank."""
    return job.size() == 1 or job.watchdog() is not None


def passes_gate(purpose: str = LEAVE) -> bool:
    """Return whether training continues. All ranks must call this between the same two steps."""
    return job.current().gates[purpose].passes()


def stop_here(purpose: str) -> None:
    """Ask all ranks to stop, here at the next gate unless another rank has passed it."""
    job.current().gates[purpose].hold()
    ask_to_stop(purpose)
