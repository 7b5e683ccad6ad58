"""The rendezvous: keys written once, for the group alone, cancellable, and never anything but bytes."""

import http.client
import pickle
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_plus.collective.rendezvous import RendezvousServer, listening_addresses


@pytest.fixture
def served() -> Iterator[tuple[RendezvousServer, http.client.HTTPConnection]]:
    server = RendezvousServer("127.0.0.1", size=2, peers=["127.0.0.1"])
    connection = http.client.HTTPConnection("127.0.0.1", server.start(), timeout=5)
    yield server, connection
    connection.close()
    server.close()


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection.request(method, path, body)
    answer = connection.getresponse()
    return answer.status, answer.read()


Served = tuple[RendezvousServer, http.client.HTTPConnection]


def test_keys_are_written_once(served: Served) -> None:
    _, client = served
    assert ask(client, "GET", "/global/1") == (404, b"")
    assert ask(client, "PUT", "/global/1", b"one")[0] == 200
    assert ask(client, "PUT", "/global/1", b"one")[0] == 200  # a request repeated after a lost answer
    assert ask(client, "PUT", "/global/1", b"two")[0] == 403
    assert ask(client, "GET", "/global/1") == (200, b"one")
    assert ask(client, "DELETE", "/global/1")[0] == 200


def test_members_of_one_share_a_cross_scope(served: Served) -> None:
    _, client = served
    assert ask(client, "PUT", "/cross_0/0", b"mine")[0] == 200
    assert ask(client, "PUT", "/cross_0/0", b"another's")[0] == 200


def test_cancelling_ends_the_wait_for_what_is_missing(served: Served) -> None:
    server, client = served
    ask(client, "PUT", "/global/0", b"here")
    server.cancel()
    assert ask(client, "GET", "/global/1")[0] == 410
    assert ask(client, "GET", "/global/0")[0] == 200
    assert ask(client, "PUT", "/global/1", b"late")[0] == 410


def test_no_name_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def getfqdn(name: str = "") -> str:
        raise AssertionError("a name server that does not answer would be waited for")

    monkeypatch.setattr("socket.getfqdn", getfqdn)
    server = RendezvousServer("127.0.0.1", size=2, peers=["127.0.0.1"])
    assert server.start() > 0
    server.close()


def test_half_a_value_is_not_kept(served: Served) -> None:
    _, client = served
    with socket.create_connection((client.host, client.port)) as dies:
        dies.sendall(b"PUT /global/1 HTTP/1.1\r\nContent-Length: 10\r\n\r\nhalf")
        dies.shutdown(socket.SHUT_WR)
        assert dies.recv(100) == b""
    assert ask(client, "PUT", "/global/1", b"whole")[0] == 200


def test_foreign_paths_ranks_sizes_and_pickles_are_refused(served: Served, tmp_path: Path) -> None:
    _, client = served
    canary = tmp_path / "canary"

    class Canary:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (open, (str(canary), "w"))

    for path in ("/worker_addresses/0", "/global/../x", "/global/a", "/global/2", "/rank_and_size/0", "/"):
        assert ask(client, "PUT", path, pickle.dumps(Canary()))[0] == 403, path
    assert ask(client, "PUT", "/global/0", b"x" * (65 << 10))[0] == 413
    assert not canary.exists()


def test_a_foreign_address_is_refused() -> None:
    server = RendezvousServer("127.0.0.2", size=2, peers=["127.0.0.2"])
    port = server.start()
    try:
        stranger = http.client.HTTPConnection("127.0.0.2", port, timeout=5, source_address=("127.0.0.3", 0))
        assert ask(stranger, "PUT", "/global/0", b"x")[0] == 403
        stranger.close()
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", port, timeout=5).request("GET", "/global/0")
    finally:
        server.close()


def test_published_addresses_are_understood(served: Served) -> None:
    server, client = served

    def address(port: int) -> bytes:
        return (struct.pack("<H", 2) + struct.pack(">H", port) + bytes([10, 0, 0, 7])).ljust(128, b"\0") + struct.pack(
            "<q", -1
        )

    ask(client, "PUT", "/global/1", address(4242) + address(4243))
    ask(client, "PUT", "/global_process_set_hash_7d48533536350577/1", address(4244))
    assert server.published() == {1: [("10.0.0.7", 4242), ("10.0.0.7", 4243), ("10.0.0.7", 4244)]}
    assert listening_addresses(b"hostname") == []
