"""Worlds of real processes, without Ray: one contract for all of them, and what Horovod's fixes promise."""

from __future__ import annotations

import http.client
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from raytrain_plus.collective.rendezvous import RendezvousServer
from tests.support.worlds import (
    LIMIT_S,
    check_bits,
    check_moves,
    check_reductions,
    check_relay,
    form,
    formation,
    kill_in_all_reduce,
    members,
    reduced,
    server,
)

pytestmark = pytest.mark.timeout(120)


KINDS = ["horovod", "torch", "staged horovod", "staged torch", "nccl"]
"""Staged: for tensors of a device, whose copies to the host complete late and in any order.

NCCL: a stand-in for it, which hangs as it does, beside a staged world. `test_gpu_worlds` has the real ones.
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_contract(kind: str, size: int) -> None:
    check_reductions(size, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gather_exchange_and_reduce_scatter(kind: str, size: int) -> None:
    check_moves(size, kind)


@pytest.mark.parametrize("kind", ["horovod", "torch"])
def test_a_look_at_a_sum_does_not_wait_for_it(kind: str) -> None:
    with members(2, kind) as group, server(2) as (_, door):
        form(group, door)
        for member in group:
            member.tell(do="look")
        first, _ = (member.hear() for member in group)
        assert not first["ended"]
        assert first["seconds"] < 0.5
        assert first.get("ends", True)


@pytest.mark.parametrize("kind", KINDS)
def test_int64_sums_keep_every_bit(kind: str) -> None:
    check_bits(kind)


@pytest.mark.parametrize("kind", ["torch", "staged torch", "nccl peers"])
def test_tensors_pass_from_member_to_member(kind: str) -> None:
    check_relay(kind)


@pytest.mark.parametrize("kind", ["torch", "staged torch", "nccl peers"])
def test_a_receiver_leaves_on_interrupt_and_when_the_sender_dies(kind: str) -> None:
    with members(3, kind) as group:
        with server(3) as (rendezvous, door):
            form(group, door)
            listening = [address for addresses in rendezvous.published().values() for address in addresses]
            for member, source in ((group[0], 1), (group[1], 2)):
                member.tell(do="await_nothing", source=source)
            time.sleep(0.3)
            group[2].process.kill()
            start = time.monotonic()
            assert "stopped waiting for a tensor that never comes" in group[1].hear()["interrupted"]
            group[0].tell(do="cut", listening=listening)
            assert "stopped waiting for a tensor that never comes" in group[0].hear()["interrupted"]
            assert time.monotonic() - start < LIMIT_S
        with server(2) as (_, door):
            assert form(group[:2], door, generation=1) == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]


@pytest.mark.parametrize("length", [10, 50_000_000])
def test_a_sender_leaves_on_interrupt_and_when_the_receiver_dies(length: int) -> None:
    with members(3, "torch") as group, server(3) as (rendezvous, door):
        form(group, door)
        listening = [address for addresses in rendezvous.published().values() for address in addresses]
        for member, to in ((group[0], 1), (group[1], 2)):
            member.tell(do="send_to_nobody", to=to, length=length)
        time.sleep(0.5)
        group[2].process.kill()
        start = time.monotonic()
        for member in (group[1], group[0]):
            member.tell(do="cut", listening=listening)
            assert "stopped waiting for a member to take a tensor" in member.hear()["interrupted"]
        assert time.monotonic() - start < LIMIT_S


@contextmanager
def forged(rendezvous: RendezvousServer, waiting: int, says: Sequence[bytes]) -> Iterator[None]:
    """Connects to all ports that `waiting` members have published, before their peer does, and says each of `says`."""
    deadline = time.monotonic() + 20
    while len(found := rendezvous.published()) < waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    with ExitStack() as stack:
        for place in sorted({place for places in found.values() for place in places}):
            for said in says:
                # Connected members no longer listen there; one that has just stopped resets what waits to be accepted.
                with suppress(ConnectionRefusedError, ConnectionResetError):
                    forger = stack.enter_context(socket.create_connection(place))
                    forger.sendall(said)
        yield


@pytest.mark.parametrize(
    "says",
    [b"", b"0" * 32, pytest.param(b"GET / HTTP/1.1\r\n\r\n" * 10, marks=pytest.mark.slow)],
    ids=["nothing", "a key", "a lot"],
)
def test_a_connection_to_a_horovod_member_without_its_key_is_dropped(says: bytes) -> None:
    with members(4, "horovod") as group, server(4) as (rendezvous, door):
        for rank in range(3):
            group[rank].tell(do="form", formation=formation(rank, 4, door))
        with forged(rendezvous, 3, [says]):
            group[3].tell(do="form", formation=formation(3, 4, door))
            assert [member.hear() for member in group] == [{"rank": rank, "size": 4} for rank in range(4)]
            assert reduced(group) == [{"value": 10}] * 4


@pytest.mark.slow
def test_a_torch_world_with_a_forged_connection_is_not_used() -> None:
    # Gloo accepts any process that sends a connection's number. The members detect it, and form another world.
    says = [struct.pack("<q", number) for number in range(3)]
    with members(4, "torch") as group:
        caught = 0
        for generation in range(6):
            with server(4) as (rendezvous, door):
                for rank in range(3):
                    group[rank].tell(do="form", formation=formation(rank, 4, door, generation))
                with forged(rendezvous, 3, says):
                    group[3].tell(do="form", formation=formation(3, 4, door, generation))
                    answers = [member.hear() for member in group]
            caught = sum("did not form" in answer.get("interrupted", "") for answer in answers)
            # The member that published last may connect to all others, or to none.
            if caught:
                break
            assert reduced(group) == [{"value": 10}] * 4
        assert caught >= 2, answers
        with server(4) as (_, door):
            assert form(group, door, 9) == [{"rank": rank, "size": 4} for rank in range(4)]
        assert reduced(group) == [{"value": 10}] * 4


@pytest.mark.parametrize("kind", ["horovod", "torch"])
def test_a_token_of_another_generation_joins_nothing(kind: str) -> None:
    with members(2, kind) as group, server(2) as (_, door), server(2) as (_, before):
        start = time.monotonic()
        replayed = {**formation(1, 2, door), "credentials": formation(1, 2, before)["credentials"]}
        assert "did not form" in group[1].ask(do="form", formation=replayed)["interrupted"]
        assert time.monotonic() - start < LIMIT_S
        assert form(group, door, 1) == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]


@pytest.mark.parametrize("kind", ["horovod", "torch"])
def test_an_absent_peer_is_given_up_at_once_when_the_formation_is_cancelled(kind: str) -> None:
    with members(2, kind) as group:
        with server(3) as (rendezvous, door):
            for rank, member in enumerate(group):
                member.tell(do="form", formation=formation(rank, 3, door))
            time.sleep(0.5)
            start = time.monotonic()
            rendezvous.cancel()
            answers = [member.hear() for member in group]
            assert time.monotonic() - start < LIMIT_S
        assert all("did not form" in answer["interrupted"] for answer in answers)
        with server(2) as (_, door):
            assert form(group, door, generation=1) == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]
        assert reduced(group) == [{"value": 3}, {"value": 3}]


def test_a_peer_killed_during_a_formation_aborts_no_process() -> None:
    with members(3, "horovod") as group:
        with server(3) as (rendezvous, door):
            for rank in (0, 2):
                group[rank].tell(do="form", formation=formation(rank, 3, door))
            deadline = time.monotonic() + 10
            while 2 not in rendezvous.published() and time.monotonic() < deadline:
                time.sleep(0.01)
            # It has published its address; the others will try to connect to it.
            group[2].process.kill()
            group[1].tell(do="form", formation=formation(1, 3, door))
            time.sleep(0.3)
            start = time.monotonic()
            rendezvous.cancel()
            listening = [address for addresses in rendezvous.published().values() for address in addresses]
            for rank in (0, 1):
                group[rank].tell(do="cut", listening=listening)
            answers = [group[rank].hear() for rank in (0, 1)]
            assert time.monotonic() - start < LIMIT_S
        assert all("did not form" in answer.get("interrupted", "") for answer in answers), answers
        survivors = group[:2]
        with server(2) as (_, door):
            assert form(survivors, door, generation=1) == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]
        assert reduced(survivors) == [{"value": 3}, {"value": 3}]


def test_no_member_waits_for_a_peer_whose_machine_vanishes_during_a_formation() -> None:
    # A listener with a full queue is as silent as a vanished machine; its low port makes others connect to it.
    with members(2, "horovod") as group, ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0x1001), backlog=0))
        full = [stack.enter_context(socket.socket()) for _ in range(4)]
        for one in full:
            one.setblocking(False)
            one.connect_ex(silent.getsockname())
        with server(3) as (rendezvous, door):
            for rank, member in enumerate(group):
                member.tell(do="form", formation=formation(rank, 3, door))
            where = (struct.pack("<H", 2) + struct.pack(">H", 0x1001) + bytes([127, 0, 0, 1])).ljust(128, b"\0")
            value = b"".join(where + struct.pack("<Q", number) for number in range(2))
            client = http.client.HTTPConnection("127.0.0.1", door.port, timeout=5)
            token = rendezvous.credentials(2).token
            client.request("PUT", "/global/2", value, {"Authorization": f"Bearer {token}"})
            assert client.getresponse().status == 200
            client.close()
            time.sleep(1)
            assert connecting_to(0x1001) > len(full) - 2
            start = time.monotonic()
            rendezvous.cancel()
            listening = [address for addresses in rendezvous.published().values() for address in addresses]
            for member in group:
                member.tell(do="cut", listening=listening)
            answers = [member.hear() for member in group]
            assert time.monotonic() - start < LIMIT_S
        assert all("did not form" in answer.get("interrupted", "") for answer in answers), answers
        with server(2) as (_, door):
            assert form(group, door, generation=1) == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]


def connecting_to(port: int) -> int:
    """Return the number of this machine's unanswered connections to that port."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "02" for line in lines)


@pytest.mark.parametrize("kind", ["horovod", "torch"])
def test_a_wait_uses_no_core(kind: str) -> None:
    """Stock Horovod exchanges bit vectors a thousand times a second, and polling costs as much again."""
    with members(2, kind) as group, server(2) as (_, door):
        form(group, door)
        for member in group:
            member.tell(do="wait_for_others")
        assert all(member.hear()["cores"] < 0.1 for member in group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "doing", ["reduce_forever", *(pytest.param(one, marks=pytest.mark.slow) for one in ("flood", "agree"))]
)
def test_a_peer_killed_in_an_all_reduce_lets_the_others_go(kind: str, doing: str) -> None:
    assert kill_in_all_reduce(1, kind, doing) == {"out": 2, "late": 0, "died": 0, "formed again": 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["horovod", "torch"])
@pytest.mark.parametrize("doing", ["reduce_forever", "flood", "agree"])
def test_fifty_peers_killed_in_an_all_reduce(kind: str, doing: str) -> None:
    assert kill_in_all_reduce(50, kind, doing) == {"out": 100, "late": 0, "died": 0, "formed again": 50}
