"""The rendezvous: keys are written once, only by their members; it is cancellable, bounded, and handles only bytes."""

from __future__ import annotations

import http.client
import pickle
import random
import resource
import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from raytrain_plus.collective import http_server
from raytrain_plus.collective.http_server import HEAD_BYTES, OF_A_MEMBER, STRANGERS, parse_head
from raytrain_plus.collective.rendezvous import MEMBER_KEYS, VALUE_BYTES, RendezvousServer, listening_addresses

pytestmark = pytest.mark.timeout(30)


class Client:
    """Send a request with a member's token, or with another one."""

    def __init__(self, server: RendezvousServer, port: int, token: str = "") -> None:
        self.port = port
        self._server = server
        self._token = token

    def ask(self, method: str, path: str, body: bytes | None = None, member: int | None = 1) -> tuple[int, bytes]:
        token = self._token if member is None else self._server.credentials(member).token
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request(method, path, body, {"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


Served = tuple[RendezvousServer, Client]


@pytest.fixture
def served() -> Iterator[Served]:
    server = RendezvousServer("127.0.0.1", size=2, peers=["127.0.0.1"])
    yield server, Client(server, server.start())
    server.close()


def test_keys_are_written_once(served: Served) -> None:
    _, client = served
    assert client.ask("GET", "/global/1") == (404, b"")
    assert client.ask("PUT", "/global/1", b"one")[0] == 200
    assert client.ask("PUT", "/global/1", b"one")[0] == 200  # a request repeated after a lost answer
    assert client.ask("PUT", "/global/1", b"two")[0] == 403
    assert client.ask("GET", "/global/1", member=0) == (200, b"one")
    assert client.ask("DELETE", "/global/1")[0] == 200


@pytest.mark.parametrize("scope", ["torch", "global", "global_process_set_hash_7d48533536350577"])
def test_a_member_publishes_only_its_own_keys(served: Served, scope: str) -> None:
    _, client = served
    for key in ("0", "rank_0"):
        assert client.ask("PUT", f"/{scope}/{key}", b"forged", member=1)[0] == 403
        assert client.ask("DELETE", f"/{scope}/{key}", member=1)[0] == 403
        assert client.ask("PUT", f"/{scope}/{key}", b"mine", member=0)[0] == 200
        assert client.ask("GET", f"/{scope}/{key}", member=1) == (200, b"mine")


def test_requests_without_a_token_of_this_world_are_refused(served: Served) -> None:
    _, client = served
    client.ask("PUT", "/global/0", b"secret", member=0)
    with_another = RendezvousServer("127.0.0.1", size=2, peers=["127.0.0.1"])
    with_another.close()
    replayed = with_another.credentials(1).token
    for token in ("", "1.", "1." + "0" * 32, replayed, client._server.credentials(1).token + "0"):
        forger = Client(client._server, client.port, token)
        assert forger.ask("GET", "/global/0", member=None) == (403, b"")
        assert forger.ask("PUT", "/global/1", b"forged", member=None) == (403, b"")
        assert forger.ask("DELETE", "/global/1", member=None) == (403, b"")
    assert client.ask("GET", "/global/1")[0] == 404


def test_a_single_member_scope_is_private(served: Served) -> None:
    _, client = served
    for scope in ("cross_0", "local_g1-1"):
        assert client.ask("PUT", f"/{scope}/0", b"mine", member=0)[0] == 200
        assert client.ask("GET", f"/{scope}/0", member=1)[0] == 404
        assert client.ask("PUT", f"/{scope}/0", b"another's", member=1)[0] == 200
        assert client.ask("GET", f"/{scope}/0", member=0) == (200, b"mine")


def test_cancelling_ends_the_wait_for_missing_keys(served: Served) -> None:
    server, client = served
    client.ask("PUT", "/global/0", b"here", member=0)
    server.cancel()
    assert client.ask("GET", "/global/1")[0] == 410
    assert client.ask("GET", "/global/0")[0] == 200
    assert client.ask("PUT", "/global/1", b"late")[0] == 410


def test_no_name_server_is_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    def getfqdn(name: str = "") -> str:
        raise AssertionError("a name server that does not answer would be waited for")

    monkeypatch.setattr("socket.getfqdn", getfqdn)
    server = RendezvousServer("127.0.0.1", size=2, peers=["127.0.0.1"])
    assert server.start() > 0
    server.close()


def test_an_incomplete_value_is_not_stored(served: Served) -> None:
    server, client = served
    with socket.create_connection(("127.0.0.1", client.port)) as dies:
        token = server.credentials(1).token.encode()
        dies.sendall(b"PUT /global/1 HTTP/1.1\r\nAuthorization: Bearer %b\r\nContent-Length: 10\r\n\r\nhalf" % token)
        dies.shutdown(socket.SHUT_WR)
        assert dies.recv(100) == b""
    assert client.ask("PUT", "/global/1", b"whole")[0] == 200


def test_foreign_paths_ranks_sizes_and_pickles_are_refused(served: Served, tmp_path: Path) -> None:
    _, client = served
    canary = tmp_path / "canary"

    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(canary), "w"))

    for path in ("/worker_addresses/0", "/global/../x", "/global/a", "/global/2", "/rank_and_size/0", "/"):
        assert client.ask("PUT", path, pickle.dumps(Canary()))[0] == 403, path
    assert client.ask("POST", "/global/1", b"x")[0] == 403
    assert client.ask("PUT", "/global/1", b"x" * (VALUE_BYTES + 1))[0] == 413
    assert client.ask("PUT", "/global/1", b"x" * VALUE_BYTES)[0] == 200
    assert not canary.exists()


