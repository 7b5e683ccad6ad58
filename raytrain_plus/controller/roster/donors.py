"""Decide which worker gives which part of the state to which member of a new generation. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytrain_plus.membership.mesh import Donor, Stage
from raytrain_plus.membership.pieces import Piece, Pieces, assign, transfers, union


@dataclass(frozen=True, slots=True)
class DonorPart:
    """A part of the state that a worker gives."""

    worker: str
    stage: Stage
    """The stage that it holds or keeps a copy of."""
    layers: tuple[str, ...] | None
    """Those of its layers that are wanted, and `state.stages.REST`; None for all that it has."""
    rows: tuple[Piece, ...] | None = None
    """The rows whose optimizer's state is wanted; None if that is not sharded and belongs to the layers."""


def donor_parts(
    takers: Mapping[str, Pieces],
    holding: Mapping[str, Pieces],
    providers: Mapping[Donor, Pieces],
    piece_bytes: Mapping[str, int],
    rows: Pieces,
) -> dict[str, tuple[DonorPart, ...]]:
    """Return, for each member, what gives each missing part of its state; empty if nothing is missing.

    A member that has a copy of what it lacks gives it to itself, and takes only the rest from others.

    `takers`: what each is to hold. `holding`: what some of them have of the same state. `providers`: the workers that
    give this state, each with a stage and what it has of that; together all of it. `piece_bytes`: the bytes of a row.
    `rows`: those of the weights, if the optimizer's state is sharded.
    """
    own, wanted = {}, {}
    for name, pieces in takers.items():
        missing = pieces - holding.get(name, Pieces())
        mine = {provider: has for provider, has in providers.items() if provider[0] == name}
        own[name] = assign(missing & union(mine.values()), mine, piece_bytes)
        wanted[name] = missing - union(own[name].values())
    moves = transfers(wanted, providers, piece_bytes)
    return {
        name: tuple(
            _part(provider, given, providers[provider], rows)
            for provider, given in (own[name] | moves.get(name, {})).items()
        )
        for name in takers
    }


def _part(provider: Donor, given: Pieces, has: Pieces, rows: Pieces) -> DonorPart:
    layers = None if given - rows == has - rows else (given - rows).names
    return DonorPart(*provider, layers, tuple(given & rows) if has & rows else None)
