"""Who keeps a copy of whose state, where a worker alone holds it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType


def buddies(
    owners: Sequence[str],
    spares: Sequence[str],
    nodes: Mapping[str, str],
    before: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """For each of the `owners`, who keeps a copy of its state: another of them, or a spare; nobody where there is none.

    `nodes`: where everyone is; `before`: who has kept copies till now, and goes on with it. A copy lies on another node
    where there is one, and as evenly as can be; of those that are equal, spares come first, since they have the room,
    and then the next owner.

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
