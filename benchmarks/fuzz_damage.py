"""Helpers for the cases of benchmarks/fuzz.py: damage bytes or JSON, and run the command line."""

import contextlib
import copy
import io
import json

from dtransformer.cli import main
from dtransformer.errors import InputError

ODD_TEXTS = [
    "", " ", "\0", "a\0b", "é", "\u202e", "\udce9", "\x1b[2J", "a\nb", "a" * 300, "a" * 5000, "/",
    ".", "..", "../../x", "/etc/passwd", "/dev/zero", "/dev/full", "~", "*", "-1", "--", "%s%n",
    "{}", "nan", ".nan", ".inf", "-.inf", "1e400", "1e-400", "9" * 5000, "0x10", "010", "1_0",
    "true", "yes", "null", "!!int x", "&a [*a]", "*a", "<<", "[" * 2000, "{" * 2000, "'", '"', "a: b",
    "2014-05-01", "1:30", "0", "1", "2", "8", "64", "1000000", "1000000000", "18446744073709551616",
]  # fmt: skip
ODD_VALUES = [
    None, True, False, 0, 1, -1, 2, 10**6, 10**9, 2**53, 2**63, 2**64, -(2**63), 10**30, 0.0, -0.5,
    1.5, 1e308, 5e-324, float("nan"), float("inf"), "", "a", "é\0", "../x", "/etc/passwd", [], {},
    [1], ["a", None], {"a": 1}, [[[[]]]], {"": {}}, [0] * 1000, "9" * 500, "float32", [[2], "float32"],
]  # fmt: skip
CHUNKS = [
    b"\0", b"\xff", b"\n", b"\r", b"\t", b"\xef\xbb\xbf", b"\xff\xfe", b"\0" * 512, b"\xff" * 8,
    b"\x80" + b"\xff" * 11, b"77777777777\0", b"-0000000001\0", b"[" * 3000, b"{\"a\":" * 500,
    b"1e999", b"NaN", b"-1", b"9" * 5000, b"\x1f\x8b\x08", b"<seg id=\"1\">", b"</seg>", b"../",
    "é".encode("latin1"), "▁".encode(), b"##", b" " * 1000, b"a" * 200_000,
]  # fmt: skip


def damaged(rng, data):
    """Return a copy of the bytes with a few random flips, deletions, insertions or repetitions."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        place, length = rng.randrange(len(data) + 1), rng.choice([1, 4, 100, 4000])
        kind = rng.randrange(7)
        if kind <= 1 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            del data[place : place + length]
        elif kind == 4:
            data[place:place] = rng.choice(CHUNKS)
        elif kind == 5:
            chunk = rng.choice(CHUNKS)
            data[place : place + len(chunk)] = chunk
        else:
            other = rng.randrange(len(data) + 1)
            data[place:place] = data[other : other + length]
    return bytes(data)


def places(value, path=()):
    """Return the paths of all values in a JSON value, as tuples of keys and indices."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    paths = []
    for key, inner in items:
        paths.append((*path, key))
        paths += places(inner, (*path, key)) if isinstance(inner, (dict, list)) else []
    return paths


def edit(rng, value):
    """Return a copy of a JSON value with some random values replaced, removed or added."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 2, 4])):
        choices = places(value)
        if not choices:
            break
        *path, key = rng.choice(choices)
        inner = value
        for step in path:
            inner = inner[step]
        kind = rng.randrange(6)
        if kind == 0:
            del inner[key]
        elif kind == 1 and isinstance(inner, dict):
            inner[rng.choice(ODD_TEXTS)] = inner.pop(key)
        elif kind == 2 and isinstance(inner, dict):
            inner[rng.choice(ODD_TEXTS)] = copy.deepcopy(inner[key])
        elif kind == 3:
            other = rng.choice(choices)
            source = value
            try:
                for step in other:
                    source = source[step]
            except (KeyError, IndexError, TypeError):
                source = None
            inner[key] = json.loads(json.dumps(source))
        elif isinstance(inner[key], int) and not isinstance(inner[key], bool) and kind == 4:
            inner[key] += rng.choice([-1, 1, 2**31, -(2**40)])
        else:
            inner[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return value


class Failure(Exception):
    """Error for a case whose fault the reader did not detect."""


def command(arguments):
    """Run the command line.

    Args:
        arguments: List of strings.

    Raises:
        InputError: If the command ends with a one-line error.
        Failure: If the command fails in any other way.
    """
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        code = main(arguments)
    text = error.getvalue()
    if code == 0:
        return
    if code != 2 or text.count("\n") != 1 or len(text) > 301 or not text[:-1].isprintable():
        raise Failure(f"command {arguments}: exit code {code}, {text[:300]!r}")
    raise InputError(text)
