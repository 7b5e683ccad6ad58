"""Sets of pieces behave as sets of rows, and a layout is reached from any other by moving what is missing, once."""

from __future__ import annotations

import doctest
from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_plus.membership import pieces as module
from raytrain_plus.membership.pieces import Piece, Pieces, assign, split, transfers, union

NAMES = "abcd"
ROWS = 9
ROW_BYTES = {name: place for place, name in enumerate(NAMES)}
"""Rows of the first have no bytes, as what belongs to no layer."""

Rows = frozenset[tuple[str, int]]

PIECES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda one: Piece(*one)),
    max_size=8,
).map(Pieces.of)
LAYOUTS = st.dictionaries(st.sampled_from("stuvwxyz"), PIECES, max_size=6)
"""For each worker, its pieces."""
ALIKE = st.tuples(PIECES, st.integers(2, 4)).map(lambda drawn: dict.fromkeys("stuv"[: drawn[1]], drawn[0]))
"""Workers with the same pieces."""
MOST = st.integers(1, 6)
"""Maximum bytes of a piece."""


def rows(pieces: Pieces) -> Rows:
    return frozenset((name, row) for name, first, last in pieces for row in range(first, last))


def test_the_examples_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_touching_and_empty_pieces_are_joined() -> None:
    pieces = Pieces.of([Piece("b"), Piece("a", 2, 4), Piece("a", 0, 2), Piece("a", 3, 3), Piece("c", 5, 1)])
    assert list(pieces) == [Piece("a", 0, 4), Piece("b", 0, 1)]
    assert pieces.names == ("a", "b")
    assert pieces.size({"a": 10, "b": 1}) == 41
    assert (pieces.end("a", 1), pieces.end("a", 4), pieces.end("z", 1)) == (4, 4, 1)
    assert not Pieces.of([Piece("a", 3, 3)])


@given(PIECES, PIECES)
def test_operations_are_those_of_sets_of_rows(one: Pieces, other: Pieces) -> None:
    assert rows(union([one, other])) == rows(one) | rows(other)
    assert rows(one & other) == rows(one) & rows(other)
    assert rows(one - other) == rows(one) - rows(other)
    assert (one == other) == (rows(one) == rows(other))
    assert union([one, other]) == union([other, one])
    assert one.size(ROW_BYTES) == sum(ROW_BYTES[name] for name, _ in rows(one))


def check_transfers(held: dict[str, Pieces], wanted: dict[str, Pieces], covered: bool) -> None:
    """Check every promise of `transfers` between two layouts, row by row; `covered`: what is wanted exists."""
    there = union(held.values())
    if covered:
        wanted = {taker: wants & there for taker, wants in wanted.items()}
    missing = {taker: wants - held.get(taker, Pieces()) for taker, wants in wanted.items()}
    if not rows(union(missing.values())) <= rows(there):
        with pytest.raises(ValueError, match="nobody holds row"):
            transfers(missing, held, ROW_BYTES)
        return
    moves = transfers(missing, held, ROW_BYTES)
    assert moves.keys() == {taker for taker, pieces in missing.items() if pieces}
    for taker, taken in moves.items():
        assert taker not in taken
        assert all(pieces and rows(pieces) <= rows(held[giver]) for giver, pieces in taken.items())
        # Every missing row from exactly one giver, and no other row.
        moved = Counter(row for pieces in taken.values() for row in rows(pieces))
        assert moved == Counter(rows(wanted[taker]) - rows(held.get(taker, Pieces())))


def check_assignment(wanted: Pieces, held: dict[str, Pieces], most: int | None) -> None:
    """Check every promise of `assign`, row by row."""
    given = assign(wanted, held, ROW_BYTES, most=most)
    assert all(pieces and rows(pieces) <= rows(held[holder]) for holder, pieces in given.items())
    # Every row from exactly one holder, and no other row.
    assert Counter(row for pieces in given.values() for row in rows(pieces)) == Counter(rows(wanted))
    pieces = wanted if most is None else split(wanted, ROW_BYTES, most)
    largest = max((Pieces.of([piece]).size(ROW_BYTES) for piece in pieces), default=0)
    loads = {holder: given.get(holder, Pieces()).size(ROW_BYTES) for holder in held}
    for holder, other in product(given, held):
        # Another that has all of it gives as much, within one piece.
        assert given[holder] - held[other] or loads[holder] <= loads[other] + largest
    # However the same sets were made, the result is the same.
    remade = {holder: Pieces.of(reversed(list(pieces))) for holder, pieces in held.items()}
    assert assign(union([wanted, wanted]), remade, ROW_BYTES, most=most) == given


@given(LAYOUTS | ALIKE, st.none() | MOST)
def test_every_row_is_given_by_one_holder_and_all_give_equally_much(held: dict[str, Pieces], most: int | None) -> None:
    check_assignment(union(held.values()), held, most)


@given(PIECES, MOST)
def test_pieces_are_split_at_a_number_of_bytes(pieces: Pieces, most: int) -> None:
    found = list(split(pieces, ROW_BYTES, most))
    assert Pieces.of(found) == pieces
    assert Counter(row for piece in found for row in rows(Pieces.of([piece]))) == Counter(rows(pieces))
    assert all(last - first == 1 or (last - first) * ROW_BYTES[name] <= most for name, first, last in found)


@given(LAYOUTS, LAYOUTS, st.booleans())
def test_a_layout_is_reached_by_moving_what_is_missing_once(
    held: dict[str, Pieces], wanted: dict[str, Pieces], covered: bool
) -> None:
    check_transfers(held, wanted, covered)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None)
@given(LAYOUTS | ALIKE, LAYOUTS, st.none() | MOST)
def test_ten_thousand_pairs_of_layouts(held: dict[str, Pieces], wanted: dict[str, Pieces], most: int | None) -> None:
    check_transfers(held, wanted, covered=True)
    check_assignment(union(wanted.values()) & union(held.values()), held, most)


def test_holders_of_the_same_share_the_work_for_all_takers() -> None:
    sizes = dict.fromkeys(NAMES[:3], 5)
    whole = Pieces.of(Piece(name) for name in sizes)
    moves = transfers({"x": whole, "y": whole}, {"s": whole, "t": whole}, sizes)
    sent = Counter(dict.fromkeys("st", 0))
    for taken in moves.values():
        for giver, pieces in taken.items():
            sent[giver] += pieces.size(sizes)
    assert sent == {"s": 15, "t": 15}
