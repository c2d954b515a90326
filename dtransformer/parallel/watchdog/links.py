"""Connections between rank 0 and the other ranks, none of which ever blocks."""

import contextlib
import hashlib
import hmac
import json
import re
import secrets
import selectors
import socket
import time

# The lines that ranks send each other: JSON, each with a seal that only the job can make.


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


_MAX_UNSENT = 2**20  # bytes, to a rank that takes none
_SECONDS_TO_SAY_HELLO = 10


class Closed(Exception):
    """The other side has closed the connection, or does not speak as it has to."""


class Link:
    """A connection over which sealed lines go both ways.

    Args:
        connection: the socket.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.since = connection, time.monotonic()
        self.said_rank = None  # which the other end says it is
        self.rank = None  # the same, once a line of its has the right seal
        self._received, self._unsent = b"", b""
        self._sends = self._receives = None

    def seal_with(self, key: bytes, own: str, theirs: str) -> None:
        """Seal and open lines with a key, as `Seals` takes them."""
        self._sends, self._receives = Seals(key, own), Seals(key, theirs)

    @property
    def is_sealed(self) -> bool:
        """Whether the key is known."""
        return self._sends is not None

    def send(self, value) -> None:
        """Send what JSON can say, as soon as the other side takes it."""
        self.send_bytes(self._sends.seal(value))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes, or what is left of them later."""
        self._unsent += data
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT:
                raise Closed("takes nothing") from None
        except OSError as error:
            raise Closed(str(error)) from None

    def lines(self) -> list[bytes]:
        """Return the full lines that have come."""
        try:
            data = self.connection.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Closed(str(error)) from None
        if not data:
            raise Closed("is closed")
        *lines, self._received = (self._received + data).split(b"\n")
        if max(map(len, [*lines, self._received])) > MAX_LINE:
            raise Closed("sends a line that is too long")
        return lines

    def open(self, line: bytes):
        """Return what a line says."""
        try:
            return self._receives.open(line)
        except ValueError as error:
            raise Closed(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.connection.close()


class Hub:
    """Rank 0's end of all connections.

    Args:
        listener: a socket that listens.
        token: the job's.
        size: number of ranks of the job.
    """

    def __init__(self, listener: socket.socket, token: str, size: int):
        self._listener, self._token, self._size = listener, token, size
        self._links, self._nonces, self._of_ranks = [], {}, {}
        self.selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def send(self, rank: int, value) -> None:
        """Send to a rank; nothing where it is not connected."""
        if rank in self._of_ranks:
            with contextlib.suppress(Closed):  # which is seen when it is read
                self._of_ranks[rank].send(value)

    def receive(self, seconds: float) -> list[tuple[int, object]]:
        """Wait for lines; return pairs of a rank and what it says, None where it is lost."""
        found = []
        for key, _ in self.selector.select(seconds):
            if isinstance(key.data, Link):
                found += self._read(key.data)
            elif key.data is not None:
                key.data()
        for link in [link for link in self._links if link.rank is None]:
            if time.monotonic() - link.since > _SECONDS_TO_SAY_HELLO:
                self._drop(link)
        return found

    def _accept(self):
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            unknown = sum(link.rank is None for link in self._links)
            if unknown > self._size + 64:  # of ranks there cannot be as many
                connection.close()
                return
            link = Link(connection)
            self._links.append(link)
            self._nonces[link] = new_token()
            self.selector.register(connection, selectors.EVENT_READ, link)
            try:
                link.send_bytes(self._nonces[link].encode() + b"\n")
            except Closed:
                self._drop(link)

    def _read(self, link):
        said = []
        try:
            for line in link.lines():
                if not link.is_sealed:
                    link.said_rank, nonce = _hello(line, self._size)
                    key = key_of(self._token, self._nonces[link], nonce, link.said_rank)
                    link.seal_with(key, "hub", "rank")
                    continue
                value = link.open(line)
                link.rank = link.said_rank
                self._of_ranks[link.rank] = link
                said.append((link.rank, value))
        except Closed:
            self._drop(link)
            if link.rank is not None:
                said.append((link.rank, None))
        return said

    def _drop(self, link):
        self.selector.unregister(link.connection)
        self._links.remove(link)
        self._nonces.pop(link)
        if self._of_ranks.get(link.rank) is link:
            self._of_ranks.pop(link.rank)
        link.close()

    def close(self) -> None:
        """Close all connections."""
        for link in list(self._links):
            self._drop(link)
        self.selector.close()
        self._listener.close()


def _hello(line, size):
    """Return the rank and the random number of a connection's first line."""
    try:
        rank, nonce = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        raise Closed("does not say hello") from None
    if type(rank) is not int or not 0 < rank < size or not isinstance(nonce, str):
        raise Closed("is no rank")
    return rank, nonce


class Member:
    """Another rank's end of its connection to rank 0.

    Args:
        address: host and port of rank 0.
        token: the job's.
        rank: this rank.
        seconds: how long to wait for the connection.

    Raises:
        OSError: there is no connection.
    """

    def __init__(self, address: tuple[str, int], token: str, rank: int, seconds: float):
        connection = socket.create_connection(tuple(address), seconds)
        first = b""
        while not first.endswith(b"\n"):
            data = connection.recv(1)
            first += data
            if not data or len(first) > MAX_LINE:
                raise OSError("the other end does not answer as rank 0")
        hub_nonce, nonce = first.decode("ascii", "replace").strip(), new_token()
        if not re.fullmatch(r"[0-9a-f]{64}", hub_nonce):
            raise OSError("the other end is not rank 0")
        self._link = Link(connection)
        self._link.seal_with(key_of(token, hub_nonce, nonce, rank), "rank", "hub")
        self._link.send_bytes(json.dumps([rank, nonce]).encode() + b"\n")
        self.selector = selectors.DefaultSelector()
        self.selector.register(connection, selectors.EVENT_READ, self._link)
        self._is_lost = False

    def send(self, rank: int, value) -> None:
        """Send to rank 0, the only one that there is."""
        if not self._is_lost:
            with contextlib.suppress(Closed):  # which is seen when it is read
                self._link.send(value)

    def receive(self, seconds: float) -> list[tuple[int, object]]:
        """As `Hub.receive`."""
        said = []
        for key, _ in self.selector.select(seconds):
            if key.data is None:
                continue
            try:
                said += [(0, self._link.open(line)) for line in self._link.lines()]
            except Closed:
                self._is_lost = True
                self.selector.unregister(self._link.connection)
                said.append((0, None))
        return said

    def close(self) -> None:
        """Close the connection."""
        self._link.close()
        self.selector.close()
