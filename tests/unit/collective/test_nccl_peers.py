"""Workers of a replica that send to each other by NCCL, with a stand-in for it, in threads."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raytrain_plus.collective import nccl_peers
from raytrain_plus.collective.nccl_peers import ANNOUNCED, Direction, NcclPeers
from raytrain_plus.errors import Interrupted
from tests.support.stages import Ring, RingWorld
from tests.unit.collective.stand_in_nccl import Links
from tests.unit.parallel.pipeline.replicas import Coming, Mail, Sent, Threads, at_once

LIMIT_S = 5.0
ALL_OF_THREE = [(one, other) for one in range(3) for other in range(3) if one != other]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of floating numbers count as those of a device."""
    monkeypatch.setattr(nccl_peers, "on_host", lambda tensor: not tensor.is_floating_point())


class Host(Threads):
    """A world of the host, in threads, that notes the tags of what it sends."""

    def __init__(self, rank: int, mail: Mail, ring: Ring) -> None:
        super().__init__(rank, mail)
        self.size = ring.size
        self.reduce = RingWorld(rank, ring).reduce
        self.sent: list[int] = []
        self.closed = 0
        self._posted: dict[tuple[int, int], list[_InOrder]] = defaultdict(list)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Sent:
        self.sent.append(tag)
        return super().send(tensor, to, tag)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        return _InOrder(super().receive(tensor, source, tag), self._posted[source, tag])

    def close(self) -> None:
        self.closed += 1


class _InOrder:
    """A transfer; those of one tag must be finished in the order in which they were started, to be those of Gloo."""

    def __init__(self, coming: Coming, posted: list[_InOrder]) -> None:
        self._coming, self._posted = coming, posted
        posted.append(self)

    def finish(self, what: str) -> None:
        assert self._posted.pop(0) is self
        self._coming.finish(what)


