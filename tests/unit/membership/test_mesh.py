"""Seats, rings and replicas: which workers keep their places, and which fill empty ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership.mesh import Shape, seated, useful_shape
from raytrain_plus.membership.sizes import useful_size


@given(replicas=st.integers(1, 6), stages=st.integers(1, 6))
def test_rings_and_replicas_cross_in_one_seat_each(replicas: int, stages: int) -> None:
    shape = Shape(replicas, stages)
    assert sorted(seat for stage in range(stages) for seat in shape.ring(stage)) == list(range(shape.size))
    assert sorted(seat for replica in range(replicas) for seat in shape.replica(replica)) == list(range(shape.size))
    for replica in range(replicas):
        for stage in range(stages):
            [shared] = set(shape.ring(stage)) & set(shape.replica(replica))
            assert shape.place(shared) == (replica, stage)


@given(available=st.integers(0, 12), minimum=st.integers(1, 6), more=st.integers(0, 8), shards=st.integers(1, 16))
def test_with_one_stage_a_shape_has_the_useful_size(available: int, minimum: int, more: int, shards: int) -> None:
    if minimum > shards:
        return
    shape = useful_shape(available, minimum, minimum + more, shards, (1,))
    assert (shape.size if shape else 0) == useful_size(available, minimum, minimum + more, shards)


@given(
    available=st.integers(1, 24),
    minimum=st.integers(1, 4),
    maximum=st.integers(4, 24),
    shards=st.integers(1, 16),
    wished=st.sampled_from([(1,), (2, 1), (4, 2, 1), (3, 2), (4,)]),
)
def test_a_shape_fits_and_leaves_the_requested_partition_only_without_a_replica_of_it(
    available: int, minimum: int, maximum: int, shards: int, wished: tuple[int, ...]
) -> None:
    shape = useful_shape(available, minimum, maximum, shards, wished)
    able = [stages for stages in wished if stages <= min(available, maximum)]
    if available < minimum or not able:
        assert shape is None
        return
    assert shape is not None
    assert shape.stages == able[0]
    assert shape.size <= min(available, maximum)
    assert shape.replicas <= shards


@given(
    replicas=st.integers(1, 4),
    stages=st.integers(1, 4),
    gone=st.sets(st.integers(0, 15)),
    fresh=st.integers(0, 5),
    data=st.data(),
)
def test_no_worker_changes_its_stage_without_need(
    replicas: int, stages: int, gone: set[int], fresh: int, data: st.DataObject
) -> None:
    old = Shape(replicas, stages)
    before = tuple(f"w{number}" for number in range(old.size))
    available = [worker for number, worker in enumerate(before) if number not in gone]
    available += [f"x{number}" for number in range(fresh)]
    most = len(available) // stages
    if not most:
        return
    new = Shape(data.draw(st.integers(1, most)), stages)
    after = seated(before, old, available, new)
    assert len(after) == len(set(after)) == new.size
    assert set(after) <= set(available)
    stage_before = {worker: old.place(number)[1] for number, worker in enumerate(before)}
    stage_after = {worker: new.place(number)[1] for number, worker in enumerate(after)}
    for stage in range(stages):
        here = [worker for worker in after if stage_after[worker] == stage]
        had = [worker for worker in available if stage_before.get(worker) == stage]
        # As many as possible of those who hold its state.
        assert sum(stage_before.get(worker) == stage for worker in here) == min(len(had), new.replicas)
    moved = [w for w in after if w in stage_before and stage_before[w] != stage_after[w]]
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
    [(Shape(1, 2), ("a0", "a1")), (Shape(2, 1), ("a0", "a1")), (Shape(1, 1), ("a0",))],
)
def test_a_repartition_keeps_the_front_in_front(new: Shape, after: tuple[str, ...]) -> None:
    sat = ("a0", "a1", "a2", "a3")
    assert seated(sat, Shape(1, 4), ("a0", "a1"), new) == after


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
        return {worker for seat, worker in enumerate(seats) if holding.get(worker) == shape.place(seat)[1]}

    assert at_home(plain) <= at_home(after)
    for stage in range(stages):
        of_stage = [worker for worker, held in holding.items() if held == stage]
        assert len(at_home(after) & set(of_stage)) == min(len(of_stage), replicas)
