"""Seats, rings and replicas: which workers keep their places, and which fill empty ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership.mesh import Axis, Shape, seated

SHAPES = st.builds(Shape, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
AXES: tuple[Axis, ...] = ("replica", "stage", "tensor_rank")


@given(SHAPES)
def test_a_seat_is_the_number_of_a_place(shape: Shape) -> None:
    places = shape.places()
    assert len(set(places)) == len(places) == shape.size
    assert [shape.place(seat) for seat in range(shape.size)] == places
    assert places == sorted(places)


@given(SHAPES, st.lists(st.sampled_from(AXES), min_size=1, unique=True))
def test_a_line_holds_every_place_along_its_axes_and_each_seat_is_in_one(shape: Shape, axes: list[Axis]) -> None:
    lines = shape.lines(*axes)
    assert sorted(seat for line in lines for seat in line) == list(range(shape.size))
    sizes = dict(zip(AXES, shape.sizes, strict=True))
    for line in lines:
        places = [shape.place(seat) for seat in line]
        assert places == sorted(places)
        assert len(line) == math.prod(sizes[axis] for axis in axes)
        assert len({place._replace(**dict.fromkeys(axes, 0)) for place in places}) == 1


@given(SHAPES)
def test_each_ring_and_each_replica_share_one_seat(shape: Shape) -> None:
    for ring in shape.lines("replica"):
        for replica in shape.lines("stage", "tensor_rank"):
            assert len(set(ring) & set(replica)) == 1


def test_a_ring_spans_the_replicas_at_one_stage_and_tensor_rank() -> None:
    assert Shape(2, 2, 2).lines("replica") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert Shape(2, 2, 2).lines("stage", "tensor_rank") == [(0, 1, 2, 3), (4, 5, 6, 7)]


@given(
    replicas=st.integers(1, 4),
    stages=st.integers(1, 4),
    tensor_ranks=st.integers(1, 2),
    gone=st.sets(st.integers(0, 15)),
    fresh=st.integers(0, 5),
    data=st.data(),
)
def test_no_worker_changes_its_ring_without_need(
    replicas: int, stages: int, tensor_ranks: int, gone: set[int], fresh: int, data: st.DataObject
) -> None:
    old = Shape(replicas, stages, tensor_ranks)
    before = tuple(f"w{number}" for number in range(old.size))
    available = [worker for number, worker in enumerate(before) if number not in gone]
    available += [f"x{number}" for number in range(fresh)]
    most = len(available) // (stages * tensor_ranks)
    if not most:
        return
    new = Shape(data.draw(st.integers(1, most)), stages, tensor_ranks)
    after = seated(before, old, available, new)
    assert len(after) == len(set(after)) == new.size
    assert set(after) <= set(available)
    ring_before = {worker: old.place(number)[1:] for number, worker in enumerate(before)}
    ring_after = {worker: new.place(number)[1:] for number, worker in enumerate(after)}
    for ring in set(ring_before.values()):
        here = [worker for worker in after if ring_after[worker] == ring]
        had = [worker for worker in available if ring_before.get(worker) == ring]
        # As many as possible of those who hold its state.
        assert sum(ring_before.get(worker) == ring for worker in here) == min(len(had), new.replicas)
    moved = [w for w in after if w in ring_before and ring_before[w] != ring_after[w]]
    unused = [w for w in available if w.startswith("x") and w not in after]
    assert not (moved and unused)


@pytest.mark.parametrize(
    ("before", "available", "size", "after"),
    [
        (("a", "b", "c"), ("d", "c", "a"), 3, ("a", "d", "c")),
        (("a", "b", "c"), ("a", "c"), 2, ("a", "c")),
        (("a",), ("b", "a", "c"), 2, ("a", "b")),
    ],
)
def test_with_one_stage_a_member_keeps_its_seat(
    before: tuple[str, ...], available: tuple[str, ...], size: int, after: tuple[str, ...]
) -> None:
    assert seated(before, Shape(len(before)), available, Shape(size)) == after


def test_a_complete_replica_stays_complete() -> None:
    sat = ("a0", "a1", "b0", "b1", "c0", "c1")
    able = ("a0", "b0", "b1", "c1")
    assert seated(sat, Shape(3, 2), able, Shape(2, 2)) == ("a0", "c1", "b0", "b1")


@pytest.mark.parametrize(
    ("new", "after"),
    [
        (Shape(1, 2), ("a0", "a1")),
        (Shape(2, 1), ("a0", "a1")),
        (Shape(1, 1), ("a0",)),
        (Shape(1, 1, 2), ("a0", "a1")),
    ],
)
def test_a_repartition_keeps_the_front_in_front(new: Shape, after: tuple[str, ...]) -> None:
    sat = ("a0", "a1", "a2", "a3")
    assert seated(sat, Shape(1, 4), ("a0", "a1"), new) == after


def test_fewer_tensor_ranks_make_more_replicas_of_the_same_workers() -> None:
    assert seated(("a0", "a1"), Shape(1, 1, 2), ("a0", "a1"), Shape(2)) == ("a0", "a1")
    sat = ("a00", "a01", "a10", "a11")
    assert seated(sat, Shape(1, 2, 2), sat, Shape(2, 2)) == ("a00", "a10", "a01", "a11")


def test_the_holder_of_a_stage_sits_there() -> None:
    # Left over from a replica that was left out, in whatever order.
    assert seated((), Shape(1), ("x1", "x0"), Shape(1, 2), {"x0": 0, "x1": 1}) == ("x0", "x1")
    assert seated(("a0", "a1"), Shape(1, 2), ("a0", "y", "x1"), Shape(1, 2), {"a0": 0, "x1": 1}) == ("a0", "y")
    assert seated((), Shape(1), ("x1", "y", "x0"), Shape(1, 3), {"x0": 0, "x1": 1}) == ("x0", "x1", "y")


@given(replicas=st.integers(1, 3), stages=st.integers(1, 3), data=st.data())
def test_no_worker_is_moved_from_the_stage_that_it_holds(replicas: int, stages: int, data: st.DataObject) -> None:
    shape = Shape(replicas, stages)
    workers = [f"w{number}" for number in range(shape.size)]
    holding = {worker: data.draw(st.integers(0, stages - 1)) for worker in workers if data.draw(st.booleans())}
    plain = seated((), Shape(1), workers, shape)
    after = seated((), Shape(1), workers, shape, holding)
    assert sorted(after) == sorted(plain)

    def at_home(seats: tuple[str, ...]) -> set[str]:
        return {worker for seat, worker in enumerate(seats) if holding.get(worker) == shape.place(seat).stage}

    assert at_home(plain) <= at_home(after)
    for stage in range(stages):
        of_stage = [worker for worker, held in holding.items() if held == stage]
        assert len(at_home(after) & set(of_stage)) == min(len(of_stage), replicas)


def test_a_hole_is_filled_from_the_same_tensor_rank() -> None:
    # Replica, stage and tensor rank of each; b continues with the workers of a that sat at its holes.
    before = ("a00", "a01", "a10", "a11", "b00", "b01", "b10", "b11")
    able = ("a01", "a10", "b00", "b10", "b11")
    assert seated(before, Shape(2, 2, 2), able, Shape(1, 2, 2)) == ("b00", "a01", "b10", "b11")
