"""Reports on data that batches skip."""

import os
import warnings

_WARN_FRACTION = 0.1  # Fraction of skipped records above which a warning is raised.


def warn_skipped(owner: object, count: int, total: int, what: str) -> None:
    """Report skipped records on rank 0: print a line, or warn if more than 10% are skipped.

    Nothing is reported if `count` is 0.

    Args:
        owner: Prefix of the report: a string, or an object whose class name is used.
        count: Integer. Number of skipped records.
        total: Integer. Number of all records.
        what: Name of the records and the reason: the rest of the sentence, without the period.

    Example:

    >>> warn_skipped("Batches", 3, 1000, "documents are longer than length=8 and are left out")
    Batches: 3 of 1,000 documents are longer than length=8 and are left out.
    """
    name = owner if isinstance(owner, str) else type(owner).__name__
    if not count or os.environ.get("HOROVOD_RANK", "0") != "0":
        return
    message = f"{name}: {count:,} of {total:,} {what}."
    if count > _WARN_FRACTION * total:
        warnings.warn(message, stacklevel=3)
    else:
        print(message, flush=True)
