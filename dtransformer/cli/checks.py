"""Result of a check by `dtransformer doctor`."""


def check(name: str, ok: bool | None, state: str, fix: str | None = None) -> dict:
    """Return the result of a check as a dict with the keys of the arguments.

    Args:
        name: Name of the check.
        ok: Boolean. `None` if an optional part is missing.
        state: State of the checked part, such as its version.
        fix: Text on how to fix the problem. The result contains `None` instead if `ok` is true.
    """
    return {"name": name, "ok": ok, "found": state, "fix": None if ok else fix}
