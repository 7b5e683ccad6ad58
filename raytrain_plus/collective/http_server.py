"""A small HTTP server on one thread that keeps off processes which cannot authenticate.

It serves one request per connection. Every resource of a connection is bounded: the length of a request's head and
body, the time until it is complete, and the number of connections. A connection is a stranger until its head has
arrived with a valid token. Strangers have little time, and the oldest of them makes room for a new one. So half-open
connections, however many, neither hold a thread nor keep a member waiting.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

HEAD_BYTES = 4 << 10
"""Longest head of a request: its first line and headers."""
HEAD_S = 2.0
"""Limit, in seconds, of waiting for a complete head, and for a refused client to close."""
REQUEST_S = 5.0
"""Limit, in seconds, of the rest of a member's request, its answer included."""
STRANGERS = 256
"""Most connections without a valid token at once; one more drops the oldest of them."""
OF_A_MEMBER = 8
"""Most connections of one member at once; one more is refused."""
ACCEPTED_AT_ONCE = 64
"""Most connections accepted before the existing ones are served again."""
PAUSE_S = 0.05
"""Seconds without service while no connection can be accepted, and there is none to drop for it."""
CLOSE_S = 5.0
"""Limit, in seconds, of waiting for the server's thread."""

_CHUNK_BYTES = 64 << 10
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The head of a request."""

    method: str
    path: str
    token: str = field(repr=False)
    """The bearer token of the `Authorization` header; empty if missing."""
    length: int
    """Bytes of the body; -1 if the head gives no valid length."""


def parse_head(head: bytes) -> HttpRequest | None:
    """Return the request that a head (without the empty line at its end) describes, or None if it is invalid."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    kind, _, token = headers.get("authorization", "").partition(" ")
    length = headers.get("content-length", "0")
    known = length.isascii() and length.isdigit() and len(length) <= 18
    return HttpRequest(words[0], words[1], token if kind == "Bearer" else "", int(length) if known else -1)


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    client: str
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    member: int | None = None
    request: HttpRequest | None = None
    answer: memoryview | None = None
    """The bytes left to send; None until the request is complete."""
    unread: bool = False
    """The client may still be sending: closing at once would discard the answer."""
    watched: int = 0
    """The selector events that are watched."""


