"""A check of `dtransformer doctor`: what was found, and how to mend it."""


def check(name: str, ok: bool | None, found: str, mend: str | None = None) -> dict:
    """Return a check: what was found, whether that is right, and how to mend it where it is not."""
    return {"name": name, "ok": ok, "found": found, "mend": None if ok else mend}
