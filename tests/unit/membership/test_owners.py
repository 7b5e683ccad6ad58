"""Sharded rows are held often enough, evenly, on different nodes; after a loss the others go on with theirs."""

from __future__ import annotations

import doctest
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership import owners as module
from raytrain_plus.membership.owners import balanced, kept, layers_of, segments, senders, shortage
from raytrain_plus.membership.pieces import Piece, Pieces, transfers, union

ROWS = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(0, 12), st.sampled_from((0, 1, 4, 400))), min_size=1
)
"""By tensor, its rows and the bytes of each."""
MEMBERS = st.integers(1, 6).map(lambda count: [f"w{number}" for number in range(count)])
HOLDERS = st.integers(1, 3)

Drawn = dict[str, tuple[int, int]]


def pieces_of(drawn: Drawn) -> Pieces:
    return Pieces.of(Piece(name, 0, count) for name, (count, _) in drawn.items())


def bytes_of(drawn: Drawn) -> dict[str, int]:
    return {name: size for name, (_, size) in drawn.items()}


def on_one_node(members: list[str]) -> dict[str, str]:
    return dict.fromkeys(members, "node")


def test_the_examples_hold() -> None:
    assert doctest.testmod(module).failed == 0


@given(ROWS, st.integers(1, 6))
def test_segments_are_all_rows_once_each_within_a_row_of_its_share(drawn: Drawn, count: int) -> None:
    rows, row_bytes = pieces_of(drawn), bytes_of(drawn)
    parts = segments(rows, row_bytes, count)
    total = rows.size(row_bytes)
    assert union(parts) == rows
    assert sum(part.size(row_bytes) for part in parts) == total
    largest = max((row_bytes[name] for name in rows.names), default=0)
    assert all(abs(part.size(row_bytes) - total / count) <= largest for part in parts)


@given(ROWS, MEMBERS, HOLDERS)
def test_each_row_has_as_many_owners_as_wanted(drawn: Drawn, members: list[str], holders: int) -> None:
    rows, row_bytes = pieces_of(drawn), bytes_of(drawn)
    owners = balanced(rows, row_bytes, members, holders, on_one_node(members), {})
    assert list(owners) == members
    wanted = min(holders, len(members))
    for name, first, last in rows:
        for row in range(first, last):
            assert sum(own.end(name, row) > row for own in owners.values()) == wanted
    assert not shortage(rows, owners, holders)


@given(ROWS, MEMBERS, HOLDERS, st.data())
def test_a_loss_moves_nothing_unless_nobody_is_left_to_hold_it(
    drawn: Drawn, members: list[str], holders: int, data: st.DataObject
) -> None:
    rows, row_bytes = pieces_of(drawn), bytes_of(drawn)
    before = balanced(rows, row_bytes, members, holders, on_one_node(members), {})
    lost = data.draw(st.sampled_from(members))
    left = [name for name in members if name != lost] or ["new"]
    after = kept(rows, row_bytes, left, before)
    assert union(after.values()) == rows
    held = {name: before.get(name, Pieces()) for name in left}
    moved = union(after[name] - held[name] for name in left)
    assert moved == rows - union(held.values())
    if holders > 1 and len(members) > 1:
        assert not moved
        wanted = min(holders, len(left))
        assert bool(shortage(rows, after, holders)) == (before[lost] != Pieces() and wanted == holders)


@given(ROWS, MEMBERS, HOLDERS)
def test_each_row_has_one_sender_who_holds_it(drawn: Drawn, members: list[str], holders: int) -> None:
    rows, row_bytes = pieces_of(drawn), bytes_of(drawn)
    owners = balanced(rows, row_bytes, members, holders, on_one_node(members), {})
    sent = senders(rows, row_bytes, owners)
    assert list(sent) == members
    assert union(sent.values()) == rows
    assert sum(one.size(row_bytes) for one in sent.values()) == rows.size(row_bytes)
    assert sum(last - first for one in sent.values() for _, first, last in one) == sum(n for n, _ in drawn.values())
    assert not any(sent[name] - owners[name] for name in members)


def test_members_send_equally_much() -> None:
    rows, row_bytes = pieces_of({"a": (999, 8), "b": (64, 512), "c": (7, 8)}), {"a": 8, "b": 512, "c": 8}
    members = ["w0", "w1", "w2", "w3"]
    owners = balanced(rows, row_bytes, members, 2, on_one_node(members), {})
    sent = [one.size(row_bytes) for one in senders(rows, row_bytes, owners).values()]
    assert max(sent) <= 1.1 * sum(sent) / len(sent)


def test_the_holders_of_a_row_are_on_different_nodes_if_possible() -> None:
    rows, row_bytes = pieces_of({"a": (120, 4)}), {"a": 4}
    members = ["w0", "w1", "w2", "w3"]
    nodes = {"w0": "x", "w1": "x", "w2": "y", "w3": "y"}
    owners = balanced(rows, row_bytes, members, 2, nodes, {})
    for row in range(120):
        assert {nodes[name] for name, own in owners.items() if own.end("a", row) > row} == {"x", "y"}


def test_a_change_of_members_moves_less_than_everything() -> None:
    rows, row_bytes = pieces_of({"a": (1200, 4)}), {"a": 4}
    before = balanced(rows, row_bytes, ["w0", "w1", "w2", "w3"], 2, on_one_node(["w0", "w1", "w2", "w3"]), {})
    five = ["w0", "w1", "w2", "w3", "new"]
    after = balanced(rows, row_bytes, five, 2, on_one_node(five), before)
    missing = {name: own - before.get(name, Pieces()) for name, own in after.items()}
    moves = transfers(missing, before, row_bytes)
    moved = sum(given.size(row_bytes) for taken in moves.values() for given in taken.values())
    assert moved == sum(one.size(row_bytes) for one in missing.values())
    assert moved < 0.7 * 2 * rows.size(row_bytes)
    # The same members again: nothing moves.
    assert balanced(rows, row_bytes, five, 2, on_one_node(five), after) == after


def test_a_row_that_nobody_holds_has_no_sender() -> None:
    rows = pieces_of({"a": (3, 4)})
    with pytest.raises(ValueError, match="nobody holds row 0 of a"):
        senders(rows, {"a": 4}, {"w0": Pieces()})


def test_owners_depend_on_nothing_but_their_arguments() -> None:
    rows, row_bytes = pieces_of({"a": (50, 4), "b": (30, 8)}), {"a": 4, "b": 8}
    members = [f"w{number}" for number in range(5)]
    first = balanced(rows, row_bytes, members, 2, on_one_node(members), {})
    shuffled = dict(random.Random(0).sample(list(row_bytes.items()), 2))
    assert balanced(rows, shuffled, members, 2, on_one_node(members), {}) == first


def test_the_shares_of_each_layer_are_equal_where_layers_are_gathered() -> None:
    rows = Pieces.of([Piece(f"{layer}.weight", 0, count) for layer, count in {"a": 8, "b": 80, "c": 12}.items()])
    members = ["w0", "w1", "w2", "w3"]
    owners = balanced(rows, dict.fromkeys(rows.names, 4), members, 1, dict.fromkeys(members, "n"), {}, by_layer=True)
    for layer in layers_of(rows).values():
        assert len({(owned & layer).size(dict.fromkeys(rows.names, 4)) for owned in owners.values()}) == 1
