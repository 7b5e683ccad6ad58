"""Sets of pieces behave as sets of rows, and a layout is reached from any other by moving what is missing, once."""

from __future__ import annotations

import doctest
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_plus.state import pieces as module
from raytrain_plus.state.pieces import Piece, Pieces, transfers, union

NAMES = "abcd"
ROWS = 9
ROW_BYTES = {name: 1 + place for place, name in enumerate(NAMES)}

Rows = frozenset[tuple[str, int]]

PIECES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda one: Piece(*one)),
    max_size=8,
).map(Pieces.of)
LAYOUTS = st.dictionaries(st.sampled_from("stuvwxyz"), PIECES, max_size=6)
"""For each worker, its pieces."""


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
    assert rows(one | other) == rows(one) | rows(other)
    assert rows(one & other) == rows(one) & rows(other)
    assert rows(one - other) == rows(one) - rows(other)
    assert (one <= other) == (rows(one) <= rows(other))
    assert (one == other) == (rows(one) == rows(other))
    assert hash(one | other) == hash(other | one)
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


@given(LAYOUTS, LAYOUTS, st.booleans())
def test_a_layout_is_reached_by_moving_what_is_missing_once(
    held: dict[str, Pieces], wanted: dict[str, Pieces], covered: bool
) -> None:
    check_transfers(held, wanted, covered)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(LAYOUTS, LAYOUTS)
def test_ten_thousand_pairs_of_layouts(held: dict[str, Pieces], wanted: dict[str, Pieces]) -> None:
    check_transfers(held, wanted, covered=True)


def test_holders_of_the_same_share_the_work() -> None:
    whole = Pieces.of(Piece(name) for name in NAMES)
    moves = transfers({"x": whole, "y": whole}, {"s": whole, "t": whole}, dict.fromkeys(NAMES, 5))
    sent = Counter(dict.fromkeys("st", 0))
    for taken in moves.values():
        for giver, pieces in taken.items():
            sent[giver] += pieces.size(dict.fromkeys(NAMES, 5))
    assert sent == {"s": 20, "t": 20}
