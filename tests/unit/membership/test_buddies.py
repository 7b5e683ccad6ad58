"""A copy is placed so that the end of its owner does not reach it."""

import doctest

from raytrain_plus.membership import buddies as module
from raytrain_plus.membership.buddies import buddies


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
