"""A copy is placed so that the end of its owner does not reach it."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership import copy_holders as module
from raytrain_plus.membership.copy_holders import buddies


def test_the_examples() -> None:
    assert doctest.testmod(module).failed == 0


def test_copies_are_spread() -> None:
    nodes = dict.fromkeys("abcd", "x")
    assert buddies("abcd", [], nodes) == {"a": "b", "b": "c", "c": "d", "d": "a"}
    assert sorted(buddies("abcd", "st", {**nodes, "s": "y", "t": "z"}).values()) == ["s", "s", "t", "t"]


def test_a_keeper_stays_while_it_can() -> None:
    nodes = {"a": "x", "b": "x", "s": "x", "t": "y"}
    assert buddies("ab", "st", nodes, {"a": "s", "b": "t"}) == {"a": "s", "b": "t"}
    assert buddies("ab", "s", nodes, {"a": "s", "b": "t"}) == {"a": "s", "b": "a"}


@given(owners=st.integers(1, 6), spares=st.integers(0, 3), data=st.data())
def test_a_copy_lies_on_another_node_if_there_is_one(owners: int, spares: int, data: st.DataObject) -> None:
    members, others = [f"w{number}" for number in range(owners)], [f"s{number}" for number in range(spares)]
    nodes = {name: data.draw(st.sampled_from("xyz")) for name in (*members, *others)}
    found = buddies(members, others, nodes)
    for owner in members:
        elsewhere = any(node != nodes[owner] for node in nodes.values())
        if elsewhere:
            assert nodes[found[owner]] != nodes[owner]
        else:
            assert (owner in found) == (len(nodes) > 1)
            assert found.get(owner) != owner
