"""Replicas lie on one node each where that is possible, and no state moves for it."""

from __future__ import annotations

import doctest
from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership import events as e
from raytrain_plus.membership import placement
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.membership.mesh import Shape, remaining, seated
from raytrain_plus.membership.placement import placed
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.state_machine import begin, step

LAYOUTS = st.tuples(st.integers(1, 3), st.integers(1, 2))


def test_the_examples() -> None:
    assert doctest.testmod(placement).failed == 0


def drawn_nodes(data: st.DataObject, workers: list[str], most: int = 4) -> dict[str, str]:
    return {worker: f"n{data.draw(st.integers(0, most - 1))}" for worker in workers}


def replicas_on(seats: tuple[str, ...], shape: Shape, nodes: dict[str, str]) -> list[set[str]]:
    return [{nodes[seats[seat]] for seat in replica} for replica in shape.lines("stage", "tensor_rank")]


@given(layout=LAYOUTS, count=st.integers(1, 14), data=st.data())
def test_a_first_group_splits_no_replica_and_no_stage_that_fits_on_a_node(
    layout: tuple[int, int], count: int, data: st.DataObject
) -> None:
    each = layout[0] * layout[1]
    workers = [f"w{number}" for number in range(max(count, each))]
    nodes = drawn_nodes(data, workers)
    shape = Shape(data.draw(st.integers(1, len(workers) // each)), *layout)
    seats = placed((), Shape(1), workers, shape, {}, nodes)
    assert len(seats) == len(set(seats)) == shape.size
    assert set(seats) <= set(workers)
    on = Counter(nodes.values())
    for size, lines in ((each, shape.lines("stage", "tensor_rank")), (layout[1], shape.lines("tensor_rank"))):
        fit = min(len(lines), sum(workers_there // size for workers_there in on.values()))
        assert sum(len({nodes[seats[seat]] for seat in line}) == 1 for line in lines) == fit


@given(layout=LAYOUTS, on_each=st.integers(1, 4), nodes=st.integers(2, 4), data=st.data())
def test_replicas_are_spread_over_nodes_and_those_of_a_node_follow_each_other(
    layout: tuple[int, int], on_each: int, nodes: int, data: st.DataObject
) -> None:
    each = layout[0] * layout[1]
    node_of = {f"w{number}": f"n{number % nodes}" for number in range(on_each * nodes * each)}
    shape = Shape(data.draw(st.integers(1, on_each * nodes)), *layout)
    seats = placed((), Shape(1), data.draw(st.permutations(sorted(node_of))), shape, {}, node_of)
    found = [min(there) for there in replicas_on(seats, shape, node_of)]
    counts = Counter(found)
    assert max(counts.values()) - min(counts[f"n{node}"] for node in range(nodes)) <= 1
    assert sum(one != after for one, after in pairwise(found)) == len(counts) - 1


@given(old_layout=LAYOUTS, new_layout=LAYOUTS, replicas=st.integers(1, 3), fresh=st.integers(0, 6), data=st.data())
def test_no_state_moves_and_no_member_leaves_a_replica_that_continues(
    old_layout: tuple[int, int], new_layout: tuple[int, int], replicas: int, fresh: int, data: st.DataObject
) -> None:
    old = Shape(replicas, *old_layout)
    before = tuple(f"w{number}" for number in range(old.size))
    available = [name for name in before if data.draw(st.booleans())] + [f"x{number}" for number in range(fresh)]
    layout = data.draw(st.sampled_from([old_layout, new_layout]))
    most = len(available) // (layout[0] * layout[1])
    if not most:
        return
    new = Shape(data.draw(st.integers(1, most)), *layout)
    positions = st.one_of(st.none(), st.integers(0, layout[0] * layout[1] - 1))
    holding = {name: held for name in available if (held := data.draw(positions)) is not None}
    nodes = drawn_nodes(data, available)
    plain = seated(before, old, available, new, holding)
    seats = placed(before, old, available, new, holding, nodes)
    assert len(seats) == len(set(seats)) == new.size
    assert set(seats) <= set(available)

    def known(seats: tuple[str, ...]) -> dict[str, int]:
        return {name: new.stage(seat).index for seat, name in enumerate(seats) if name in before or name in holding}

    assert known(seats) == known(plain)
    for seat, name in enumerate(remaining(before, old, available, new)):
        assert name != plain[seat] or name == seats[seat]
    # Names of nodes mean nothing.
    others = {name: {"n0": "b", "n1": "a", "n2": "d", "n3": "c"}[node] for name, node in nodes.items()}
    assert placed(before, old, available, new, holding, others) == seats
    assert placed(before, old, available, new, holding, dict.fromkeys(available, "n")) == plain


@given(layout=LAYOUTS, replicas=st.integers(1, 4), spares=st.integers(0, 3), data=st.data())
def test_whole_replicas_stay_where_they_are(
    layout: tuple[int, int], replicas: int, spares: int, data: st.DataObject
) -> None:
    shape = Shape(replicas, *layout)
    workers = [f"w{number}" for number in range(shape.size)]
    available = data.draw(st.permutations([*workers, *(f"x{number}" for number in range(spares))]))
    nodes = drawn_nodes(data, available)
    seats = tuple(workers)
    holding = {name: shape.stage(seat).index for seat, name in enumerate(seats)} if data.draw(st.booleans()) else {}
    assert placed(seats, shape, available, shape, holding, nodes) == seats
    # A lost worker changes no other replica than its own.
    lost = data.draw(st.sampled_from(workers))
    rest = [name for name in available if name != lost]
    if spares:
        after = placed(seats, shape, rest, shape, {name: at for name, at in holding.items() if name != lost}, nodes)
        assert [one == was for one, was in zip(after, seats, strict=True)].count(False) == 1
        replica = shape.place(workers.index(lost)).replica
        near = {nodes[name] for name in workers if name != lost and shape.place(workers.index(name)).replica == replica}
        came = next(name for name in after if name not in workers)
        if len(near) == 1 and any(nodes[name] in near for name in rest if name not in workers):
            assert nodes[came] in near


def test_a_hole_is_filled_from_the_node_of_its_replica() -> None:
    nodes = {"a0": "x", "a1": "x", "b0": "y", "b1": "y", "s": "y", "t": "x"}
    before = ("a0", "a1", "b0", "b1")
    able = ("a0", "b0", "b1", "s", "t")
    assert placed(before, Shape(2, 2), able, Shape(2, 2), {}, nodes) == ("a0", "t", "b0", "b1")


def test_workers_that_share_the_slices_of_a_stage_come_before_a_whole_replica() -> None:
    # No node has four workers; each stage still lies on one.
    nodes = {"a": "x", "b": "y", "c": "z", "d": "x", "e": "y", "f": "z"}
    assert placed((), Shape(1), "abcdef", Shape(1, 2, 2), {}, nodes) == ("a", "d", "b", "e")


def test_a_worker_that_has_read_a_stage_takes_it_in_a_replica_on_its_node() -> None:
    nodes = {"r0": "x", "r1": "y", "p": "y", "q": "x"}
    seats = placed((), Shape(1), ("r0", "r1", "p", "q"), Shape(2, 2), {"r0": 0, "r1": 1}, nodes)
    assert seats == ("r0", "q", "p", "r1")


def test_the_first_group_and_its_growth_have_each_replica_on_one_node() -> None:
    nodes = {f"worker-{number}": f"n{number % 2}" for number in range(8)}
    sizes = SizeTable(2, 8, 8, (2,))
    group, commands = begin(Limits(sizes=sizes, spares=0, steps=100, max_failures=None, expected=4))
    # The others wait for room.
    first = list(nodes)[:4]
    events: list[e.Event] = [e.Up(name, node=nodes[name]) for name in first]
    for event in (*events, *(e.Ready(name, -1) for name in first)):
        group, commands = step(group, event)
    assert group.seats == ("worker-0", "worker-2", "worker-1", "worker-3")
    assert group.shape == Shape(2, 2)
    for name in first:
        group, commands = step(group, e.Joined(name, 0))
    later = list(nodes)[4:]
    for name in later:
        group, commands = step(group, e.Up(name, node=nodes[name]))
    for event in (e.Ready(name, holds) for holds in (-1, None) for name in later):
        group, _ = step(group, event)
    for seat, name in enumerate(group.seats):
        group, commands = step(group, e.Left(name, 0, 5, "paused", stage=group.shape.stage(seat)))
    [join] = [command for command in commands if isinstance(command, e.Join)]
    assert [member.worker for member in join.view.members[:4]] == ["worker-0", "worker-2", "worker-1", "worker-3"]
    assert [nodes[member.worker] for member in join.view.members[4:]] == ["n0", "n0", "n1", "n1"]
