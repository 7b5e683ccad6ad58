"""Send requests to the current generation's members, and handle what they report: steps and outcomes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.event_loop import TICK_S, stale
from raytrain_plus.controller.group.state_copies import Replication
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.errors import RaytrainError
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Phase, members_in
from raytrain_plus.membership.view import View
from raytrain_plus.training.exchange.step_records import Evaluated, Record
from raytrain_plus.trial.mistakes import check_best
from raytrain_plus.workers.messages import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reported:
    """A batch of applied steps and evaluations of a worker."""

    worker: str
    generation: int
    records: Sequence[Record]


@dataclass
class _Outcomes:
    """The outcomes of one generation's members."""

    rings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Each member's coordinates but for its replica: equal for the members of a ring."""
    shas: dict[str, str] = field(default_factory=dict)
    squares: Mapping[str, float] = field(default_factory=dict)
    """The squares of the newest step that a returned member has applied: see `TrainState.squares`."""
    squares_of: int = -1


class Members:
    """Sends requests to a generation's members, and takes their reports and outcomes."""

    def __init__(self, run: Run, checkpoints: Checkpoints, replication: Replication) -> None:
        self._loop, self._machine, self._record = run.loop, run.machine, run.record
        self._pulses, self._clock, self._keep_best = run.pulses, run.clock, run.best
        self._checkpoints, self._replication = checkpoints, replication
        self._now = _Outcomes()
        self.errors: dict[str, tuple[RaytrainError, int | None]] = {}
        """The members' errors, by the message that the state machine has of each, and the step of each, if any."""

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {e.Pause: self.pause, e.Finish: self.finish, e.Recall: self.recall, Reported: self.reported}

    def begin(self, view: View) -> None:
        """Expect the members of a new generation."""
        self._now = _Outcomes({member.worker: member.place[1:] for member in view.members})

    @property
    def digests(self) -> Mapping[str, str]:
        """The hashes of the states that members of this generation have finished with."""
        return self._now.shas

    @property
    def differ(self) -> bool:
        """Whether members that hold the same part of the model have ended with different states."""
        rings, shas = self._now.rings, self._now.shas
        return len({(rings[name], sha) for name, sha in shas.items()}) > len({rings[name] for name in shas})

    def came_out(self, name: str, generation: int) -> Callable[[Outcome], None]:
        """Return what handles the outcome of this member in that generation."""
        return partial(self._out, name, generation)

    def pause(self, command: e.Pause) -> None:
        """Ask all members to stop at one step boundary."""
        for name in members_in(self._machine.group):
            self._loop.tell(name, "pause", command.generation)

    def finish(self, command: e.Finish) -> None:
        """Have the step applied by workers that hold all its sums; its norms come from a worker that has applied it."""
        assert self._now.squares_of == command.step, "a worker that has applied it has come back"
        for name in command.workers:
            then = self.came_out(name, command.generation)
            self._loop.ask(name, "finish", command.generation, self._now.squares, then=then)

    def recall(self, command: e.Recall) -> None:
        """Have copies of their own states loaded by workers."""
        for name in command.workers:
            then = self.came_out(name, command.generation)
            self._loop.ask(name, "recall", command.generation, command.step, then=then)

    def stand_aside(self) -> None:
        """Ask the members that still compute to provide the state that they had before this step."""
        for name in members_in(self._machine.group):
            self._ask_aside(name, self._machine.group.generation)

    def reported(self, message: Reported) -> None:
        """Record steps and evaluations."""
        generation, records = message.generation, message.records
        if stale(self._machine.group, generation, f"a report from {message.worker}"):
            return
        before = self._record.committed
        for record in records:
            if isinstance(record, Evaluated):
                check_best(self._keep_best, record.metrics)
        self._record.report(message.worker, records)
        self._replication.settle()
        if self._record.committed > before:
            self._machine.feed(e.Committed(generation, self._record.committed))

    def _ask_aside(self, name: str, generation: int) -> None:
        if self._machine.group.phase is Phase.LEAVE:
            self._loop.ask(name, "stand_aside", generation, then=partial(self._came_aside, name, generation))

    def _came_aside(self, name: str, generation: int, outcome: Outcome | None) -> None:
        if outcome is None:
            self._loop.later(TICK_S, partial(self._ask_aside, name, generation))
        else:
            self._out(name, generation, outcome)

    def _out(self, name: str, generation: int, outcome: Outcome) -> None:
        group = self._machine.group
        if stale(group, generation, f"{name} left") or name not in group.workers:
            return
        self.reported(Reported(name, generation, outcome.records))
        self.note(name, outcome)
        self._machine.feed(left_of(name, generation, outcome))

    def note(self, name: str, outcome: Outcome) -> None:
        """Note what a member that has come out leaves, and why it has come out."""
        now = self._now
        self._pulses.left(name, self._clock.now())
        self._checkpoints.left(name, outcome.saved_as, outcome.copied)
        if outcome.why == "finished" and outcome.state_sha256 is not None:
            now.shas[name] = outcome.state_sha256
        if outcome.holds is not None and outcome.holds > now.squares_of:
            now.squares, now.squares_of = outcome.squares, outcome.holds
        if outcome.error is not None:
            self.errors[outcome.fault] = outcome.error, outcome.step
            log.info("%s failed in generation %d: %s", name, self._machine.group.generation, outcome.fault)
        if outcome.why in ("failed", "interrupted"):
            said = f"{name}: {outcome.fault}" if outcome.fault else ""
            self._record.broken(self._clock.unix(), said, follows=outcome.why == "interrupted")


def left_of(name: str, generation: int, outcome: Outcome) -> e.Left:
    """Return how a member came out, as the state machine hears it."""
    return e.Left(
        name,
        generation,
        outcome.holds,
        outcome.why,
        outcome.fault,
        outcome.final,
        outcome.exhausted,
        stage=outcome.stage,
        ready=outcome.ready,
        copy=outcome.copy,
        owned=outcome.owned,
        complete=outcome.complete,
    )
