"""What the group's machine hears, and what it asks for. Pure.

Messages of a generation carry its number; those of another one than the present are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.view import View

Why = Literal["paused", "finished", "interrupted", "failed"]
"""Why a member came back: at a boundary that was wished for, at the last step, out of a broken world, by an error."""

Lacks = Literal["initial", "newer", "stage"]
"""What a member does not have when its generation begins: the initial state, which it makes by itself; the state that
others hold, which it takes from them; or its new stage of the state that it holds another stage of, taken alike. Until
a step is made that one is kept: no other worker may have it."""


@dataclass(frozen=True, slots=True)
class Up:
    """A worker's process is there; it still prepares."""

    worker: str


@dataclass(frozen=True, slots=True)
class Warm:
    """A worker can take any place. `holds`: the step whose state it has; -1 the initial one, None no state."""

    worker: str
    holds: int | None
    stage: Stage | None = None
    """Of which stage; None for the initial state, which it can make of any."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is in its world and has the state."""

    worker: str
    generation: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Step `step`, and all before, will never be undone."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Left:
    """A member came back from its generation. `holds` is None where its state is dirty or incomplete."""

    worker: str
    generation: int
    holds: int | None
    why: Why
    fault: str = ""
    """What names an error of the task, for telling whether it came again; empty where there was none."""
    final: bool = False
    """The error would come again whatever is tried."""
    stage: Stage | None = None
    """Of which stage the state that it holds is."""
    ready: int | None = None
    """The step after `holds`, where it has all the sums of it, and has not applied them."""
    copy: int | None = None
    """The newest step of which it has a copy of that stage, made in that generation."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker's process is gone, or counts as gone."""

    worker: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """A worker's machine will go."""

    worker: str


@dataclass(frozen=True, slots=True)
class Rescale:
    """The user wishes other numbers of workers."""

    minimum: int
    maximum: int
    spares: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The user wishes the run to end."""


@dataclass(frozen=True, slots=True)
class Late:
    """The present phase of this generation has reached its limit; training has, when a member's machine goes soon."""

    generation: int


@dataclass(frozen=True, slots=True)
class Stuck:
    """All members are inside a collective and nothing moves."""

    generation: int


@dataclass(frozen=True, slots=True)
class Handed:
    """The model was handed over."""


@dataclass(frozen=True, slots=True)
class Saved:
    """There is a complete checkpoint of the state after `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The checkpoint that a worker was to read is damaged; the one before, of the state after `durable`, is left."""

    worker: str
    durable: int


@dataclass(frozen=True, slots=True)
class Copied:
    """The state after `step` is in memory twice: of each stage there is a copy beside its owner's own."""

    generation: int
    step: int
    copies: Mapping[str, tuple[Stage, ...]]
    """Of which stages each of these workers keeps it from now on, whatever it does; no older one is kept."""


@dataclass(frozen=True, slots=True)
class Bare:
    """A worker does not have a copy that it was thought to keep, or a damaged one."""

    worker: str


Event = (
    Up
    | Warm
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
    | Copied
    | Bare
)


@dataclass(frozen=True, slots=True)
class Start:
    """Start these workers, `delay_s` seconds from now."""

    workers: tuple[str, ...]
    delay_s: float


@dataclass(frozen=True, slots=True)
class Join:
    """Form the view's worlds and train from `first_step` on, each member from its stage's state after the step before.

    `donors` have that state, one for each stage of the shape in which it is held; none where it is the initial one.
    """

    view: View
    first_step: int
    donors: tuple[str, ...]
    lacks: Mapping[str, Lacks]
    """Of the members that do not have it."""
    again: bool = False
    """Its first steps were made before, in the same history: nothing of them is told again."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wish that the generation's members stop at one step boundary."""

    generation: int


@dataclass(frozen=True, slots=True)
class Interrupt:
    """These members leave their world at once; a formation under way is cancelled."""

    workers: tuple[str, ...]
    generation: int


@dataclass(frozen=True, slots=True)
class Finish:
    """These members apply `step`, of which they have all sums, since another has, and say `Left` once more."""

    workers: tuple[str, ...]
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Recall:
    """These members take their copies of their own states after `step` in, and say `Left` once more."""

    workers: tuple[str, ...]
    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Rehearse:
    """This idle worker makes a step for practice; it holds no state afterwards, and says `Warm` again."""

    worker: str


@dataclass(frozen=True, slots=True)
class Restore:
    """This idle worker takes a stage's state after `step` from its checkpoint, and says `Warm` again."""

    worker: str
    step: int
    stage: Stage


@dataclass(frozen=True, slots=True)
class Keep:
    """Make a checkpoint of the state after `step`, by all who hold it: they will go, and nobody else has it."""

    step: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """This worker is needed no more, or counts as lost: end its process."""

    worker: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """These workers, one for each stage, give the model after `step` out."""

    workers: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class Wait:
    """There are too few workers: `have` of `need`."""

    have: int
    need: int


@dataclass(frozen=True, slots=True)
class End:
    """The run is over."""

    status: Literal["finished", "stopped", "failed"]
    why: str


Command = (
    Start | Join | Pause | Interrupt | Finish | Recall | Rehearse | Restore | Keep | Dismiss | HandOver | Wait | End
)