def test_the_number_of_keys_per_member_is_limited(served: Served) -> None:
    _, client = served
    statuses = [client.ask("PUT", f"/cross_{number}/0", b"x")[0] for number in range(MEMBER_KEYS + 1)]
    assert statuses == [200] * MEMBER_KEYS + [413]
    assert client.ask("PUT", "/global/0", b"x", member=0)[0] == 200


def test_a_client_outside_the_group_is_refused() -> None:
    server = RendezvousServer("127.0.0.2", size=2, peers=["127.0.0.2"])
    port = server.start()
    try:
        stranger = http.client.HTTPConnection("127.0.0.2", port, timeout=5, source_address=("127.0.0.3", 0))
        stranger.request("PUT", "/global/0", b"x", {"Authorization": f"Bearer {server.credentials(0).token}"})
        assert stranger.getresponse().status == 403
        stranger.close()
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/global/0")
    finally:
        server.close()


@contextmanager
def files_open_at_once(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, count), hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("said", [b"", b"GET /global/0 HTTP/1.1\r\nX: "])
def test_eight_hundred_half_open_connections_keep_no_member_waiting(
    served: Served, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = served
    # Longer than the client waits for an answer.
    monkeypatch.setattr(http_server, "HEAD_S", 1000)
    with ExitStack() as stack:
        stack.enter_context(files_open_at_once(2048))
        for _ in range(800):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
            one.sendall(said)
        for _ in range(20):
            assert client.ask("GET", "/global/0")[0] == 404


def test_the_oldest_stranger_makes_room(served: Served) -> None:
    _, client = served
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", client.port))) for _ in range(STRANGERS + 5)
        ]
        for one in opened[:5]:
            one.settimeout(5)
            assert one.recv(1) == b""
        opened[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            opened[-1].recv(1)


def test_a_stranger_is_dropped_after_its_time_limit(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = served
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    with socket.create_connection(("127.0.0.1", client.port), timeout=5) as one:
        start = time.monotonic()
        one.sendall(b"GET /")
        assert one.recv(1) == b""
        assert time.monotonic() - start > 0.05


def test_the_number_of_connections_per_member_is_limited(served: Served) -> None:
    server, client = served
    head = b"PUT /global/1 HTTP/1.1\r\nAuthorization: Bearer %b\r\nContent-Length: 9\r\n\r\n"
    with ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", client.port), timeout=5))
            for _ in range(OF_A_MEMBER + 1)
        ]
        for one in opened:
            one.sendall(head % server.credentials(1).token.encode())
        [refused], _, _ = select.select(opened, [], [], 5)
        assert refused.recv(100).startswith(b"HTTP/1.1 429 ")
        assert client.ask("GET", "/global/0", member=0)[0] == 404
        taken = next(one for one in opened if one is not refused)
        taken.sendall(b"the value")
        assert taken.recv(100).startswith(b"HTTP/1.1 200 ")


def test_the_length_of_a_head_is_limited(served: Served) -> None:
    _, client = served
    with socket.create_connection(("127.0.0.1", client.port), timeout=5) as one:
        one.sendall(b"GET /global/0 HTTP/1.1\r\nX: " + b"y" * HEAD_BYTES)
        assert one.recv(100).startswith(b"HTTP/1.1 431 ")


def test_any_head_is_parsed_or_refused() -> None:
    draw = random.Random(0)
    whole = b"PUT /global/1 HTTP/1.1\r\nAuthorization: Bearer 1.ab\r\nContent-Length: 12\r\nHost: x"
    found = parse_head(whole)
    assert found is not None
    assert (found.method, found.path, found.token, found.length) == ("PUT", "/global/1", "1.ab", 12)
    assert "1.ab" not in repr(found)
    for _ in range(2000):
        odd = bytearray(whole)
        for _ in range(draw.randrange(1, 8)):
            odd[draw.randrange(len(odd))] = draw.randrange(256)
        parse_head(bytes(odd))
    for length in (b"-1", b"1e3", b"\xb2", b"9" * 30, b""):
        odd_length = parse_head(b"PUT / HTTP/1.1\r\nContent-Length: " + length)
        assert odd_length is not None
        assert odd_length.length == -1


def test_published_addresses_are_decoded(served: Served) -> None:
    server, client = served

    def address(port: int) -> bytes:
        return (struct.pack("<H", 2) + struct.pack(">H", port) + bytes([10, 0, 0, 7])).ljust(128, b"\0") + struct.pack(
            "<q", -1
        )

    client.ask("PUT", "/global/1", address(4242) + address(4243))
    client.ask("PUT", "/global_process_set_hash_7d48533536350577/1", address(4244))
    assert server.published() == {1: [("10.0.0.7", 4242), ("10.0.0.7", 4243), ("10.0.0.7", 4244)]}
    assert listening_addresses(b"hostname") == []


def test_a_server_without_descriptors_rests_between_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(http_server.time, "sleep", slept.append)
    server = http_server.HttpServer("127.0.0.1", lambda *_: None, lambda *_: 0, lambda *_: (200, b""))

    class Full:
        def accept(self) -> None:
            raise OSError(24, "Too many open files")

    server._accept(Full())  # type: ignore[arg-type]
    assert slept == [http_server.PAUSE_S]
    server.close()
