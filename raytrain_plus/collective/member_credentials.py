"""Credentials of a world's members: derive tokens and link keys from one secret, and check them. Pure.

Every world has a fresh secret, which only the controller holds. Each member gets through Ray:

    a token        its rank and a keyed hash of it: the rendezvous accepts it in requests for this member's keys only
    link keys      one per other member, known only to these two: each end of a connection proves it to the other

So a member can neither publish for another member nor connect in its name. A token of another generation proves nothing
here, because each generation has its own secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

SECRET_BYTES = 32
_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secrets of one member of one world. Its `repr` shows none of them."""

    token: str = field(default="", repr=False)
    """Proves the member to the rendezvous."""
    link_keys: tuple[str, ...] = field(default=(), repr=False)
    """For each member of the world, the key of the connection to it; empty for the member itself."""


def new_secret() -> bytes:
    """Return the secret of a new world."""
    return secrets.token_bytes(SECRET_BYTES)


def credentials_of(secret: bytes, rank: int, size: int) -> Credentials:
    """Return the credentials of the member `rank` of a world of `size` members."""
    links = tuple("" if other == rank else _link_key(secret, rank, other) for other in range(size))
    return Credentials(f"{rank}.{_derived(secret, f'member {rank}')}", links)


def rank_of(secret: bytes, token: str, size: int) -> int | None:
    """Return the rank of the member that has this token, or None. Compares in constant time."""
    name, _, proof = token.partition(".")
    rank = int(name) if name.isascii() and name.isdigit() and len(name) <= 6 else -1
    expected = _derived(secret, f"member {rank}")
    matches = hmac.compare_digest(proof.encode(), expected.encode())
    return rank if matches and 0 <= rank < size else None


def link_proof(key: str, prover: int, challenge: bytes) -> bytes:
    """Return the answer of the member `prover` to a challenge from the other end of a connection."""
    return hmac.digest(bytes.fromhex(key), prover.to_bytes(4, "little") + challenge, hashlib.sha256)


def _link_key(secret: bytes, one: int, other: int) -> str:
    return _derived(secret, f"link {min(one, other)} {max(one, other)}")


def _derived(secret: bytes, what: str) -> str:
    return hmac.new(secret, what.encode(), hashlib.sha256).hexdigest()[:_HEX_DIGITS]
