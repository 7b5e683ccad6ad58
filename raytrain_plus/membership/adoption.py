"""Take over a group whose controller has died: from what its members have of it, and what they say of themselves. Pure.

The members train meanwhile. Their charter has the group as it was when their generation was to form; what has happened
since is told to it again, in events: who is gone, who has joined, and who has come out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Group
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.state_machine import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Survivor:
    """A living, prepared worker, as it answers a controller that adopts it."""

    node: str
    generation: int
    """The newest generation that it was called into; -1 if it was in none."""
    joined: bool
    """Whether it was in the worlds of that generation, with the state."""
    left: e.Left | None
    """How it came out of that, with what it holds now; None while it is inside."""
    copies: frozenset[tuple[int, Stage]] = frozenset()
    """Steps and stages that it keeps copies of."""


def adopt(
    group: Group, survivors: Mapping[str, Survivor], *, committed: int, durable: int, named: int, void: bool = False
) -> Outcome:
    """Return the group that these workers are now, and the commands to carry out.

    `group`: as it was when the newest generation of any of them was to form. `committed`: the highest step that the
    record has as committed; `durable`: the step of the newest checkpoint. `named`: how many names were given to
    workers. `void`: whether the record says that the run has gone back to `committed` since.
    """
    raise NotImplementedError
