"""What makers of batches leave out of their data, said where they are made."""

import os
import warnings

_MANY = 0.1  # of all, from which on it is a warning


def warn_left_out(owner: object, number: int, total: int, what: str) -> None:
    """Print on rank 0 how many records are left out; or warn, where they are more than a tenth.

    Args:
        owner: who leaves them out.
        number: how many; nothing is said of none.
        total: of how many.
        what: what they are, and why.

    Example:

    >>> warn_left_out("Batches", 3, 1000, "documents are longer than length=8, and left out")
    Batches: 3 of 1,000 documents are longer than length=8, and left out
    """
    name = owner if isinstance(owner, str) else type(owner).__name__
    if not number or os.environ.get("HOROVOD_RANK", "0") != "0":
        return
    message = f"{name}: {number:,} of {total:,} {what}"
    if number > _MANY * total:
        warnings.warn(message, stacklevel=3)
    else:
        print(message, flush=True)
