"""Decide which members of a ring hold which rows of a sharded state, and who sends them to the others. Pure.

The rows of all sharded tensors, in order, are cut into as many segments of equal size as there are members. Where each
layer is gathered by itself, the rows of each layer are, so that all members send equally much of it. With h holders,
member i holds the segments i to i + h - 1, cyclically: each segment is then held h times. After a loss the others go on
with what they hold, so that nothing moves while the training stands still; `shortage` is what is then held too seldom.
ZeRO stage 1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020) is
the case of one holder.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from raytrain_plus.membership.pieces import Piece, Pieces, assign, union

Owners = Mapping[str, Pieces]
"""The rows that each member holds, in the order of members."""


def segments(rows: Pieces, row_bytes: Mapping[str, int], count: int) -> list[Pieces]:
    """Cut rows into `count` parts, each within one row of an equal share of the bytes.

    >>> [list(part) for part in segments(Pieces.of([Piece("a", 0, 3), Piece("b")]), {"a": 4, "b": 4}, 2)]
    [[Piece(name='a', first=0, last=2)], [Piece(name='a', first=2, last=3), Piece(name='b', first=0, last=1)]]
    """
    total, passed = rows.size(row_bytes), 0
    parts: list[list[Piece]] = [[] for _ in range(count)]
    for name, first, last in rows:
        size = row_bytes[name]
        # A row lies in the part that has its middle.
        cuts = [
            first,
            *(
                first + _ceil(2 * (part * total - count * passed) - count * size, 2 * count * size)
                for part in range(1, count)
            ),
            last,
        ]
        for part, (low, high) in enumerate(pairwise(min(max(cut, first), last) for cut in cuts)):
            parts[part].append(Piece(name, low, high))
        passed += (last - first) * size
    return [Pieces.of(part) for part in parts]


def _ceil(number: int, by: int) -> int:
    """Return the quotient, rounded up; 0 if it is not defined."""
    return -(-number // by) if by else 0


def balanced(
    rows: Pieces,
    row_bytes: Mapping[str, int],
    members: Sequence[str],
    holders: int,
    nodes: Mapping[str, str],
    held: Mapping[str, Pieces],
    *,
    by_layer: bool = False,
) -> Owners:
    """Return owners of all rows with equal shares, each row with `holders` of them on different nodes if possible.

    With fewer members than `holders`, all hold everything. `nodes`: the node of each member. `held`: what some of them
    hold already; of equal choices, the one that moves the fewest bytes is made. `by_layer`: the shares of each layer
    are equal, too.
    """
    if holders >= len(members):
        return dict.fromkeys(members, rows)
    cut = [segments(one, row_bytes, len(members)) for one in (layers_of(rows).values() if by_layer else [rows])]
    parts = [union(of_layer) for of_layer in zip(*cut, strict=True)]
    shares = [union(parts[(i + k) % len(parts)] for k in range(holders)) for i in range(len(parts))]
    left, order = list(members), list[str]()
    for share in shares:
        before = nodes[order[-1]] if order else None
        crowd = Counter(nodes[name] for name in left)
        merits = {
            name: (nodes[name] != before, crowd[nodes[name]], (share & held.get(name, Pieces())).size(row_bytes))
            for name in left
        }
        order.append(max(left, key=merits.__getitem__))
        left.remove(order[-1])
    share_of = dict(zip(order, shares, strict=True))
    return {name: share_of[name] for name in members}


def layers_of(rows: Pieces) -> dict[str, Pieces]:
    """Return the rows of each layer's weights, whose names begin with it.

    >>> found = layers_of(Pieces.of([Piece("a.w"), Piece("b.w"), Piece("a.v")]))
    >>> {layer: one.names for layer, one in found.items()}
    {'a': ('a.v', 'a.w'), 'b': ('b.w',)}
    """
    found: dict[str, list[Piece]] = {}
    for piece in rows:
        found.setdefault(piece.name.partition(".")[0], []).append(piece)
    return {layer: Pieces.of(pieces) for layer, pieces in found.items()}


def kept(rows: Pieces, row_bytes: Mapping[str, int], members: Sequence[str], held: Mapping[str, Pieces]) -> Owners:
    """Return owners of all rows that go on with what they hold; what no member holds is divided among them."""
    own = {name: held.get(name, Pieces()) & rows for name in members}
    orphaned = rows - union(own.values())
    loads = {name: own[name].size(row_bytes) for name in members}
    most = max(1, orphaned.size(row_bytes) // len(members))
    given = assign(orphaned, dict.fromkeys(members, orphaned), row_bytes, most=most, before=loads)
    return {name: union([own[name], given.get(name, Pieces())]) for name in members}


def shortage(rows: Pieces, owners: Owners, holders: int) -> Pieces:
    """Return the rows with fewer than `holders` owners, or fewer than all members if these are not as many."""
    wanted, lacking = min(holders, len(owners)), Pieces()
    for name, first, last in _intervals(rows, owners):
        piece = Pieces.of([Piece(name, first, last)])
        if sum(bool(piece & own) for own in owners.values()) < wanted:
            lacking = union([lacking, piece])
    return lacking


def senders(rows: Pieces, row_bytes: Mapping[str, int], owners: Owners) -> Owners:
    """Return which of its rows each owner sends to the others after a step: each row has one sender.

    Members get about equally much, as far as they hold it; all members come to the same result.
    """
    found: dict[str, list[Piece]] = {name: [] for name in owners}
    loads = dict.fromkeys(owners, 0)
    pieces = _intervals(rows, owners)
    for piece in sorted(pieces, key=lambda one: (-(one.last - one.first) * row_bytes[one.name], one)):
        able = [name for name, own in owners.items() if own.end(piece.name, piece.first) > piece.first]
        if not able:
            raise ValueError(f"nobody holds row {piece.first} of {piece.name}")
        name = min(able, key=lambda one: loads[one])
        found[name].append(piece)
        loads[name] += (piece.last - piece.first) * row_bytes[piece.name]
    return {name: Pieces.of(given) for name, given in found.items()}


def _intervals(rows: Pieces, owners: Owners) -> list[Piece]:
    """Return the rows in pieces that each owner holds wholly or not at all."""
    ends: dict[str, set[int]] = {}
    for own in owners.values():
        for name, first, last in own:
            ends.setdefault(name, set()).update((first, last))
    found = []
    for name, first, last in rows:
        cuts = sorted(ends.get(name, ()))
        inside = cuts[bisect_left(cuts, first + 1) : bisect_left(cuts, last)]
        found += [Piece(name, *pair) for pair in pairwise([first, *inside, last])]
    return found
