"""Non-blocking connections between rank 0 and the other ranks, and their addresses."""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time

# Ranks exchange lines of JSON, each with a seal that only members of the job can compute.


MAX_LINE = 16384  # Bytes.


def new_token() -> str:
    """Return a random token of 64 hexadecimal digits."""
    return secrets.token_hex(32)


class Seals:
    """Message authentication codes for one direction of a connection between a rank and rank 0.

    Each rank has a single connection per job. The code depends on the index of the line, so lines
    cannot be replayed.

    Args:
        token: Secret token of the job.
        rank: Integer. The rank at the other end from rank 0.
        direction: "hub" for lines from rank 0, or "rank" for lines to rank 0.
    """

    def __init__(self, token: str, rank: int, direction: str):
        self._key = token.encode()
        self._direction = f"{direction} {rank}"
        self._index = 0

    def _seal(self, text):
        self._index += 1
        head = f"{self._direction} {self._index} ".encode()
        return hmac.new(self._key, head + text, hashlib.sha256).hexdigest().encode()

    def seal(self, value) -> bytes:
        """Return a JSON value as a sealed line."""
        text = json.dumps(value).encode()
        return self._seal(text) + b" " + text + b"\n"

    def open(self, line: bytes):
        """Return the value of a sealed line.

        Raises:
            ValueError: If the seal is invalid.
        """
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, self._seal(text)):
            raise ValueError("The line has no valid seal of the job.")
        return json.loads(text)


_MAX_UNSENT = 2**20  # Maximum bytes queued for a rank that does not read.
_HANDSHAKE_SECONDS = 10


class Closed(Exception):
    """The connection was closed or the other side violated the protocol."""


