"""A state that only one worker holds is also kept in another's memory, as it was when it was copied."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorDiedError, RayError

from raytrain_plus.errors import RunError
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.state.holding import Holding
from raytrain_plus.state.transfer import Snapshot, load_snapshot, take_snapshot
from raytrain_plus.workers.epochs import PEER
from raytrain_plus.workers.messages import Buddy, Sent
from raytrain_plus.workers.states import state_copier as module
from raytrain_plus.workers.states.state_copier import Copier
from tests.unit.workers.trained import LateCopies, holding

STAGE = Stage(1, 2)


class Ray:
    """Calls of actors that are answered at once, or never."""

    def wait(self, references: list[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        return ([], references) if not references[0].done() and not time.sleep(0.01) else (references, [])

    def get(self, reference: Future[Any]) -> Any:
        return reference.result(0)


class Actor:
    """Stands for a worker's actor; `keep` is what it does with a copy."""

    def __init__(self, keep: Callable[[int, Stage, Snapshot], None]) -> None:
        self.call = self
        self._keep = keep

    def remote(self, epoch: int, method: str, generation: int, stage: Stage, snapshot: Snapshot) -> Future[Any]:
        assert (epoch, method) == (PEER, "keep_copy")
        told: Future[Any] = Future()
        try:
            told.set_result(self._keep(generation, stage, snapshot))
        except Exception as error:
            told.set_exception(error)
        return told


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ray", Ray())


def change(held: Holding, by: float) -> None:
    with torch.no_grad():
        for _, value in held.parameters:
            value.add_(by)


def alike(one: Snapshot, other: Snapshot) -> bool:
    return one.values == other.values and all(
        np.array_equal(one.tensors[name][2], other.tensors[name][2]) for name in one.tensors | other.tensors
    )


class Pair:
    """A worker, and another that keeps its copies."""

    def __init__(self, every_steps: int = 1) -> None:
        self.held = holding()
        self.told: queue.SimpleQueue[Sent] = queue.SimpleQueue()
        self.owner = Copier("a", lambda: self.held, every_steps)
        self.keeper = Copier("b", lambda: self.held, every_steps)
        self.buddy = Buddy("b", Actor(self.keeper.keep))

    def begin(self, generation: int = 0, buddy: Buddy | None = None) -> None:
        self.owner.begin(generation, STAGE, True, buddy or self.buddy, self.told.put)

    def copy(self, step: int) -> None:
        self.owner.copy(step, lambda: None)

    def settled(self, generation: int, step: int) -> None:
        for one in (self.owner, self.keeper):
            one.settled(generation, step)


def test_a_copy_is_the_state_between_the_steps_where_it_was_made() -> None:
    pair = Pair()
    pair.begin()
    taken = take_snapshot(3, pair.held)
    before = replace(taken, tensors={name: (a, b, data.copy()) for name, (a, b, data) in taken.tensors.items()})
    pair.copy(3)
    change(pair.held, 1.0)
    sent = pair.told.get(timeout=5)
    assert (sent.worker, sent.buddy, sent.generation, sent.step) == ("a", "b", 0, 3)
    assert sent.bytes == sum(data.nbytes for _, _, data in before.tensors.values())
    for one in (pair.owner, pair.keeper):
        found = one.find(3, STAGE)
        assert found is not None
        assert alike(found, before)
        assert found.digest == before.digest
    # A worker that loads the copy changes its own state, not the copy.
    load_snapshot(found, pair.held)
    change(pair.held, 1.0)
    for parameter in dict(pair.held.parameters).values():
        for value in pair.held.optimizer.state[parameter].values():  # type: ignore[union-attr]
            value.add_(1)
    assert alike(found, before)
    assert pair.keeper.find(3, Stage(0, 2)) is None
    assert pair.keeper.find(2, STAGE) is None


def test_a_copy_that_a_gpu_makes_late_is_sent_once_it_is_complete() -> None:
    pair = Pair()
    pair.held = replace(pair.held, copies=LateCopies())
    pair.begin()
    wanted = take_snapshot(3, pair.held)
    pair.copy(3)
    pair.told.get(timeout=5)
    for one in (pair.owner, pair.keeper):
        found = one.find(3, STAGE)
        assert found is not None
        assert alike(found, wanted)


