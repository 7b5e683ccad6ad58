"""Simulate workers that train in one process, without Ray: threads that run one at a time, in a random order.

They are killed at any moment, join, leave, and sum in any order. Properties of real workers must hold for them.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation, World
from raytrain_plus.errors import Interrupted
from raytrain_plus.membership.view import host_shards
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState

STEP_S = 60.0


def context(world: World, control: Control | None = None, wait_s: float = 5.0) -> StepContext:
    """Return the context of a step in `world`; without `control`, of a generation that has just begun."""
    if control is None:
        control = Control()
        control.begin(0)
    return StepContext(world=world, control=control, wait_s=wait_s)


class Killed(BaseException):
    """Ends a worker of this group."""


@dataclass
class Round:
    """One world: its members' submitted tensors, and their sums."""

    size: int
    draw: random.Random
    kill_after: int | None
    """Calls of any member after which the caller dies; None lets all members live."""
    baton: threading.Lock = field(default_factory=threading.Lock)
    submitted: dict[tuple[str, int], dict[int, torch.Tensor]] = field(default_factory=dict)
    summed: set[tuple[str, int]] = field(default_factory=set)
    calls: int = 0
    broken: bool = False

    def passed(self) -> None:
        """Count one call; raise `Killed` if it is the caller's last."""
        self.calls += 1
        if self.kill_after is not None and self.calls > self.kill_after and not self.broken:
            self.broken = True
            raise Killed

    def complete(self, key: tuple[str, int], operation: Operation) -> bool:
        """Sum all submitted tensors in a random order."""
        parts = self.submitted[key]
        if key in self.summed:
            return True
        if len(parts) < self.size:
            return False
        order = list(parts.values())
        self.draw.shuffle(order)
        total = order[0].clone()
        for part in order[1:]:
            total = total + part if operation == "sum" else torch.maximum(total, part)
        for part in order:
            part.copy_(total)
        self.summed.add(key)
        # A real world keeps no tensors either.
        parts.clear()
        return True


class GroupWorld:
    """A member's interface to a round."""

    def __init__(self, rank: int, of: Round) -> None:
        self.rank = rank
        self.size = of.size
        self._of = of
        self._times: dict[str, int] = {}

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> _Work:
        self._of.passed()
        time_of = self._times[name] = self._times.get(name, 0) + 1
        self._of.submitted.setdefault((name, time_of), {})[self.rank] = tensor
        return _Work(self._of, (name, time_of), operation)

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> _Work:
        into.zero_()
        into[self.rank] = tensor
        return self.reduce(into, name)

    def close(self) -> None:
        """Do nothing."""


@dataclass
class _Work:
    of: Round
    key: tuple[str, int]
    operation: Operation

    def ended(self, within_s: float) -> bool:
        # A waiting worker lets another one run.
        self.of.baton.release()
        time.sleep(0)
        self.of.baton.acquire()
        self.of.passed()
        if self.of.complete(self.key, self.operation):
            return True
        if self.of.broken:
            raise Interrupted("a peer is gone")
        return False

    def finish(self) -> None:
        """Do nothing: the sum is in place."""


@dataclass
class Member:
    """One worker: alive and with a state, or dead."""

    steps: SynchronousSteps
    alive: bool = True


class Group:
    """Trains by a random schedule: each step runs on another number of workers, and some of them die in it."""

    def __init__(
        self, make: Callable[[], SynchronousSteps], batches: Callable[[int, Sequence[int]], Any], shards: int
    ) -> None:
        """Begin with one worker; `make` builds its steps, `batches(step, hosted)` returns its microbatches."""
        self._make = make
        self._batches = batches
        self._shards = shards
        self.members = [Member(make())]
        self.losses: dict[int, float] = {}
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.deaths = 0

    @property
    def states(self) -> list[TrainState]:
        """The members' states."""
        return [member.steps.state for member in self.members]

    def train(self, steps: int, draw: random.Random, deaths: bool = True) -> None:
        """Make all steps."""
        while True:
            donor = max(
                self.members,
                key=lambda member: -1 if member.steps.state.last_applied is None else member.steps.state.last_applied,
            )
            held = donor.steps.state.last_applied
            assert held is not None
            if held + 1 == steps:
                return
            self._resize(draw.randint(1, 8), donor, draw)
            round_ = Round(len(self.members), draw, draw.randrange(40) if deaths and draw.random() < 0.4 else None)
            self._step(held + 1, round_)
            if not any(member.alive and member.steps.state.last_applied is not None for member in self.members):
                self.members = [Member(self._make())]
                self.losses.clear()  # all are dead: start another run
                self.metrics.clear()
            self.members = [member for member in self.members if member.alive]

    def _resize(self, size: int, donor: Member, draw: random.Random) -> None:
        others = [member for member in self.members if member is not donor]
        draw.shuffle(others)
        self.members = [donor, *others[: size - 1]]
        while len(self.members) < size:
            newcomer = Member(self._make())
            if draw.random() < 0.3:
                control = Control()
                control.begin(0)
                newcomer.steps.run(0, self._batches(0, (0,)), context(SoloWorld(), control))
                newcomer.steps.state.discard()
            self.members.append(newcomer)
        snapshot = donor.steps.state.snapshot()
        for member in self.members:
            if member.steps.state.last_applied != donor.steps.state.last_applied or draw.random() < 0.2:
                member.steps.state.adopt(snapshot)
        draw.shuffle(self.members)

    def _step(self, step: int, round_: Round) -> None:
        hosted = host_shards(self._shards, len(self.members))
        threads = [
            threading.Thread(target=self._run, args=(member, GroupWorld(rank, round_), step, hosted[rank], round_))
            for rank, member in enumerate(self.members)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(STEP_S)
            assert not thread.is_alive(), "a worker of the group is stuck"

    def _run(self, member: Member, world: GroupWorld, step: int, hosted: Sequence[int], round_: Round) -> None:
        control = Control()
        control.begin(0)
        with round_.baton:
            try:
                applied: Applied = member.steps.run(step, self._batches(step, hosted), context(world, control, STEP_S))
                before = self.losses.setdefault(step, applied.loss)
                assert before == applied.loss, "a step that was made again has another loss"
                same = self.metrics.setdefault(step, applied.metrics) == applied.metrics
                assert same, "a step that was made again has other metrics"
            except Interrupted:
                return
            except Killed:
                member.alive = False
                self.deaths += 1
