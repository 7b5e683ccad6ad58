"""A group whose members hold some rows each goes on with them after a loss, and restores the rest at a boundary."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from raytrain_plus.membership import events as e
from raytrain_plus.membership.adoption import Survivor, adopt
from raytrain_plus.membership.group_state import Limits, Phase
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.owners import segments, shortage
from raytrain_plus.membership.pieces import Piece, Pieces, union
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.state_machine import begin, step

ROWS, ROW_BYTES = Pieces.of([Piece("w", 0, 120)]), {"w": 4}
WHOLE = Stage()
FRONT, BACK = Stage(0, 2), Stage(1, 2)
OF_FRONT, OF_BACK = Pieces.of([Piece("front.w", 0, 120)]), Pieces.of([Piece("back.w", 0, 60)])
BOTH_BYTES = {"front.w": 4, "back.w": 4}
IN_TWO_STAGES = e.Fitted(
    (2,),
    {
        FRONT: union([Pieces.of([Piece("front")]), OF_FRONT]),
        BACK: union([Pieces.of([Piece("back")]), OF_BACK]),
        WHOLE: union([Pieces.of([Piece("front"), Piece("back")]), OF_FRONT, OF_BACK]),
    },
    union([OF_FRONT, OF_BACK]),
    BOTH_BYTES,
)


class Workers:
    """Workers that answer as real ones do, and the group that the machine makes of them."""

    def __init__(
        self, count: int, minimum: int = 1, durable: int = -1, spares: int = 0, stages: int = 1, holders: int = 2
    ) -> None:
        sizes = SizeTable(minimum, count, 12, (stages,))
        self.group, self.commands = begin(
            Limits(sizes=sizes, spares=spares, steps=100, max_failures=None, expected=count + spares, holders=holders),
            durable,
        )
        self.names = [f"worker-{number}" for number in range(count + spares)]
        self.feed(e.Fitted((1,), {}, ROWS, ROW_BYTES) if stages == 1 else IN_TWO_STAGES)

    def feed(self, *events: e.Event) -> list[e.Command]:
        """Feed events; return the commands that follow."""
        self.commands = []
        for event in events:
            self.group, commands = step(self.group, event)
            self.commands += commands
        return self.commands

    def start(self) -> e.Join:
        """Form the first group."""
        for name in self.names:
            self.feed(e.Up(name, node=f"node of {name}"))
        for name in self.names:
            self.feed(e.Ready(name, -1))
        return self.join()

    def join(self) -> e.Join:
        """Return the newest command to join; its members do."""
        [join] = [command for command in self.commands if isinstance(command, e.Join)]
        self.charter = self.group
        members = [member.worker for member in join.view.members]
        self.feed(*(e.Joined(name, join.view.generation) for name in members))
        return join

    def leave(self, join: e.Join, why: Any, holds: int, without: tuple[str, ...] = (), **changes: Any) -> None:
        """The members of a view come back with what they were to own."""
        for seat, member in enumerate(join.view.members):
            name, stage = member.worker, join.view.shape.stage(seat)
            if name not in without:
                owned = join.owners[name]
                self.feed(e.Left(name, join.view.generation, holds, why, stage=stage, owned=owned, **changes))


def pair_of(first: e.Join, *, all_left: bool) -> tuple[str, str]:
    """Return two members without which the others have all rows, or do not."""
    found = [
        (one, other)
        for one, other in itertools.combinations(first.owners, 2)
        if (union(own for name, own in first.owners.items() if name not in (one, other)) == ROWS) == all_left
    ]
    return found[0]


def missing(join: e.Join) -> Pieces:
    return shortage(ROWS, join.owners, 2)


def test_rows_are_divided_among_the_first_members() -> None:
    join = Workers(4).start()
    assert {own.size(ROW_BYTES) for own in join.owners.values()} == {240}
    assert (join.lacks, join.incomplete, bool(missing(join))) == ({}, False, False)


def test_after_a_loss_nothing_moves_and_the_next_boundary_restores_the_second_holders() -> None:
    workers = Workers(4)
    first = workers.start()
    workers.feed(e.Committed(0, 5), e.Lost("worker-1", "gone"))
    workers.leave(first, "interrupted", 5, without=("worker-1",))
    second = workers.join()
    left = [name for name in workers.names if name != "worker-1"]
    assert {name: second.owners[name] for name in left} == {name: first.owners[name] for name in left}
    assert (second.lacks, second.incomplete) == ({}, False)
    assert missing(second)
    # Once all have joined, it is asked to stop at a boundary.
    assert [type(command) for command in workers.commands if isinstance(command, e.Pause)] == [e.Pause]
    workers.leave(second, "paused", 8)
    third = workers.join()
    assert not missing(third)
    assert set(third.lacks.values()) == {"rows"}
    held = union(second.owners[name] for name, _ in third.donors)
    assert held == ROWS, "those that give have all rows together"
    assert third.incomplete
    assert workers.group.phase is Phase.TRAIN


def test_a_new_controller_that_finds_a_member_lost_moves_nothing() -> None:
    workers = Workers(4)
    first = workers.start()
    survivors = {
        name: Survivor(node=f"node of {name}", generation=0, joined=True, left=None)
        for name in workers.names
        if name != "worker-1"
    }
    survivors["worker-0"] = replace(
        survivors["worker-0"],
        left=e.Left("worker-0", 0, 5, "interrupted", stage=WHOLE, owned=first.owners["worker-0"]),
    )
    workers.group, commands = adopt(workers.charter, survivors, committed=5, durable=-1, named=4)
    assert commands == [e.Formed(), e.Interrupt(("worker-2", "worker-3"), 0)]
    workers.leave(first, "interrupted", 5, without=("worker-0", "worker-1"))
    second = workers.join()
    assert second.owners == {name: first.owners[name] for name in survivors}
    assert (second.first_step, second.lacks, second.incomplete) == (6, {}, False)


def test_a_newcomer_takes_no_rows_while_the_training_stands_still() -> None:
    workers = Workers(4, spares=1)
    first = workers.start()
    [spare] = set(workers.names) - set(first.owners)
    # It has made a warm-up step since.
    workers.feed(e.Ready(spare, None), e.Committed(0, 5), e.Lost("worker-1", "gone"))
    workers.leave(first, "interrupted", 5, without=("worker-1",))
    second = workers.join()
    assert second.lacks == {spare: "newer"}
    assert second.owners[spare] == Pieces()
    assert second.incomplete, "it may lack weights that others have changed"


def test_a_member_without_all_weights_makes_all_send_theirs_again() -> None:
    workers = Workers(4)
    first = workers.start()
    workers.feed(e.Committed(0, 5), e.Lost("worker-1", "gone"))
    workers.leave(first, "interrupted", 5, without=("worker-1",), complete=False)
    assert workers.join().incomplete


def test_if_both_holders_of_a_row_are_lost_the_checkpoint_is_read_in_parts() -> None:
    workers = Workers(4, minimum=2)
    first = workers.start()
    workers.feed(e.Committed(0, 5), e.Saved(3))
    lost = pair_of(first, all_left=False)
    workers.feed(*(e.Lost(name, "gone") for name in lost))
    for name in (name for name in first.owners if name not in lost):
        owned = first.owners[name]
        workers.feed(e.Left(name, 0, 5, "interrupted", stage=WHOLE, owned=owned))
    reads = [command for command in workers.commands if isinstance(command, e.Restore)]
    assert {command.step for command in reads} == {3}
    assert union(command.owned or Pieces() for command in reads) == ROWS
    assert sum((command.owned or Pieces()).size(ROW_BYTES) for command in reads) == ROWS.size(ROW_BYTES)
    assert {(command.owned or Pieces()).size(ROW_BYTES) for command in reads} == {240}, "each reads half"
    for command in reads:
        workers.feed(e.Ready(command.worker, 3, WHOLE, command.owned))
    again = workers.join()
    assert again.first_step == 4
    assert not missing(again)


def test_two_losses_that_leave_a_holder_of_each_row_cost_no_step() -> None:
    workers = Workers(4)
    first = workers.start()
    workers.feed(e.Committed(0, 5))
    lost = pair_of(first, all_left=True)
    workers.feed(*(e.Lost(name, "gone") for name in lost))
    workers.leave(first, "interrupted", 5, without=lost)
    assert workers.join().first_step == 6


def test_a_resumed_run_reads_each_row_once_though_its_workers_come_one_by_one() -> None:
    workers = Workers(3, minimum=3, durable=7)
    reads: list[e.Restore] = []
    for name in workers.names:
        workers.feed(e.Up(name, node=name))
    for name in workers.names:
        reads += [command for command in workers.feed(e.Ready(name, -1)) if isinstance(command, e.Restore)]
    assert [command.worker for command in reads] == workers.names
    assert union(command.owned or Pieces() for command in reads) == ROWS
    assert {(command.owned or Pieces()).size(ROW_BYTES) for command in reads} == {160}
    for command in reads:
        workers.feed(e.Ready(command.worker, 7, WHOLE, command.owned))
    join = workers.join()
    assert join.first_step == 8
    assert not missing(join)


def test_a_reader_that_is_lost_is_replaced_by_one_that_has_read() -> None:
    workers = Workers(2, minimum=1, durable=7)
    workers.group = replace(workers.group, limits=replace(workers.group.limits, sizes=SizeTable(2, 2, 12)))
    for name in workers.names:
        workers.feed(e.Up(name, node=name))
    first = [command for command in workers.feed(e.Ready("worker-0", -1)) if isinstance(command, e.Restore)]
    second = [command for command in workers.feed(e.Ready("worker-1", -1)) if isinstance(command, e.Restore)]
    workers.group = replace(workers.group, limits=replace(workers.group.limits, sizes=SizeTable(1, 2, 12)))
    workers.feed(e.Ready("worker-0", 7, WHOLE, first[0].owned))
    commands = workers.feed(e.Lost(second[0].worker, "gone"))
    [again] = [command for command in commands if isinstance(command, e.Restore)]
    assert (again.worker, again.owned) == ("worker-0", ROWS)


def stages_in(join: e.Join) -> dict[str, Stage]:
    """Return the stage that each member is to hold."""
    return {member.worker: join.view.shape.stage(seat) for seat, member in enumerate(join.view.members)}


def test_the_members_that_hold_a_stage_share_its_rows() -> None:
    join = Workers(6, stages=2).start()
    assert join.view.shape.sizes == (3, 2, 1)
    for stage, rows in ((FRONT, OF_FRONT), (BACK, OF_BACK)):
        owners = {name: join.owners[name] for name, of in stages_in(join).items() if of == stage}
        assert not shortage(rows, owners, 2)
        assert {own.size(BOTH_BYTES) for own in owners.values()} == {rows.size(BOTH_BYTES) * 2 // 3}
        assert union(owners.values()) == rows


def test_after_a_loss_the_stages_of_the_other_replicas_keep_their_rows() -> None:
    workers = Workers(6, stages=2)
    first = workers.start()
    lost = first.view.members[1].worker
    workers.feed(e.Committed(0, 5), e.Lost(lost, "gone"))
    workers.leave(first, "interrupted", 5, without=(lost,))
    second = workers.join()
    assert second.view.shape.sizes == (2, 2, 1)
    assert (second.first_step, second.lacks) == (6, {})
    stages = stages_in(second)
    assert {name: second.owners[name] for name, stage in stages.items() if stage == BACK} == {
        name: first.owners[name] for name, stage in stages.items() if stage == BACK
    }
    for stage, rows in ((FRONT, OF_FRONT), (BACK, OF_BACK)):
        assert union(second.owners[name] for name, of in stages.items() if of == stage) == rows


def test_the_rows_of_a_replica_that_leaves_go_to_the_one_that_stays() -> None:
    """Each row has one holder, and two replicas become one; if a holder is lost instead, the run starts over."""
    workers = Workers(4, minimum=2, stages=2, holders=1)
    first = workers.start()
    stages = stages_in(first)
    back = [name for name, stage in stages.items() if stage == BACK]
    workers.feed(e.Committed(0, 5), e.Lost(back[0], "gone"))
    workers.leave(first, "interrupted", 5, without=(back[0],))
    assert workers.join().first_step == 0, "the lost rows had one holder, and there is no checkpoint"
    workers = Workers(4, minimum=2, stages=2, holders=1)
    first = workers.start()
    workers.feed(e.Committed(0, 5))
    workers.feed(e.Notice(back[0]))
    workers.leave(first, "paused", 5)
    second = workers.join()
    assert second.view.shape.sizes == (1, 2, 1)
    for name, stage in stages_in(second).items():
        assert second.owners[name] == (OF_FRONT if stage == FRONT else OF_BACK)
    assert set(second.lacks.values()) == {"rows"}
    assert {name for name, _ in second.donors} == set(first.owners)


def test_the_rows_of_each_stage_are_read_from_a_checkpoint_by_as_many_as_there_are_replicas() -> None:
    workers = Workers(4, minimum=4, durable=7, stages=2)
    reads: list[e.Restore] = []
    for name in workers.names:
        workers.feed(e.Up(name, node=name))
    for name in workers.names:
        reads += [command for command in workers.feed(e.Ready(name, -1)) if isinstance(command, e.Restore)]
    for stage, rows in ((FRONT, OF_FRONT), (BACK, OF_BACK)):
        parts = [command.owned or Pieces() for command in reads if command.stage == stage]
        assert [part.size(BOTH_BYTES) for part in parts] == [rows.size(BOTH_BYTES) // 2] * 2
        assert union(parts) == rows
    for command in reads:
        workers.feed(e.Ready(command.worker, 7, command.stage, command.owned))
    assert workers.join().first_step == 8


def halves(rows: Pieces) -> tuple[Pieces, Pieces]:
    first, second = segments(rows, BOTH_BYTES, 2)
    return first, second


def reads_of(commands: list[e.Command]) -> dict[str, tuple[Stage, Pieces | None]]:
    return {one.worker: (one.stage, one.owned) for one in commands if isinstance(one, e.Restore)}


def test_a_stage_that_nobody_has_is_read_though_others_each_have_rows_of_another() -> None:
    """Each of the two that live has half of the first stage, of the step of the checkpoint, and no other comes."""
    workers = Workers(4, minimum=2, stages=2, holders=1)
    first = workers.start()
    stages = stages_in(first)
    back = [name for name, stage in stages.items() if stage == BACK]
    front = [name for name, stage in stages.items() if stage == FRONT]
    workers.feed(e.Committed(0, 5), e.Saved(5), *(e.Lost(name, "gone") for name in back))
    workers.leave(first, "interrupted", 5, without=tuple(back))
    reads = reads_of(workers.commands)
    assert dict(reads.values()) == {FRONT: OF_FRONT, BACK: OF_BACK}
    for name, (stage, owned) in reads.items():
        workers.feed(e.Ready(name, 5, stage, owned))
    join = workers.join()
    assert join.first_step == 6
    assert set(front) == set(join.owners)


def test_who_has_half_of_a_stage_reads_the_rest_if_another_stage_needs_the_only_other_worker() -> None:
    workers = Workers(2, minimum=2, durable=7, stages=2, holders=1)
    for name in workers.names:
        workers.feed(e.Up(name, node=name))
    half, _ = halves(OF_FRONT)
    read = reads_of(workers.feed(e.Ready("worker-0", -1)))
    assert read == {"worker-0": (FRONT, OF_FRONT)}
    workers.feed(e.Ready("worker-0", 7, FRONT, half))
    read = reads_of(workers.feed(e.Ready("worker-1", -1)))
    assert read["worker-1"] == (BACK, OF_BACK)


def test_who_has_read_some_rows_may_lack_the_weights_of_others() -> None:
    workers = Workers(2, minimum=2, durable=7, stages=1, holders=1)
    for name in workers.names:
        workers.feed(e.Up(name, node=name))
    reads: list[e.Restore] = []
    for name in workers.names:
        reads += [one for one in workers.feed(e.Ready(name, -1)) if isinstance(one, e.Restore)]
    for command in reads:
        workers.feed(e.Ready(command.worker, 7, WHOLE, command.owned))
    join = workers.join()
    assert (join.lacks, join.incomplete) == ({}, True), "all send theirs before the first step"


def test_rows_move_with_their_values_if_anybody_may_lack_some() -> None:
    workers = Workers(4)
    first = workers.start()
    workers.feed(e.Committed(0, 5), e.Lost("worker-1", "gone"))
    workers.leave(first, "interrupted", 5, without=("worker-1",), complete=False)
    assert workers.join().stale
    workers = Workers(4)
    first = workers.start()
    workers.feed(e.Committed(0, 5), e.Lost("worker-1", "gone"))
    workers.leave(first, "interrupted", 5, without=("worker-1",))
    assert not workers.join().stale