def test_the_next_copy_waits_until_all_previous_ones_are_in_place() -> None:
    pair = Pair(every_steps=3)
    pair.begin()
    assert not pair.owner.due(-1), "the initial state can be rebuilt"
    assert pair.owner.due(0)
    assert pair.owner.ready()
    pair.copy(0)
    pair.told.get(timeout=5)
    assert not pair.owner.ready()
    pair.settled(0, 0)
    assert pair.owner.ready()
    assert [step for step in range(1, 5) if pair.owner.due(step)] == [3, 4]
    pair.owner.end()
    assert not pair.owner.ready()


def test_two_of_each_are_kept_at_most() -> None:
    pair = Pair()
    pair.begin()
    for step in range(20):
        pair.copy(step)
        pair.told.get(timeout=5)
        for one in (pair.owner, pair.keeper):
            assert one.find(step, STAGE) is not None
            assert one.find(step - 1, STAGE) is not None or step == 0, "all have to be able to go back to it"
            assert len(one._kept) + len(one._free) <= 2
        pair.settled(0, step)
        for one in (pair.owner, pair.keeper):
            assert list(one._kept) == [(step, STAGE)]
        change(pair.held, 1.0)


def test_copies_of_an_earlier_generation_are_dropped_though_their_step_is_later() -> None:
    pair = Pair()
    pair.begin(0)
    pair.copy(8)
    pair.told.get(timeout=5)
    pair.owner.end()
    pair.begin(1)
    pair.copy(5)
    pair.told.get(timeout=5)
    pair.settled(1, 5)
    for one in (pair.owner, pair.keeper):
        assert list(one._kept) == [(5, STAGE)]


def test_a_copy_sent_to_a_worker_that_is_gone_is_sent_to_another() -> None:
    pair = Pair()
    dead: list[int] = []

    def dying(generation: int, stage: Stage, snapshot: Snapshot) -> None:
        dead.append(snapshot.step)
        raise RayError("it died")

    pair.begin(buddy=Buddy("c", Actor(dying)))
    pair.copy(4)
    while not dead:
        time.sleep(0.01)
    pair.owner.send_to(0, pair.buddy)
    assert pair.told.get(timeout=5).buddy == "b"
    # It died after it had received the copy, and before the copies of the others were in place.
    other = Copier("d", lambda: pair.held, 1)
    pair.owner.send_to(0, Buddy("d", Actor(other.keep)))
    assert pair.told.get(timeout=5).buddy == "d"
    before = other.find(4, STAGE)
    assert before is not None
    pair.owner.send_to(-1, None)
    pair.settled(0, 4)
    assert pair.owner.ready(), "the word of another generation changes nothing"
    # The next copy uses no memory of the current one.
    change(pair.held, 1.0)
    for step in (5, 6):
        pair.copy(step)
        pair.told.get(timeout=5)
        assert pair.owner.sound(step, STAGE)
        assert pair.owner.sound(step - 1, STAGE)
        pair.settled(0, step)
    assert alike(other.find(4, STAGE) or before, before)


def test_the_newest_copy_of_its_own_in_a_generation() -> None:
    pair = Pair()
    pair.begin()
    assert pair.owner.own() is None
    for number in (3, 4):
        pair.copy(number)
        pair.told.get(timeout=5)
        assert pair.owner.own() == number
        pair.settled(0, number)
    assert pair.keeper.own() is None
    pair.begin(1)
    assert pair.owner.own() is None, "what it resumes from may be older"


def test_a_worker_without_a_buddy_copies_once_it_has_one() -> None:
    pair = Pair()
    pair.owner.begin(0, STAGE, False, None, pair.told.put)
    assert not pair.owner.ready()
    pair.owner.send_to(0, pair.buddy)
    assert pair.owner.ready()
    # A buddy named before the generation has begun here.
    pair.owner.end()
    pair.owner.send_to(1, pair.buddy)
    assert not pair.owner.ready()
    pair.owner.begin(1, STAGE, False, None, pair.told.put)
    pair.copy(2)
    assert pair.told.get(timeout=5).buddy == "b"


