"""Rendezvous of the members of one world: the small HTTP key-value server that Horovod's C++ side uses.

Members of a torch world use it, too, in their own scope (`torch`).

    PUT    /scope/key   a member publishes the addresses it listens on
    GET    /scope/key   200 and the value, 404 while it is missing, 410 once the formation is cancelled
    DELETE /scope/key   a member is connected

Each world and generation has one server, on one address of this node. It answers only members: processes on the group's
nodes whose requests carry a token of this world (`Authorization: Bearer`, see `member_credentials`). Any other request
gets 403.

Keys are bound to members. In the scopes `torch` and `global*`, a member writes the keys of its own rank, each once, and
reads all. (Horovod forms a second mesh for its global process set, in a scope with a suffix.) The scopes `local_*` and
`cross_*` have one member each, because of the settings in `horovod_world`, so a member finds there only its own
values. Values are bytes and stay bytes. Their size and the number per member are bounded.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterable

from raytrain_plus.collective.http_server import HttpRequest, HttpServer
from raytrain_plus.collective.member_credentials import Credentials, credentials_of, new_secret, rank_of

VALUE_BYTES = 64 << 10
"""Longest accepted value: 136 bytes for each other member."""
MEMBER_KEYS = 16
"""Most keys a member may write; Horovod writes 12."""

_PATH = re.compile(
    r"/((?:torch|global|local_[\w.-]{1,128}|cross_\d{1,6})(?:_process_set_hash_\w{1,20})?)/((?:rank_)?\d{1,6})"
)
_SHARED = ("torch", "global")
_ADDRESS_BYTES = 136  # Gloo's TCP address: a sockaddr_storage and a sequence number


class RendezvousServer:
    """The rendezvous of one world. Serves from `start` to `close`."""

    def __init__(self, address: str, size: int, peers: Iterable[str]) -> None:
        """Prepare to listen on `address` for the `size` members of a world, on nodes with the addresses `peers`."""
        self._size = size
        self._peers = frozenset(peers) | {address}
        self._secret = new_secret()
        self._lock = threading.Lock()
        self._values: dict[tuple[str, str, int], bytes] = {}
        """(scope, key, writing member) -> value."""
        self._cancelled = False
        self._server = HttpServer(address, self._member_of, self._refusal, self._answered)

    def credentials(self, rank: int) -> Credentials:
        """Return the credentials of the member with that rank."""
        return credentials_of(self._secret, rank, self._size)

    def start(self) -> int:
        """Start serving; return the port."""
        return self._server.start()

    def cancel(self) -> None:
        """Cancel the formation: requests for missing keys fail from now on."""
        with self._lock:
            self._cancelled = True

    def published(self) -> dict[int, list[tuple[str, int]]]:
        """Return, for each member that has published, the addresses it listens on: one for each other member."""
        with self._lock:
            values = [(scope, rank, value) for (scope, key, rank), value in self._values.items() if key.isdigit()]
        found: dict[int, list[tuple[str, int]]] = {}
        for scope, rank, value in values:
            addresses = _torch_address(value) if scope == "torch" else value
            found.setdefault(rank, []).extend(listening_addresses(addresses))
        return found

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.close()

    def _member_of(self, client: str, token: str) -> int | None:
        return rank_of(self._secret, token, self._size) if client in self._peers else None

    def _refusal(self, member: int, request: HttpRequest) -> int:
        place = _PATH.fullmatch(request.path)
        if place is None or request.method not in ("GET", "PUT", "DELETE"):
            return 403
        if request.method != "GET" and place[1].startswith(_SHARED) and _rank_in(place[2]) != member:
            return 403
        return 0 if 0 <= request.length <= VALUE_BYTES else 413

    def _answered(self, member: int, request: HttpRequest, body: bytes) -> tuple[int, bytes]:
        place = _PATH.fullmatch(request.path)
        assert place is not None, "other requests are refused earlier"
        scope, key = place[1], place[2]
        writer = _rank_in(key) if scope.startswith(_SHARED) else member
        if request.method == "GET":
            return self._get(scope, key, writer)
        return (self._put(scope, key, member, body) if request.method == "PUT" else 200), b""

    def _get(self, scope: str, key: str, writer: int) -> tuple[int, bytes]:
        with self._lock:
            value = self._values.get((scope, key, writer))
            if value is not None:
                return 200, value
            return (410 if self._cancelled else 404), b""

    def _put(self, scope: str, key: str, member: int, value: bytes) -> int:
        with self._lock:
            if self._cancelled:
                return 410
            known = self._values.get((scope, key, member))
            if known is not None:
                # A client repeats a request if its answer is lost.
                return 200 if known == value else 403
            if sum(writer == member for _, _, writer in self._values) >= MEMBER_KEYS:
                return 413
            self._values[scope, key, member] = value
        return 200


def _rank_in(key: str) -> int:
    return int(key.removeprefix("rank_"))


def listening_addresses(value: bytes) -> list[tuple[str, int]]:
    """Return the (address, port) pairs in a value published by a Gloo member; IPv4, like this server."""
    found = []
    for start in range(0, len(value) - _ADDRESS_BYTES + 1, _ADDRESS_BYTES):
        family, port = struct.unpack_from("<H", value, start)[0], struct.unpack_from(">H", value, start + 2)[0]
        if family == 2:
            found.append((".".join(map(str, value[start + 4 : start + 8])), port))
    return found


def _torch_address(value: bytes) -> bytes:
    """Return the address that a member of a torch world listens on.

    The value has the host's name, then the address; each part follows its length in 8 bytes.
    """
    name = 8 + int.from_bytes(value[:8], "little")
    return value[name + 8 : name + 8 + int.from_bytes(value[name : name + 8], "little")]
