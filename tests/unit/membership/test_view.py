"""The shards and seats of a view, and the number of workers to form."""

import doctest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership import sizes
from raytrain_plus.membership.mesh import Seat, Shape
from raytrain_plus.membership.sizes import room_for, useful_size
from raytrain_plus.membership.view import form_view, host_shards


@pytest.mark.parametrize(
    ("shards", "replicas", "expected"),
    [(8, 3, ((0, 1, 2), (3, 4, 5), (6, 7))), (4, 4, ((0,), (1,), (2,), (3,))), (2, 1, ((0, 1),))],
)
def test_host_shards(shards: int, replicas: int, expected: tuple[tuple[int, ...], ...]) -> None:
    assert host_shards(shards, replicas) == expected


@given(st.integers(1, 64), st.data())
def test_every_shard_is_hosted_once_and_evenly(shards: int, data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, shards))
    hosted = host_shards(shards, replicas)
    assert [shard for replica in hosted for shard in replica] == list(range(shards))
    sizes = [len(replica) for replica in hosted]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("shape", "members"),
    [
        (Shape(2), [("b", Seat(0), (0, 1)), ("a", Seat(1), (2,))]),
        (Shape(1, 2), [("b", Seat(0), (0, 1, 2)), ("a", Seat(0, 1), (0, 1, 2))]),
        (Shape(1, 1, 2), [("b", Seat(0), (0, 1, 2)), ("a", Seat(0, 0, 1), (0, 1, 2))]),
    ],
)
def test_form_view_seats_the_workers_in_their_order(shape: Shape, members: list[tuple[str, Seat, Any]]) -> None:
    view = form_view(3, ["b", "a"], shape, 3)
    assert [(m.worker, m.place, m.shards) for m in view.members] == members


@pytest.mark.parametrize(
    ("available", "minimum", "maximum", "shards", "expected"),
    [
        (8, 1, 8, 12, 6),  # 12 on 8 is 2 each at most, and so it is on 6
        (7, 1, 8, 12, 6),
        (5, 1, 8, 12, 4),
        (5, 5, 8, 12, 5),  # the minimum is formed, gain or not
        (3, 4, 8, 12, 0),
        (64, 1, 64, 12, 12),
        (4, 2, 2, 8, 2),
    ],
)
def test_useful_size(available: int, minimum: int, maximum: int, shards: int, expected: int) -> None:
    assert useful_size(available, minimum, maximum, shards) == expected


def test_the_examples_of_how_many_are_formed() -> None:
    assert doctest.testmod(sizes).failed == 0


def test_no_worker_spans_two_nodes() -> None:
    nodes = [{"CPU": 3.0}, {"CPU": 3.0, "GPU": 1.0}]
    assert room_for(nodes, {"CPU": 2.0, "GPU": 0.0}) == 2
    assert room_for(nodes, {"CPU": 1.0, "GPU": 1.0}) == 1
    assert room_for(nodes, {"CPU": 0.1}) == 60
    assert room_for(nodes, {"CPU": 0.0, "GPU": 0.0}) >= 1_000_000
    assert room_for([], {"CPU": 0.0}) == 0