def test_a_copy_that_arrives_after_the_generation_ended_is_not_reported() -> None:
    pair = Pair()
    under_way: Future[None] = Future()

    class Slow:
        def remote(self, *arguments: Any) -> Future[None]:
            return under_way

    slow = Slow()
    slow.call = slow  # type: ignore[attr-defined]
    pair.begin(buddy=Buddy("b", slow))
    pair.copy(3)
    time.sleep(0.1)
    pair.owner.end()
    pair.begin(1)
    pair.copy(3)
    assert pair.told.get(timeout=5).generation == 1
    assert pair.told.empty()


def test_a_late_copy_of_an_earlier_generation_replaces_none() -> None:
    pair = Pair()
    old = take_snapshot(3, pair.held)
    old = replace(old, tensors={name: (a, b, data.copy()) for name, (a, b, data) in old.tensors.items()})
    change(pair.held, 1.0)
    new = take_snapshot(3, pair.held)
    pair.keeper.keep(2, STAGE, new)
    pair.keeper.keep(1, STAGE, old)
    found = pair.keeper.find(3, STAGE)
    assert found is not None
    assert alike(found, new)
    assert pair.keeper.sound(3, STAGE)
    found.tensors["param/weight"][2][0] ^= 1
    assert not pair.keeper.sound(3, STAGE)
    assert not pair.keeper.sound(4, STAGE)


def test_a_single_worker_keeps_its_own_copies() -> None:
    pair = Pair()
    pair.owner.begin(0, STAGE, True, None, pair.told.put)
    pair.copy(3)
    assert pair.told.get(timeout=5).buddy == ""
    assert pair.owner.sound(3, STAGE)


def test_a_damaged_copy_is_refused() -> None:
    pair = Pair()
    with pytest.raises(RunError, match="a copy of step 3 arrived damaged"):
        pair.keeper.keep(0, STAGE, replace(take_snapshot(3, pair.held), digest="0"))
    assert pair.keeper.find(3, STAGE) is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ActorDiedError(), []),
        (
            RayError("ray::Worker.call()\n  File x\nRunError: it arrived damaged"),
            ["a copy of step 4 did not arrive; trying again: RunError: it arrived damaged"],
        ),
        (RayError(), ["a copy of step 4 did not arrive; trying again: RayError"]),
    ],
)
def test_a_copy_that_does_not_arrive_is_one_line_and_a_dead_keeper_none(
    error: RayError, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    pair, failed = Pair(), queue.SimpleQueue[int]()

    def fails(generation: int, stage: Stage, snapshot: Snapshot) -> None:
        failed.put(snapshot.step)
        raise error

    pair.begin(buddy=Buddy("c", Actor(fails)))
    pair.copy(4)
    failed.get(timeout=5)
    pair.owner.send_to(0, pair.buddy)
    assert pair.told.get(timeout=5).buddy == "b"
    assert list(dict.fromkeys(record.getMessage() for record in caplog.records)) == said
    assert not any(record.exc_info for record in caplog.records)


def test_a_sender_that_ends_between_two_looks_is_no_error() -> None:
    class Between(Copier):
        """Its sender ends just after it was seen."""

        seen: list[Future[None] | None]

        @property
        def _sending(self) -> Future[None] | None:
            return self.seen.pop(0) if self.seen else None

        @_sending.setter
        def _sending(self, value: Future[None] | None) -> None:
            self.seen = []

    held = holding()
    copier = Between("a", lambda: held, 1)
    copier.begin(0, STAGE, True, None, lambda sent: None)
    copier.seen = [Future(), None]
    copier.copy(3, lambda: None)
    assert copier.find(3, STAGE) is not None or copier.seen == []


@pytest.mark.parametrize("alone", [False, True])
def test_a_copy_that_was_never_settled_is_told_to_a_new_controller(alone: bool) -> None:
    pair = Pair()
    buddy = None if alone else pair.buddy
    pair.owner.begin(0, STAGE, True, buddy, pair.told.put)
    pair.copy(3)
    first = pair.told.get(timeout=5)
    assert pair.owner.copies() == [(3, STAGE, 0)]
    while pair.owner._sending is not None and not pair.owner._sending.done():
        time.sleep(0.001)
    # The same worker, as another controller names it.
    pair.owner.send_to(0, None if buddy is None else Buddy(buddy.name, buddy.actor))
    try:
        assert pair.told.get(timeout=5) == first
        pair.settled(0, 3)
        pair.owner.send_to(0, buddy)
        with pytest.raises(queue.Empty):
            pair.told.get(timeout=0.2)
    finally:
        pair.owner.end()
