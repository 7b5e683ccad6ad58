"""Find what the earlier process of this controller has left: a run that goes on, one that has ended, or nothing.

Ray starts a controller again whose process has died. Its workers live, and train on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from raytrain_plus.controller.group.members import left_of
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.errors import RunError
from raytrain_plus.membership.adoption import Survivor
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import Fence, claimant, claimed_by, claims_of
from raytrain_plus.runs.history import Past, load_history
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.workers.messages import AdoptionReport, Charter

MOST_STARTS = 5
"""Maximum controllers in a row between which no step is committed: then the run fails, because it would not end."""
MOST_CLAIMS = 20
"""Maximum claims that are read to count such controllers."""
ANSWER_S = 5.0
"""Maximum seconds until a worker has answered; it may be busy. Most answer within some milliseconds."""


@dataclass(frozen=True, slots=True)
class Succession:
    """What a controller takes over from a dead one: a run that its workers continue meanwhile."""

    fence: Fence
    charter: Charter
    """Of the newest generation that any of the workers was called into."""
    reports: Mapping[str, AdoptionReport]
    """What each living worker has said."""
    asked: float
    answered: float
    """Between these Unix seconds they have said it."""

    @property
    def survivors(self) -> dict[str, Survivor]:
        """The workers as the group's state machine sees them."""
        return {name: survivor_of(name, report) for name, report in self.reports.items()}


@dataclass(frozen=True, slots=True)
class Hopeless:
    """A run that this controller has claimed, and that none can take over."""

    fence: Fence
    error: RunError
    """The reason."""


class Adopting(Protocol):
    """The workers that may be left: see `workers.pool.Pool`."""

    def adopt(self, epoch: int, limit_s: float) -> Mapping[str, AdoptionReport]: ...


def survivor_of(name: str, report: AdoptionReport) -> Survivor:
    """Return a living worker as the state machine sees it."""
    generation = -1 if report.charter is None else report.charter.group.generation
    return Survivor(
        node=report.location.node,
        generation=generation,
        joined=report.joined,
        left=None if report.inside else left_of(name, generation, report.outcome),
        copies=frozenset(report.copies),
    )


def began(order: RunOrder, controller: str) -> Folder | None:
    """Return the run's folder if the earlier process of this controller has opened it; else None."""
    run = open_folder(order.plan.folder)
    return run if claimed_by(run) == controller else None


def take(
    run: Folder,
    order: RunOrder,
    workers: Adopting,
    controller: str,
    epoch: int,
    unix: Callable[[], float] = time.time,
) -> tuple[RunOrder, Succession | Hopeless | Result | None]:
    """Claim a run that the earlier process had opened, and return the order to continue it, and what is left of it.

    Without a living member of a group, nothing is left, and the run resumes from its newest checkpoint. A run that had
    ended has a result. `controller`: the name of this one; `epoch`: of its calls to workers. Raises `RunError` if
    another one owns the run.
    """
    # First: from then on the earlier process, should it live, writes nothing more.
    fence = Fence(run, claims_of(run), controller)
    # Before the workers are asked: they have somebody to report to only when this is done.
    past = load_history(run)
    asked = unix()
    reports = workers.adopt(epoch, ANSWER_S)
    answered = unix()
    if past.claimed and claimant(run, past.claimed).controller != controller:
        # It died before it had begun: result and requests are those of an earlier start of the run.
        past = replace(past, requested=(), started=0)
    elif (result := Result.load(run)) is not None:
        return continued(order, past), result
    order = continued(order, past)
    if (deaths := past.started + early_deaths(run, past, fence.number, controller)) >= MOST_STARTS:
        return order, Hopeless(
            fence,
            RunError(
                f"the controller died {deaths} times in a row without a committed step between; Ray's logs of its "
                "processes say why: ray logs"
            ),
        )
    charters = [report.charter for report in reports.values() if report.charter is not None]
    if not charters:
        return order, None
    newest = max(charters, key=lambda charter: charter.group.generation)
    return order, Succession(fence, newest, reports, asked, answered)


def early_deaths(run: Folder, past: Past, claim: int, controller: str) -> int:
    """Return how many processes of this controller have claimed the run after the last one that is in the events.

    They died before they had taken it over. `claim`: the number of this process's own claim.
    """
    own, earlier = claimant(run, claim), range(max(past.claimed + 1, claim - MOST_CLAIMS), claim)
    # A process may have several claims, if the storage failed.
    return len({one for number in earlier if (one := claimant(run, number)).controller == controller} - {own})


def continued(order: RunOrder, past: Past) -> RunOrder:
    """Return the order to continue a run with this history."""
    plan = replace(order.plan, resumed=past.rules)
    return replace(order, plan=plan, past=past, fresh=False)
