"""Connections between rank 0 and the other ranks, none of which ever blocks, and their addresses."""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time

# The lines that ranks send each other: JSON, each with a seal that only the job can make.


MAX_LINE = 16384  # bytes


def new_token() -> str:
    """Return a random token."""
    return secrets.token_hex(32)


class Seals:
    """The seals of one direction of a rank's connection to rank 0, of which it has one in a job.

    Args:
        token: the job's.
        rank: the rank.
        direction: "hub" for what rank 0 sends, "rank" for what it is sent.
    """

    def __init__(self, token: str, rank: int, direction: str):
        self._key, self._direction, self._number = token.encode(), f"{direction} {rank}", 0

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
        self.said_rank = None  # which the other end says it is, a line
        self.rank = None  # its number, once a line of its has the right seal
        self._received, self._unsent = b"", b""
        self._sends = self._receives = None

    def seal_with(self, token: str, rank: int, own: str, theirs: str) -> None:
        """Seal what is sent, and open what comes, as `Seals` takes the arguments."""
        self._sends, self._receives = Seals(token, rank, own), Seals(token, rank, theirs)

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


class End:
    """A rank's end of its connections, which `Hub` and `Member` make.

    Attributes:
        selector: it waits for what comes; others may register what has no data.
    """

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self._links, self._of_ranks = [], {}

    def _add(self, link):
        self._links.append(link)
        self.selector.register(link.connection, selectors.EVENT_READ, link)

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
        return found

    def _read(self, link):
        said = []
        try:
            for line in link.lines():
                said += self._open(link, line)
        except Closed:
            self._drop(link)
            if link.rank is not None:
                said.append((link.rank, None))
        return said

    def _open(self, link, line):
        return [(link.rank, link.open(line))]

    def _drop(self, link):
        self.selector.unregister(link.connection)
        self._links.remove(link)
        self._of_ranks.pop(link.rank, None)
        link.close()

    def close(self) -> None:
        """Close all connections."""
        for link in list(self._links):
            self._drop(link)
        self.selector.close()


class Hub(End):
    """Rank 0's end of all connections.

    Args:
        listener: a socket that listens.
        token: the job's.
        size: number of ranks of the job.
    """

    def __init__(self, listener: socket.socket, token: str, size: int):
        super().__init__()
        self._listener, self._token, self._size = listener, token, size
        # First line of a connection -> the rank, which has one in a job: nothing can be sent again.
        self._awaited = {str(rank).encode(): rank for rank in range(1, size)}
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def receive(self, seconds: float) -> list[tuple[int, object]]:
        """As of `End`; connections that are none of a rank's are closed."""
        found = super().receive(seconds)
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
            else:
                self._add(Link(connection))

    def _open(self, link, line):
        if link.said_rank is None:
            link.said_rank = line
            link.seal_with(self._token, self._rank_of(line), "hub", "rank")
            return []
        value = link.open(line)
        if link.rank is None:
            link.rank = self._rank_of(link.said_rank)
            del self._awaited[link.said_rank]
            self._of_ranks[link.rank] = link
        return [(link.rank, value)]

    def _rank_of(self, line):
        if line not in self._awaited:
            raise Closed("is no rank, or is there already")
        return self._awaited[line]

    def close(self) -> None:
        """Close all connections, and take no more."""
        super().close()
        self._listener.close()


class Member(End):
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
        super().__init__()
        link = self._of_ranks[0] = Link(socket.create_connection(tuple(address), seconds))
        link.rank = 0
        link.seal_with(token, rank, "rank", "hub")
        link.send_bytes(f"{rank}\n".encode())
        self._add(link)


def own_address(is_local: bool) -> str:
    """Return the address to listen at: that on the way to the launcher, and no other.

    Args:
        is_local: whether all ranks are on this host.
    """
    if is_local:
        return "127.0.0.1"
    launcher = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    port = int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "0") or 0)
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as towards:
        towards.connect((launcher, port or 9))  # sends nothing
        return towards.getsockname()[0]
    return socket.gethostbyname(own_host())


def own_host() -> str:
    """Return this host's name, as the job has it."""
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