class Link:
    """Connection that carries sealed lines in both directions.

    Args:
        connection: Connected socket.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.since = time.monotonic()
        self.claimed_rank = None  # First line: the rank that the other end claims to be.
        self.rank = None  # The rank, set once a line has a valid seal.
        self._received = b""
        self._unsent = b""
        self._outgoing_seals = self._incoming_seals = None

    def seal_with(self, token: str, rank: int, sent: str, received: str) -> None:
        """Set the seals. `sent` and `received` are the directions of lines, see `Seals`."""
        self._outgoing_seals = Seals(token, rank, sent)
        self._incoming_seals = Seals(token, rank, received)

    def send(self, value) -> None:
        """Send a JSON value as soon as the other side accepts it."""
        self.send_bytes(self._outgoing_seals.seal(value))

    def send_bytes(self, data: bytes) -> None:
        """Send bytes and queue the rest.

        Raises:
            Closed: If the connection fails or the queue exceeds its limit.
        """
        self._unsent += data
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNSENT:
                raise Closed("The other side does not read.") from None
        except OSError as error:
            raise Closed(str(error)) from None

    def lines(self) -> list[bytes]:
        """Return the complete lines received so far.

        Raises:
            Closed: If the connection is closed or fails, or if a line is too long.
        """
        try:
            data = self.connection.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Closed(str(error)) from None
        if not data:
            raise Closed("The connection is closed.")
        *lines, self._received = (self._received + data).split(b"\n")
        if max(map(len, [*lines, self._received])) > MAX_LINE:
            raise Closed("The received line is too long.")
        return lines

    def open(self, line: bytes):
        """Return the value of a sealed line.

        Raises:
            Closed: If the seal is invalid.
        """
        try:
            return self._incoming_seals.open(line)
        except ValueError as error:
            raise Closed(str(error)) from None

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self.connection.close()


class End:
    """Base class for a rank's side of its connections. See `Hub` and `Member`.

    Attributes:
        selector: Selector of all connections. Callers may register other file objects without
            data.
    """

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self._links = []
        self._links_by_rank = {}

    def _add(self, link):
        self._links.append(link)
        self.selector.register(link.connection, selectors.EVENT_READ, link)

    def send(self, rank: int, value) -> None:
        """Send a value to a rank. Does nothing if the rank is not connected."""
        if rank in self._links_by_rank:
            with contextlib.suppress(Closed):  # The next read detects the closed connection.
                self._links_by_rank[rank].send(value)

    def receive(self, seconds: float) -> list[tuple[int, object]]:
        """Wait for lines from other ranks.

        Args:
            seconds: Maximum time to wait.

        Returns:
            A list of `(rank, value)` tuples. The value is `None` if the connection to the rank is
            lost.
        """
        messages = []
        for key, _ in self.selector.select(seconds):
            if isinstance(key.data, Link):
                messages += self._read(key.data)
            elif key.data is not None:
                key.data()
        return messages

    def _read(self, link):
        messages = []
        try:
            for line in link.lines():
                messages += self._open(link, line)
        except Closed:
            self._drop(link)
            if link.rank is not None:
                messages.append((link.rank, None))
        return messages

    def _open(self, link, line):
        return [(link.rank, link.open(line))]

    def _drop(self, link):
        self.selector.unregister(link.connection)
        self._links.remove(link)
        self._links_by_rank.pop(link.rank, None)
        link.close()

    def close(self) -> None:
        """Close all connections."""
        for link in list(self._links):
            self._drop(link)
        self.selector.close()


class Hub(End):
    """Rank 0's side of all connections.

    Args:
        listener: Listening socket.
        token: Secret token of the job.
        size: Number of ranks of the job.
    """

    def __init__(self, listener: socket.socket, token: str, size: int):
        super().__init__()
        self._listener = listener
        self._token = token
        self._size = size
        # Maps the first line of a connection to its rank. A rank connects only once per job, so its
        # lines cannot be replayed.
        self._expected = {str(rank).encode(): rank for rank in range(1, size)}
        listener.setblocking(False)
        self.selector.register(listener, selectors.EVENT_READ, self._accept)

    def receive(self, seconds: float) -> list[tuple[int, object]]:
        """Wait for lines, and close connections that do not identify as a rank in time.

        See `End.receive` for the arguments and the result.
        """
        messages = super().receive(seconds)
        for link in [link for link in self._links if link.rank is None]:
            if time.monotonic() - link.since > _HANDSHAKE_SECONDS:
                self._drop(link)
        return messages

    def _accept(self):
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            unknown = sum(link.rank is None for link in self._links)
            if unknown > self._size + 64:  # The ranks of the job cannot open this many connections.
                connection.close()
            else:
                self._add(Link(connection))

    def _open(self, link, line):
        if link.claimed_rank is None:
            link.claimed_rank = line
            link.seal_with(self._token, self._get_rank(line), "hub", "rank")
            return []
        value = link.open(line)
        if link.rank is None:
            link.rank = self._get_rank(link.claimed_rank)
            del self._expected[link.claimed_rank]
            self._links_by_rank[link.rank] = link
        return [(link.rank, value)]

    def _get_rank(self, line):
        if line not in self._expected:
            raise Closed(
                "The first line of a connection must name a rank that is not connected yet."
            )
        return self._expected[line]

    def close(self) -> None:
        """Close all connections and the listener."""
        super().close()
        self._listener.close()


class Member(End):
    """Another rank's side of its connection to rank 0.

    Args:
        address: `(host, port)` tuple of rank 0.
        token: Secret token of the job.
        rank: Integer. This rank.
        seconds: Time limit for the connection.

    Raises:
        OSError: If the connection fails.
    """

    def __init__(self, address: tuple[str, int], token: str, rank: int, seconds: float):
        super().__init__()
        link = self._links_by_rank[0] = Link(socket.create_connection(tuple(address), seconds))
        link.rank = 0
        link.seal_with(token, rank, "rank", "hub")
        link.send_bytes(f"{rank}\n".encode())
        self._add(link)


def listen_address(is_local: bool) -> str:
    """Return the address to listen on: the local address of the route to the launcher.

    Args:
        is_local: Whether all ranks are on this host. The address is then 127.0.0.1.
    """
    if is_local:
        return "127.0.0.1"
    launcher = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    port = int(os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "0") or 0)
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as towards:
        towards.connect((launcher, port or 9))  # Connecting a datagram socket sends nothing.
        return towards.getsockname()[0]
    return socket.gethostbyname(host_name())


def host_name() -> str:
    """Return the name of this host in the job."""
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