class HttpServer:
    """Serves from `start` to `close`."""

    def __init__(
        self,
        address: str,
        member_of: Callable[[str, str], int | None],
        refusal: Callable[[int, HttpRequest], int],
        answer: Callable[[int, HttpRequest, bytes], tuple[int, bytes]],
    ) -> None:
        """Prepare to listen on `address`.

        `member_of(client, token)` returns the member with a client's address and token, or None. `refusal(member,
        request)` returns the status that ends a request before its body is read, or 0. `answer(member, request, body)`
        returns status and body. All three run on the server's thread and must not block.
        """
        self._address = address
        self._member_of = member_of
        self._refusal = refusal
        self._answer = answer
        self._selector = selectors.DefaultSelector()
        # Both in the order of their deadlines.
        self._strangers: dict[_Connection, None] = {}
        self._members: dict[_Connection, None] = {}
        self._closing = False
        self._listening: socket.socket | None = None
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)

    def start(self) -> int:
        """Start serving; return the port."""
        listening = socket.create_server((self._address, 0), backlog=1024)
        listening.setblocking(False)
        self._listening = listening
        self._selector.register(listening, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()
        return int(listening.getsockname()[1])

    def close(self) -> None:
        """Stop serving and free the port."""
        self._closing = True
        self._wake.close()
        if self._listening is not None:
            self._thread.join(CLOSE_S)
            self._listening.close()
        self._woken.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(self._time_left()):
                if isinstance(key.data, _Connection):
                    self._progress(key.data)
                elif key.fileobj is self._listening:
                    self._accept(self._listening)
            self._drop_late()
        for connection in (*self._strangers, *self._members):
            self._drop(connection)

    def _time_left(self) -> float | None:
        ends = [next(iter(group)).deadline for group in (self._strangers, self._members) if group]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _drop_late(self) -> None:
        now = time.monotonic()
        for group in (self._strangers, self._members):
            for connection in list(group):
                if connection.deadline > now:
                    break
                self._drop(connection)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, (client, *_) = listening.accept()
            except BlockingIOError:
                return
            except OSError:
                # The client has disconnected, or the process has no descriptor left: make room for the next connection.
                if not self._drop_oldest_stranger():
                    # It stays ready to be read, and to look again at once would take a whole CPU.
                    time.sleep(PAUSE_S)
                return
            accepted.setblocking(False)
            connection = _Connection(accepted, client, time.monotonic() + HEAD_S)
            if len(self._strangers) >= STRANGERS:
                self._drop_oldest_stranger()
            self._strangers[connection] = None
            # A member's request comes in one piece and is usually here already.
            self._progress(connection)

    def _drop_oldest_stranger(self) -> bool:
        """Drop the oldest connection without a valid token; return whether there was one."""
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, connection: _Connection) -> None:
        self._strangers.pop(connection, None)
        self._members.pop(connection, None)
        if connection.watched:
            self._selector.unregister(connection.socket)
            connection.watched = 0
        connection.socket.close()

    def _watch(self, connection: _Connection, events: int) -> None:
        if connection.watched == events:
            return
        if connection.watched:
            self._selector.modify(connection.socket, events, connection)
        else:
            self._selector.register(connection.socket, events, connection)
        connection.watched = events

    def _progress(self, connection: _Connection) -> None:
        try:
            if connection.answer is None:
                self._read(connection)
            elif connection.answer:
                self._send(connection)
            else:
                self._discard(connection)
        except BlockingIOError:
            self._watch(connection, selectors.EVENT_WRITE if connection.answer else selectors.EVENT_READ)
        except OSError:
            # The death of a client during a request is reported elsewhere.
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        while connection.answer is None:
            some = connection.socket.recv(_CHUNK_BYTES)
            if not some:
                self._drop(connection)
                return
            connection.received += some
            if connection.request is None:
                self._read_head(connection)
            if connection.request is not None and connection.answer is None:
                self._read_body(connection, connection.request)
        self._send(connection)

    def _read_head(self, connection: _Connection) -> None:
        end = connection.received.find(_END, 0, HEAD_BYTES)
        if end < 0:
            if len(connection.received) >= HEAD_BYTES:
                self._refuse(connection, 431)
            return
        request = parse_head(bytes(connection.received[:end]))
        del connection.received[: end + len(_END)]
        member = None if request is None else self._member_of(connection.client, request.token)
        if request is None or member is None:
            self._refuse(connection, 403)
            return
        if refusal := self._refusal(member, request):
            self._refuse(connection, refusal)
        elif sum(other.member == member for other in self._members) >= OF_A_MEMBER:
            self._refuse(connection, 429)
        else:
            del self._strangers[connection]
            self._members[connection] = None
            connection.member, connection.request = member, request
            connection.deadline = time.monotonic() + REQUEST_S

    def _read_body(self, connection: _Connection, request: HttpRequest) -> None:
        if len(connection.received) >= request.length:
            assert connection.member is not None, "requests without a valid token are refused"
            body = bytes(connection.received[: request.length])
            self._prepare(connection, *self._answer(connection.member, request, body))

    def _refuse(self, connection: _Connection, status: int) -> None:
        connection.unread = True
        connection.received.clear()
        self._prepare(connection, status, b"")

    def _prepare(self, connection: _Connection, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
        connection.answer = memoryview(head.encode() + b"\r\n" + body)

    def _send(self, connection: _Connection) -> None:
        while connection.answer:
            connection.answer = connection.answer[connection.socket.send(connection.answer) :]
        if not connection.unread:
            self._drop(connection)
            return
        connection.socket.shutdown(socket.SHUT_WR)
        self._discard(connection)

    def _discard(self, connection: _Connection) -> None:
        """Wait until a refused client has read the answer and closes, within its time limit."""
        for _ in range(ACCEPTED_AT_ONCE):
            if not connection.socket.recv(_CHUNK_BYTES):
                self._drop(connection)
                return
        # The client keeps sending.
        self._drop(connection)
