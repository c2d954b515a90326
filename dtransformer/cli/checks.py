"""Result of a check by `dtransformer doctor`."""


def check(name: str, ok: bool | None, found: str, mend: str | None = None) -> dict:
    """Return the result of a check as a dict with the keys of the arguments.

    Args:
        name: Name of the check.
        ok: Boolean. `None` if an optional part is missing.
        found: State of the checked part, such as its version.
        mend: Text on how to fix the problem. The result contains `None` instead if `ok` is true.
    """
    return {"name": name, "ok": ok, "found": found, "mend": None if ok else mend}
