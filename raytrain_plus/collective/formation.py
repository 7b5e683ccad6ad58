"""What a member needs to know to join a world. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytrain_plus.collective.credentials import Credentials


@dataclass(frozen=True, kw_only=True, slots=True)
class Formation:
    """One member's invitation to one world."""

    generation: int
    """The view the world belongs to."""
    name: str
    """Tells this world from the others of its generation."""
    rank: int
    """The member's place, 0 to size - 1."""
    size: int
    """How many members the world has."""
    address: str
    """The address of this member's own node, on which it listens and connects."""
    server: tuple[str, int]
    """Where the members find each other: the rendezvous server."""
    timeout_s: float
    """Limit of the forming, and of any single collective."""
    credentials: Credentials = field(default=Credentials(), repr=False)
    """What proves this member to the rendezvous and to the others. It comes through Ray, and is never logged."""
