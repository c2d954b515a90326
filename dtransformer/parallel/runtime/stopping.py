"""Stopping together: ranks agree on a gate, which each passes between the same two steps.

Nothing is sent as long as no rank asks for it.
"""

from dtransformer.parallel.runtime import job

LEAVE = "leave"  # the purpose of those who leave the job


def ask_to_stop(purpose: str = LEAVE) -> None:
    """Let all ranks stop at the same gate, the next one or the one after; from any rank.

    Args:
        purpose: str, by which the ranks know what gates they are.
    """
    if job.watchdog() is not None:
        job.watchdog().ask_to_stop(purpose)
    else:
        gates = job.current().gates[purpose]
        gates.open_until(gates.hold())


def can_stop() -> bool:
    """Return whether ranks can agree where to stop: with a watchdog, or alone."""
    return job.size() == 1 or job.watchdog() is not None


def passes_gate(purpose: str = LEAVE) -> bool:
    """Return whether training goes on; all ranks have to call, between the same two steps."""
    return job.current().gates[purpose].passes()


def stop_here(purpose: str) -> None:
    """As `ask_to_stop`; this rank passes its next gate only if another one has done so."""
    job.current().gates[purpose].hold()
    ask_to_stop(purpose)
