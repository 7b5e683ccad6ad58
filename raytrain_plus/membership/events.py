"""Define the events that the group's state machine handles and the commands that it returns. Pure.

Messages of a generation carry its number; those of any generation but the current one are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raytrain_plus.membership.mesh import Donor, Stage
from raytrain_plus.membership.owners import Owners
from raytrain_plus.membership.pieces import Pieces
from raytrain_plus.membership.view import View

Why = Literal["paused", "finished", "interrupted", "failed"]
"""Why a member came back: paused at a requested boundary, finished the last step, left a broken world, or failed."""

Lacks = Literal["initial", "newer", "stage", "rows"]
"""What a member lacks when its generation begins.

`initial`: the initial state, which it makes by itself. `newer`: the state that others hold, which it takes from them.
`stage`: its new stage, taken from others, if it holds another stage of the state. It keeps that other stage
until a step is made: no other worker may have it. `rows`: the optimizer's state of rows that it is to hold from now on.

The pieces that it misses do not tell these apart: a member that moves to another stage of the same partition misses all
of it, as with `newer`, and one that moves from the whole to a stage misses nothing and still rebuilds.
"""


@dataclass(frozen=True, slots=True)
class Up:
    """A worker's process has started; it is still preparing."""

    worker: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker can take any place. `holds`: the step whose state it has; -1 the initial one, None no state."""

    worker: str
    holds: int | None
    stage: Stage | None = None
    """The stage of that state; None for the initial state, which the worker can make of any stage."""
    owned: Pieces | None = None
    """The rows whose optimizer's state belongs to it; None for all."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is in its world and has the state."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Step `step` and all before it are committed: undone only if no living worker holds the state or a copy."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Left:
    """A member came back from its generation. `holds` is None if its state is partially applied or incomplete."""

    worker: str
    generation: int
    holds: int | None
    why: Why
    fault: str = ""
    """Identifies an error of the task, to recognise it if it recurs. Of an interrupted member: what interrupted it.
    Empty without either."""
    final: bool = False
    """The error would recur on every retry."""
    exhausted: bool = False
    """The error is that memory has run out."""
    stage: Stage | None = None
    """The stage of the state that it holds."""
    ready: int | None = None
    """The step after `holds`, if the worker has all sums of that step and has not applied them."""
    copy: int | None = None
    """The newest step for which it has a copy of that stage, made in that generation."""
    owned: Pieces | None = None
    """The rows whose optimizer's state belongs to what it holds; None for all."""
    complete: bool = True
    """Whether it has the weights of all other rows too."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker's process is gone, or is considered gone."""

    worker: str
    cause: str = ""
    starved: bool = False
    """Whether its node ran out of memory."""
    fault: str = ""
    """The error of its device, which is recognised if it recurs; empty if the device has not failed."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A worker's node will be preempted or drained."""

    worker: str


@dataclass(frozen=True, slots=True)
class Rescale:
    """The user requests other numbers of workers."""

    minimum: int
    maximum: int
    spares: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The user requests that the run end."""


@dataclass(frozen=True, slots=True)
class Late:
    """The current phase of this generation has reached its limit.

    Training reaches it when a member's node leaves soon.
    """

    generation: int
    awaited: str = "within elastic.wait_s"
    """What the run waited for in vain, in words, if it had too few workers."""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Stuck:
    """All members are inside a collective and nothing moves."""

    generation: int


@dataclass(frozen=True, slots=True)
class Handed:
    """The model was exported."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint of the state after `step` exists."""

    step: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The checkpoint that a worker should read is damaged; the previous one, of the state after `durable`, remains."""

    worker: str
    durable: int


@dataclass(frozen=True, slots=True)
class Overwritten:
    """A worker that provides the model reads the best state in place of the last one, which it holds no more."""

    worker: str


@dataclass(frozen=True, slots=True)
class Copied:
    """The state after `step` is in memory twice: each stage has a copy beside its owner's own."""

    generation: int
    step: int
    copies: Mapping[str, tuple[Stage, ...]]
    """The stages whose copies each of these workers keeps from now on, whatever it does; no older copy is kept."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """The model was measured before any world: only these partitions have no stage too large for a worker."""

    stage_counts: tuple[int, ...]
    """Numbers of stages, the requested one first: at least one, of those in the limits."""
    parts: Mapping[Stage, Pieces]
    """The pieces of each stage of these partitions, and of the whole."""
    rows: Pieces = field(default_factory=Pieces)
    """See `Limits.rows`."""
    row_bytes: Mapping[str, int] = field(default_factory=dict)
    unfit: frozenset[tuple[int, int]] = frozenset()
    """See `SizeTable.unfit`."""


@dataclass(frozen=True, slots=True)
class CopyMissing:
    """A worker lacks a copy that it was believed to keep, or its copy is damaged."""

    worker: str


Event = (
    Up
    | Ready
    | Joined
    | Committed
    | Left
    | Lost
    | Notice
    | Rescale
    | Stop
    | Late
    | Stuck
    | Handed
    | Saved
    | Unreadable
    | Overwritten
    | Copied
    | CopyMissing
    | Fitted
)


@dataclass(frozen=True, slots=True)
class Start:
    """Start these workers, `delay_s` seconds from now."""

    workers: tuple[str, ...]
    delay_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """Form the view's worlds and train from `first_step` on, each member from its stage's state after the step before.

    `donors` together have that state; empty if it is the initial state.
    """

    view: View
    first_step: int
    donors: tuple[Donor, ...]
    lacks: Mapping[str, Lacks]
    """What each member that does not have the state lacks."""
    again: bool = False
    """Its first steps were made before, in the same history: they are not reported again."""
    owners: Owners = field(default_factory=dict)
    """The rows whose optimizer's state each member is to hold, if that is sharded."""
    incomplete: bool = False
    """Some member may lack weights that others have changed in the step before."""
    stale: bool = False
    """So may some of those who have that step's state: rows that move do so with the values of their weights."""


@dataclass(frozen=True, slots=True)
class Formed:
    """All members are in their worlds, and have the state: training begins."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Ask the generation's members to stop at one step boundary."""

    generation: int


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Make these members leave their world at once; a formation in progress is cancelled."""

    workers: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Make these members apply `step`: they have all its sums, and another member has applied it.

    Each of them sends `Left` once more.
    """

    workers: tuple[str, ...]
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Recall:
    """Make these members load their copies of their own states after `step` and send `Left` once more."""

    workers: tuple[str, ...]
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Make this idle worker run a warm-up step; it holds no state afterwards, and sends `Ready` again."""

    worker: str


@dataclass(frozen=True, slots=True)
class Restore:
    """Make this idle worker read a stage's state after `step` from its checkpoint and send `Ready` again."""

    worker: str
    step: int
    stage: Stage
    owned: Pieces | None = None
    """The rows whose optimizer's state it reads; None for all."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Have the holders of the state after `step` write a checkpoint, because all holders of a stage will leave."""

    step: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """End this worker's process: it is no longer needed, or is considered lost."""

    worker: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """Make these workers provide the model after `step` for export."""

    donors: tuple[Donor, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Report that there are too few workers: `have` of `need`."""

    have: int
    need: int


@dataclass(frozen=True, slots=True)
class End:
    """The run is over."""

    status: Literal["finished", "stopped", "failed"]
    why: str


Command = (
    Start
    | Join
    | Formed
    | Pause
    | Interrupt
    | Finish
    | Recall
    | WarmUp
    | Restore
    | Keep
    | Dismiss
    | HandOver
    | Wait
    | End
)
