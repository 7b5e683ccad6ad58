"""Where the members of one world find each other: the small HTTP key-value server that Horovod's C++ side speaks.

Members of a torch world use it, too, in a scope of their own (`torch`).

    PUT    /scope/key   a member publishes the addresses it listens on
    GET    /scope/key   200 and the value, 404 while it is missing, 410 once the formation is cancelled
    DELETE /scope/key   a member is connected

One server per world and generation, on one address of this node, for the addresses of the group alone. Values are
bytes and stay bytes. Each member's key in the scopes `torch` and `global*` is written once (Horovod forms a second mesh
for its global process set, in a scope with a suffix). The scopes `local_*` and `cross_*` have one member each by our
account of the world (see `horovod`), though all of them write to the same `cross_0`: nobody reads it, the first value
stays.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

VALUE_BYTES = 64 << 10
"""Longest value taken: 136 bytes for each other member."""
REQUEST_S = 5.0
"""Limit of waiting for more of a request."""
CLOSE_S = 5.0
"""Limit of waiting for the server's thread."""

_PATH = re.compile(
    r"/((?:torch|global|local_[\w.-]{1,128}|cross_\d{1,6})(?:_process_set_hash_\w{1,20})?)/((?:rank_)?\d{1,6})"
)
_ONE_WRITER = ("torch", "global")
_ADDRESS_BYTES = 136  # gloo's tcp Address: a sockaddr_storage and a sequence number


class RendezvousServer:
    """The rendezvous of one world. Serves from `start` to `close`."""

    def __init__(self, address: str, size: int, peers: Iterable[str]) -> None:
        """Will listen on `address` for the `size` members of a world, whose nodes have the addresses `peers`."""
        self._address = address
        self._size = size
        self._peers = frozenset(peers) | {address}
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str], bytes] = {}
        self._cancelled = False
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Starts serving; the port."""
        store = self

        class Handler(_Handler):
            rendezvous = store

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def server_bind(self) -> None:
                # Not as HTTPServer does: it asks a name server for this node's name, and may wait for it for long.
                TCPServer.server_bind(self)
                self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A member that dies in mid-request is told of elsewhere."""

        self._server = Server((self._address, 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="rendezvous", daemon=True
        )
        self._thread.start()
        return int(self._server.server_address[1])

    def cancel(self) -> None:
        """Ends the formation: whoever waits for a missing key is told so at once."""
        with self._lock:
            self._cancelled = True

    def published(self) -> dict[int, list[tuple[str, int]]]:
        """For each member that has published: the addresses it listens on, one for each other member."""
        with self._lock:
            values = [(scope, int(key), value) for (scope, key), value in self._values.items() if key.isdigit()]
        found: dict[int, list[tuple[str, int]]] = {}
        for scope, rank, value in values:
            addresses = _torch_address(value) if scope == "torch" else value
            found.setdefault(rank, []).extend(listening_addresses(addresses))
        return found

    def close(self) -> None:
        """Stops serving and frees the port."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(CLOSE_S)
            self._server.server_close()

    def _allows(self, client: str) -> bool:
        return client in self._peers

    def _get(self, scope: str, key: str) -> tuple[int, bytes]:
        with self._lock:
            value = self._values.get((scope, key))
            if value is not None:
                return 200, value
            return (410 if self._cancelled else 404), b""

    def _put(self, scope: str, key: str, value: bytes) -> int:
        if scope.startswith(_ONE_WRITER) and int(key.removeprefix("rank_")) >= self._size:
            return 403
        with self._lock:
            if self._cancelled:
                return 410
            before = self._values.setdefault((scope, key), value)
        return 200 if before == value or not scope.startswith(_ONE_WRITER) else 403


def listening_addresses(value: bytes) -> list[tuple[str, int]]:
    """The (address, port) pairs in a value that a Gloo member published; IPv4, as this server."""
    found = []
    for start in range(0, len(value) - _ADDRESS_BYTES + 1, _ADDRESS_BYTES):
        family, port = struct.unpack_from("<H", value, start)[0], struct.unpack_from(">H", value, start + 2)[0]
        if family == 2:
            found.append((".".join(map(str, value[start + 4 : start + 8])), port))
    return found


def _torch_address(value: bytes) -> bytes:
    """What a member of a torch world listens on: after its host's name, each part behind its length as 8 bytes."""
    name = 8 + int.from_bytes(value[:8], "little")
    return value[name + 8 : name + 8 + int.from_bytes(value[name : name + 8], "little")]


class _Handler(BaseHTTPRequestHandler):
    rendezvous: RendezvousServer
    timeout = REQUEST_S

    def do_GET(self) -> None:
        place = self._place()
        if place is not None:
            self._answer(*self.rendezvous._get(*place))

    def do_PUT(self) -> None:
        place = self._place()
        length = self.headers.get("Content-Length", "")
        if place is None:
            return
        if not length.isdigit() or int(length) > VALUE_BYTES:
            self._answer(413)
            return
        value = self.rfile.read(int(length))
        if len(value) == int(length):  # else the member died in the midst of it
            self._answer(self.rendezvous._put(*place, value))

    def do_DELETE(self) -> None:
        if self._place() is not None:
            self._answer(200)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: what matters is told by the members."""

    def _place(self) -> tuple[str, str] | None:
        """The request's scope and key; None where it was refused."""
        match = _PATH.fullmatch(self.path)
        if not self.rendezvous._allows(self.client_address[0]) or match is None:
            self._answer(403)
            return None
        return match[1], match[2]

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
