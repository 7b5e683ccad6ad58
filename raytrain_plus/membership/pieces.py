"""Divide a training state into pieces, and compute with sets of them: which worker has, lacks or gives which. Pure.

A piece is a range of rows of something that has a name: a tensor of the state, a weight of the model, or a layer with
all its tensors (one row). The optimizer's state of rows of a weight belongs to their piece. Weights and layers can be
in one set: a weight's name is that of its layer, a dot, and more, and the names of layers have no dots.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeVar

Taker = TypeVar("Taker", bound=Hashable)
Holder = TypeVar("Holder", bound=Hashable)
Range = tuple[int, int]
"""Rows [first, last)."""


class Piece(NamedTuple):
    """Rows [first, last) of what has this name."""

    name: str
    first: int = 0
    last: int = 1


@dataclass(frozen=True, slots=True)
class Pieces:
    """A set of rows, by name; equal sets compare equal, however their pieces were given.

    >>> whole = Pieces.of([Piece("a", 0, 4), Piece("b")])
    >>> list(whole - Pieces.of([Piece("a", 1, 2)]))
    [Piece(name='a', first=0, last=1), Piece(name='a', first=2, last=4), Piece(name='b', first=0, last=1)]
    >>> bool(Pieces.of([Piece("a", 0, 1), Piece("a", 1, 4)]) - whole)
    False
    """

    _ranges: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    """For each name, its ranges: in order, neither empty nor touching."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Pieces:
        """Return the set of these pieces, which may overlap or be empty."""
        ranges: dict[str, list[Range]] = {}
        for name, first, last in pieces:
            ranges.setdefault(name, []).append((first, last))
        joined = {name: _joined(ranges[name]) for name in sorted(ranges)}
        return cls({name: found for name, found in joined.items() if found})

    def __iter__(self) -> Iterator[Piece]:
        """Yield the fewest pieces that make up the set, by name and row."""
        return (Piece(name, *one) for name, ranges in self._ranges.items() for one in ranges)

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def __and__(self, other: Pieces) -> Pieces:
        return Pieces.of(
            Piece(name, max(first, low), min(last, high))
            for name, first, last in self
            for low, high in other._ranges.get(name, ())
        )

    def __sub__(self, other: Pieces) -> Pieces:
        return Pieces.of(
            Piece(name, *rest)
            for name, first, last in self
            for rest in _without((first, last), other._ranges.get(name, ()))
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names that have rows, sorted."""
        return tuple(self._ranges)

    def end(self, name: str, row: int) -> int:
        """Return the end of the range that contains this row; `row` itself if it is not in the set."""
        return next((last for first, last in self._ranges.get(name, ()) if first <= row < last), row)

    def size(self, row_bytes: Mapping[str, int]) -> int:
        """Return the bytes of all rows, given the bytes of a row of each name."""
        return sum((last - first) * row_bytes[name] for name, first, last in self)


def union(sets: Iterable[Pieces]) -> Pieces:
    """Return the rows that are in any of these sets."""
    return Pieces.of(piece for one in sets for piece in one)


def split(pieces: Pieces, row_bytes: Mapping[str, int], most: int) -> Iterator[Piece]:
    """Yield the pieces of a set, each of at most `most` bytes unless one row is larger."""
    for name, first, last in pieces:
        step = max(1, most // row_bytes[name]) if row_bytes[name] else last - first
        for start in range(first, last, step):
            yield Piece(name, start, min(last, start + step))


def assign(
    wanted: Pieces,
    held: Mapping[Holder, Pieces],
    row_bytes: Mapping[str, int],
    *,
    most: int | None = None,
    before: Mapping[Holder, int] = MappingProxyType({}),
) -> dict[Holder, Pieces]:
    """Return which part of `wanted` each holder gives; holders that give nothing are left out.

    Each row comes from exactly one holder: of those that have it, the one that gives the fewest bytes so far, the first
    among equals; what has no bytes comes from one that gives something else, if possible. The largest pieces are
    assigned first, each of at most `most` bytes unless one row is larger: so holders of the same rows give equally
    many bytes, within one piece. `before`: the bytes that holders already give. Raises `ValueError` if nobody holds
    what is wanted.

    >>> a, b = Pieces.of([Piece("a", 0, 4)]), Pieces.of([Piece("b")])
    >>> both = union([a, b])
    >>> given = assign(both, {"s": a, "t": both}, {"a": 2, "b": 3}, most=4)
    >>> {holder: list(pieces) for holder, pieces in given.items()}
    {'s': [Piece(name='a', first=0, last=2)], 't': [Piece(name='a', first=2, last=4), Piece(name='b', first=0, last=1)]}
    """
    given: dict[Holder, list[Piece]] = {}
    loads = {holder: before.get(holder, 0) for holder in held}
    pieces = wanted if most is None else split(wanted, row_bytes, most)
    for name, first, last in sorted(pieces, key=lambda one: -(one.last - one.first) * row_bytes[one.name]):
        while first < last:
            ends = {holder: end for holder in held if (end := held[holder].end(name, first)) > first}
            if not ends:
                raise ValueError(f"nobody holds row {first} of {name}")
            holder = min(ends, key=lambda one: (not row_bytes[name] and one not in given, loads[one]))
            end = min(last, ends[holder])
            given.setdefault(holder, []).append(Piece(name, first, end))
            loads[holder] += (end - first) * row_bytes[name]
            first = end
    return {holder: Pieces.of(pieces) for holder, pieces in given.items()}


def transfers(
    missing: Mapping[Taker, Pieces], held: Mapping[Holder, Pieces], row_bytes: Mapping[str, int]
) -> dict[Taker, dict[Holder, Pieces]]:
    """Return what each worker takes from which holder, so that it gets what it lacks: see `assign`.

    The bytes that holders give are balanced over all takers. Workers that lack nothing are left out.

    >>> a, b = Pieces.of([Piece("a")]), Pieces.of([Piece("b")])
    >>> both = union([a, b])
    >>> moves = transfers({"x": both, "y": a}, {"s": a, "t": both}, {"a": 8, "b": 4})
    >>> {taker: {giver: given.names for giver, given in taken.items()} for taker, taken in moves.items()}
    {'x': {'s': ('a',), 't': ('b',)}, 'y': {'t': ('a',)}}
    """
    loads = dict.fromkeys(held, 0)
    moves: dict[Taker, dict[Holder, Pieces]] = {}
    for taker, wanted in missing.items():
        if taken := assign(wanted, held, row_bytes, before=loads):
            moves[taker] = taken
        for holder, pieces in taken.items():
            loads[holder] += pieces.size(row_bytes)
    return moves


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges as few as possible, in order, without the empty ones."""
    found: list[Range] = []
    for first, last in sorted(one for one in ranges if one[0] < one[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def _without(whole: Range, others: Iterable[Range]) -> Iterator[Range]:
    """Yield what is left of a range; `others` are in order."""
    first, last = whole
    for low, high in others:
        yield first, min(last, low)
        first = max(first, high)
    yield first, last
