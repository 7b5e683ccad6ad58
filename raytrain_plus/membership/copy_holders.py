"""Assign in-memory copies of state that only one worker holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType


def buddies(
    owners: Sequence[str],
    spares: Sequence[str],
    nodes: Mapping[str, str],
    before: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return, for each of the `owners`, the worker that keeps a copy of its state: another owner or a spare.

    An owner without candidates is left out. `nodes`: the node of every worker. `before`: the keepers so far, which stay
    if they still can. A copy lies on another node if possible, and copies are spread as evenly as possible. Among equal
    candidates, spares come first, since they have the memory, then the next owner.

    >>> buddies(["a", "b", "c"], [], {"a": "x", "b": "x", "c": "y"})
    {'a': 'c', 'b': 'c', 'c': 'a'}
    >>> buddies(["a"], ["s"], {"a": "x", "s": "x"}), buddies(["a"], [], {"a": "x"})
    ({'a': 's'}, {})
    """
    found = {owner: before[owner] for owner in owners if before.get(owner) in (*owners, *spares)}
    for place, owner in enumerate(owners):
        others = [*spares, *owners[place + 1 :], *owners[:place]]
        if others and owner not in found:
            load = {other: list(found.values()).count(other) for other in others}
            found[owner] = min(others, key=lambda other: (nodes[other] == nodes[owner], load[other]))
    return found
