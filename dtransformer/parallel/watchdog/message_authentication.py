"""The lines that ranks send each other: JSON, each with a seal that only the job can make.

A job's token is random, and comes with Horovod's own first exchange: it is in no environment, on no
command line and in no file. A connection's key is made of it, of both sides' random numbers and of
the rank; a seal, of the key, the direction and the line's number. So lines can be neither made up
nor sent again. They are not secret.
"""

import hashlib
import hmac
import json
import secrets

MAX_LINE = 16384  # bytes


def new_token() -> str:
    """Return a random token, or another random number."""
    return secrets.token_hex(32)


def key_of(token: str, hub_nonce: str, own_nonce: str, rank: int) -> bytes:
    """Return the key of a connection."""
    parts = json.dumps(["dtransformer", hub_nonce, own_nonce, rank]).encode()
    return hmac.digest(token.encode(), parts, hashlib.sha256)


class Seals:
    """The seals of one direction of a connection.

    Args:
        key: of `key_of`.
        direction: "hub" for what rank 0 sends, "rank" for what it is sent.
    """

    def __init__(self, key: bytes, direction: str):
        self._key, self._direction, self._number = key, direction, 0

    def _seal(self, text):
        self._number += 1
        head = f"{self._direction} {self._number} ".encode()
        return hmac.new(self._key, head + text, hashlib.sha256).hexdigest().encode()

    def seal(self, value) -> bytes:
        """Return what JSON can say as a line."""
        text = json.dumps(value).encode()
        return self._seal(text) + b" " + text + b"\n"

    def open(self, line: bytes):
        """Return what a line says.

        Raises:
            ValueError: its seal is not right.
        """
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, self._seal(text)):
            raise ValueError("a line without the job's seal")
        return json.loads(text)
