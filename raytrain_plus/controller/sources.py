"""Decide which worker gives which part of the state to which member of a new generation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.pieces import Pieces, assign, transfers, union


@dataclass(frozen=True, slots=True)
class Source:
    """A part of the state that a worker gives."""

    worker: str
    stage: Stage
    """The stage that it holds, or of which it keeps a copy."""
    layers: tuple[str, ...] | None
    """Those of its layers that are wanted, and `state.stages.REST`; None for the whole stage."""


def sources_of(
    takers: Mapping[str, Stage],
    holding: Mapping[str, Stage],
    providers: Sequence[tuple[str, Stage]],
    pieces: Callable[[Stage], Pieces],
    layer_bytes: Mapping[str, int],
) -> dict[str, tuple[Source, ...]]:
    """Return, for each member, the source of each missing part of its stage; empty if nothing is missing.

    A member that has a copy of what it lacks is its own source, and takes only the rest from others.

    `takers`: the stage that each is to hold. `holding`: the stage of the same state that some of them hold already.
    `providers`: the workers that give this state, each with its stage; together all of it. `pieces`: the parts of a
    stage.
    """
    held = {provider: pieces(provider[1]) for provider in providers}
    own, wanted = {}, {}
    for name, stage in takers.items():
        missing = pieces(stage) - (pieces(holding[name]) if name in holding else Pieces())
        mine = {provider: held[provider] for provider in providers if provider[0] == name}
        own[name] = assign(missing & union(mine.values()), mine, layer_bytes)
        wanted[name] = missing - union(own[name].values())
    moves = transfers(wanted, held, layer_bytes)
    return {
        name: tuple(
            Source(worker, stage, None if given == held[worker, stage] else given.names)
            for (worker, stage), given in (own[name] | moves.get(name, {})).items()
        )
        for name in takers
    }
