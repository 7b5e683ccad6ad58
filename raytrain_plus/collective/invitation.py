"""The information a member needs to join a world. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from raytrain_plus.collective.member_credentials import Credentials


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """One member's invitation to one world."""

    generation: int
    """The generation of the world's view."""
    name: str
    """Distinguishes this world from the others of its generation."""
    rank: int
    """The member's rank, 0 to size - 1."""
    size: int
    """The number of members of the world."""
    address: str
    """The address of this member's own node, on which it listens and connects."""
    server: tuple[str, int]
    """Address and port of the rendezvous server."""
    timeout_s: float
    """Limit, in seconds, of forming the world and of any single collective."""
    credentials: Credentials = field(default=Credentials(), repr=False)
    """Proves this member to the rendezvous and to the other members. Sent through Ray, never logged."""
