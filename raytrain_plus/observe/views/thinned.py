"""Keep things along an axis, few however many are added: neighbours are joined into one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

ROOM = 240
"""Maximum points kept of one kind. The chart has two pixels for each."""

_Thing = TypeVar("_Thing")


class Thinned(Generic[_Thing]):
    """Things along an axis, in order. Once there are more than `ROOM`, those closest together are joined."""

    def __init__(self, join: Callable[[_Thing, _Thing], _Thing], apart: float) -> None:
        """Begin an empty axis; `apart`: the initial distance from which things are kept separate."""
        self._join = join
        self._apart = apart
        self._held: dict[int, _Thing] = {}

    def __iter__(self) -> Iterator[_Thing]:
        return iter(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def add(self, at: float, thing: _Thing) -> None:
        self._put(int(at // self._apart), thing)
        while len(self._held) > ROOM:
            self._apart *= 2
            before, self._held = self._held, {}
            for place, held in before.items():
                self._put(place // 2, held)

    def cut(self, at: float) -> None:
        """Drop the things after position `at`; a joined thing that spans it stays complete."""
        self._held = {place: held for place, held in self._held.items() if place <= at // self._apart}

    def _put(self, place: int, thing: _Thing) -> None:
        held = self._held.get(place)
        self._held[place] = thing if held is None else self._join(held, thing)