def together(
    size: int,
    each: Callable[[NcclPeers, Host], Any],
    directions: list[Direction],
    links: Links | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """Return the result of each member's work, in a replica of so many."""
    ring, mail, links = Ring(size), Mail(lambda: None), links or Links()  # type: ignore[arg-type]

    def member(rank: int) -> Any:
        host = Host(rank, mail, ring)
        peers = NcclPeers(host, directions, limit_s, interrupted).join(links.of(rank))
        try:
            return each(peers, host)
        finally:
            peers.close()
            assert host.closed == 1

    return at_once(member, range(size))


def switched(peers: NcclPeers) -> NcclPeers:
    """The replica, once its links have formed and are used."""
    until = time.monotonic() + LIMIT_S
    while peers.forming:
        assert time.monotonic() < until
        time.sleep(0.001)
    peers.use_formed()
    return peers


def test_links_carry_what_is_on_a_device_and_the_host_all_else() -> None:
    meet = threading.Barrier(2, timeout=LIMIT_S)

    def each(peers: NcclPeers, host: Host) -> Any:
        other, found = 1 - peers.rank, []
        for link in (False, True):
            if link:
                switched(peers)
                meet.wait()
                host.sent.clear()
            own = torch.full((3,), peers.rank + 1.0, dtype=torch.bfloat16)
            numbers, empty = torch.tensor([peers.rank]), torch.empty(0)
            sent = [peers.send(value, other, tag) for tag, value in enumerate((own, numbers, empty), 5)]
            into = [torch.empty_like(value) for value in (own, numbers, empty)]
            received = [peers.receive(value, other, tag) for tag, value in enumerate(into, 5)]
            for one in (*received, *sent):
                one.finish("a test")
            found.append(([value.tolist() for value in into], list(host.sent)))
        return found

    values = [[[2.0] * 3, [1], []], [[1.0] * 3, [0], []]]
    for rank, (before, after) in enumerate(together(2, each, [(0, 1), (1, 0)])):
        assert before == (values[rank], [5, 6, 7])
        assert after == (values[rank], [ANNOUNCED, 6, 7])


def test_pairs_without_a_link_use_the_host() -> None:
    def each(peers: NcclPeers, host: Host) -> Any:
        switched(peers)
        if peers.rank == 0:
            peers.send(torch.ones(2), 2, 9).finish("a test")
            return host.sent
        if peers.rank == 2:
            into = torch.empty(2)
            peers.receive(into, 0, 9).finish("a test")
            return into.tolist()
        return None

    assert together(3, each, [(0, 1), (1, 0)]) == [[9], None, [1.0, 1.0]]


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_sending_and_receiving(seed: int) -> None:
    """Tags recur; each member starts and finishes its transfers in an order of its own."""
    draw = random.Random(seed)
    messages = [(*draw.choice(ALL_OF_THREE), draw.randrange(4), draw.randrange(1, 9)) for _ in range(60)]

    def each(peers: NcclPeers, host: Host) -> Any:
        switched(peers)
        mine = random.Random(f"{seed} {peers.rank}")
        numbered = list(enumerate(messages))
        sends = [(n, m) for n, m in numbered if m[0] == peers.rank]
        receives: list[tuple[int, Any]] = [(n, m) for n, m in numbered if m[1] == peers.rank]
        # Messages of one tag from one member keep their order, as in any world.
        of_channel = defaultdict(list)
        for n, message in receives:
            of_channel[message[0], message[2]].append((n, message))
        shuffled = [key for key, found in of_channel.items() for _ in found]
        mine.shuffle(shuffled)
        receives = [of_channel[key].pop(0) for key in shuffled]
        going = [peers.send(torch.full((length,), float(n)), to, tag) for n, (_, to, tag, length) in sends]
        coming, wrong = [], 0
        for n, (source, _, tag, length) in receives:
            into = torch.empty(length)
            coming.append((n, into, peers.receive(into, source, tag)))
            if mine.random() < 0.5:
                wrong += _taken(*coming.pop(mine.randrange(len(coming))))
        mine.shuffle(coming)
        wrong += sum(_taken(*one) for one in coming)
        for one in going:
            one.finish("a test")
        return wrong

    assert together(3, each, ALL_OF_THREE) == [0, 0, 0]


def _taken(number: int, into: torch.Tensor, transfer: Any) -> bool:
    """Whether a transfer brings something else than its number."""
    transfer.finish("a test")
    return into.tolist() != [float(number)] * len(into)


def test_who_waits_for_a_member_that_is_gone_leaves_when_told_to() -> None:
    told = threading.Event()

    def each(peers: NcclPeers, host: Host) -> Any:
        switched(peers)
        if peers.rank:
            return None
        sent = peers.send(torch.ones(3), 1, 4)
        threading.Timer(0.2, told.set).start()
        start = time.monotonic()
        with pytest.raises(Interrupted, match="stopped waiting for member 1 to receive"):
            sent.finish("member 1 to receive")
        return time.monotonic() - start < 0.6

    assert together(2, each, [(0, 1), (1, 0)], interrupted=told.is_set) == [True, None]


def test_a_transfer_that_does_not_end_has_a_limit() -> None:
    def each(peers: NcclPeers, host: Host) -> Any:
        switched(peers)
        if peers.rank:
            return None
        with pytest.raises(Interrupted, match=r"stopped waiting for a test, after 0\.3 s"):
            peers.send(torch.ones(3), 1, 4).finish("a test")
        return "told"

    assert together(2, each, [(0, 1)], limit_s=0.3) == ["told", None]


def test_all_links_are_aborted() -> None:
    links = Links()
    together(3, lambda peers, _: switched(peers) and None, ALL_OF_THREE, links)
    assert len(links.made) == 2 * len(ALL_OF_THREE)
    assert {one.aborted for one in links.made} == {1}


def test_a_member_on_which_a_link_does_not_form_never_uses_any() -> None:
    links = Links()
    links.broken.add(2)

    def each(peers: NcclPeers, host: Host) -> Any:
        time.sleep(0.5)
        # Those of the first two alone are no use: all members begin at once.
        return peers.forming, peers.why_never

    found = together(3, each, ALL_OF_THREE, links, limit_s=0.2)
    timed_out = "stopped waiting for NCCL to form, after 0.2 s"
    assert found == [(True, timed_out), (True, timed_out), (True, "ncclSystemError")]
    assert all(one.aborted for one in links.made)


def test_a_replica_without_links_is_ready_at_once() -> None:
    assert together(2, lambda peers, _: (peers.forming, peers.use_formed()), []) == [(False, None)] * 2
