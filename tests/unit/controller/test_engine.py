"""The controller's real loop, one event at a time, with workers that do what a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from raytrain_plus.controller.checkpoints.restoring import RESTORE_AGAIN_S
from raytrain_plus.controller.controller_actor import UNHEARD_S, drives
from raytrain_plus.controller.event_loop import VACANT_S
from raytrain_plus.controller.group.formation import FIRST_STANDBY_S, STANDBY_S
from raytrain_plus.controller.group.members import Reported
from raytrain_plus.controller.group.model_hand_over import ENDS_KEPT, EXPORT_AGAIN_S, EXPORT_TRIES
from raytrain_plus.controller.group.monitor import Requested
from raytrain_plus.controller.group.nodes import Draining, NodeLost
from raytrain_plus.data.paths.sight import Sight
from raytrain_plus.errors import (
    CheckpointError,
    DamagedError,
    DataChanged,
    DeviceBroken,
    InputError,
    Interrupted,
    RunError,
    StaleController,
    StorageError,
)
from raytrain_plus.job.settings import Checkpoint, Parallel
from raytrain_plus.membership import events as e
from raytrain_plus.membership.mesh import Shape, Stage
from raytrain_plus.membership.sizes import FRUITLESS
from raytrain_plus.membership.timeouts import EXPORT_S
from raytrain_plus.membership.view import form_view
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.state.stored.manifest import name_of
from raytrain_plus.workers.messages import Outcome, Sent, WorkerLocation, Written
from raytrain_plus.workers.pool import KILLED
from tests.support.states import shares, state
from tests.unit.controller.fakes import LaterThread, Run, job_of

Started = Callable[..., Run]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    """Start a run with workers of which the first ones train: `started("worker-0", maximum=1)`."""
    runs: list[Run] = []

    def start(*names: str, **settings: Any) -> Run:
        # The first world waits for nobody else.
        job = job_of(**{"maximum": max(1, len(names)), **settings})
        runs.append(Run(tmp_path / "run", job, expected=len(names)))
        runs[-1].begin()
        runs[-1].train(*names)
        return runs[-1]

    yield start
    for run in runs:
        run.engine.close()


A, B, C = "worker-0", "worker-1", "worker-2"


def test_every_command_has_a_handler(started: Started) -> None:
    handled = {kind for kind in started().engine.handlers if kind in get_args(e.Command)}
    assert handled == set(get_args(e.Command))


def test_workers_that_have_started_form_a_world_and_train(started: Started) -> None:
    run = started(A, B)
    asked = ("location", "clock", "prepare")
    calls = [(name, what) for name in (A, B) for what in (*asked, "serve", "formed")]
    assert sorted(run.workers.take()) == sorted(calls)
    assert run.phase == "TRAIN"
    assert run.told("view_formed")["members"] == [
        {"worker": name, "pid": 1, "node": "n", "replica": at, "stage": 0, "params": 10, "shards": [at]}
        for at, name in enumerate((A, B))
    ]
    run.report(A, 0)
    assert "step_committed" not in run.kinds()
    run.report(B, 0)
    assert run.told("step_committed")["step"] == 0


def test_members_at_two_tensor_ranks_of_a_replica_share_its_world_and_no_ring(started: Started) -> None:
    run = started(A, B)
    run.engine.handlers[e.Join](e.Join(form_view(0, [A, B], Shape(1, 1, 2), 2), 0, (), {}))
    given = [run.assignment(name) for name in (A, B)]
    assert [(one.ring.name, one.ring.size) for one in given] == [("stage0-g0", 1), ("stage1-g0", 1)]
    shared = [(one.replica.name, one.replica.rank, one.replica.size) for one in given if one.replica]
    assert shared == [("replica0-g0", 0, 2), ("replica0-g0", 1, 2)]


def test_a_lost_worker_is_replaced_by_the_others_at_once(started: Started) -> None:
    run = started(A, B)
    for name in (A, B):
        run.report(name, 0)
    run.workers.take()
    run.workers.die(B, "its process was killed or crashed")
    run.turn()
    assert run.phase == "LEAVE"
    assert run.workers.take() == [(A, "interrupt")]
    assert run.told("worker_lost")["cause"] == "its process was killed or crashed"
    run.leave(A, 0, "interrupted")
    assert run.workers.take() == [(A, "serve")]
    assert (run.generation, run.phase) == (1, "JOIN")
    run.join(A)
    run.report(A, 1)
    told = run.told("recovered")
    assert (told["cause"], told["steps_lost"]) == (f"{B} was lost: its process was killed or crashed", 0)
    assert [who["worker"] for who in told["kept"]] == [A]


def test_the_place_of_a_dead_process_is_kept_for_a_moment(started: Started) -> None:
    run = started(A, B)
    run.turn(STANDBY_S)
    assert not run.workers.stood_by, "the first steps keep their pace"
    run.turn(FIRST_STANDBY_S - STANDBY_S)
    assert run.workers.stood_by == {A: "n", B: "n"}
    run.workers.die(B, KILLED)
    run.turn()
    assert run.workers.vacant == [B]
    run.turn(VACANT_S)
    assert not run.workers.vacant
    run.workers.die(A, "its node is gone")
    run.turn()
    assert not run.workers.vacant


def test_a_worker_that_does_not_come_up_is_started_again_while_the_others_train(started: Started) -> None:
    run = started(A, B)
    run.workers.die(B, KILLED)
    run.turn()
    run.workers.left_s[C] = 0.5
    run.leave(A, -1, "interrupted")
    run.join(A)
    assert run.workers.owes(C, "location")
    run.turn(0.4)
    assert not run.workers.restarted
    run.workers.left_s[C] = 0.0
    run.turn(0.2)
    assert run.workers.restarted == [C]
    # Its new process comes up, and is not watched any more.
    run.prepare(C)
    run.workers.answer(C, "warm_up")
    run.turn()
    assert run.phase == "PAUSE"
    run.workers.left_s[C] = 0.0
    run.turn(3600.0)
    assert run.workers.restarted == [C]


def test_a_newcomer_joins_at_a_boundary_and_takes_the_state_of_a_donor(started: Started) -> None:
    run = started(A, B)
    run.workers.die(B, "gone")
    run.turn()
    run.leave(A, None, "interrupted")
    # Nobody holds a step that was applied: the initial state is made again.
    run.join(A)
    run.report(A, 0)
    run.workers.take()
    run.prepare(C)
    assert run.workers.take("warm_up", "pause") == [(C, "warm_up")]
    run.workers.answer(C, "warm_up")
    run.turn()
    # Until it joins it keeps the copy of what the other alone holds.
    assert run.workers.take() == [(A, "pause"), (A, "copy_to")]
    run.leave(A, 0, "paused")
    lacks = {name: run.assignment(name).lacks for name in (A, C)}
    assert lacks == {A: None, C: "newer"}
    assert run.assignment(A).gives == 1
    assert run.workers.calls[-1] == (C, "take", (2, (f"snapshot of {A}",)))
    # The donor is asked for its state before it is busy, and the newcomer takes it while both join.
    assert run.workers.take() == [(A, "snapshot"), (A, "serve"), (C, "serve"), (C, "take")]
    run.join(A, C)
    assert run.told("worker_joined")["worker"] == C


def test_a_worker_leaves_its_draining_node_before_the_deadline(started: Started) -> None:
    run = started(A, B, minimum=2)
    run.workers.take()
    run.put(Draining({"n": run.time.now + 1e9 + 60, "another": None}))
    assert [run.told("drain_notice")[name] for name in ("node", "deadline")] == ["n", 1e9 + 1_060]
    # Both leave, so that nobody could continue: they train on until the last moment.
    assert run.phase == "TRAIN"
    run.turn(49.0)
    assert run.workers.take("pause") == []
    run.turn(2.0)
    assert run.workers.take("pause") == [(A, "pause"), (B, "pause")]


def test_a_worker_that_starts_on_a_draining_node_is_not_counted_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path / "run", job_of(maximum=2))
    run.begin()
    run.put(Draining({"n": None}))
    assert caplog.messages == ["node n will leave; it hosts no worker of this run"]
    assert "drain_notice" not in run.kinds()
    run.prepare(A)
    assert run.engine.machine.group.workers[A].leaving
    assert not run.engine.machine.group.workers[B].leaving
    run.engine.close()


def test_workers_of_a_node_that_does_not_answer_are_lost(started: Started) -> None:
    run = started(A, B)
    run.put(NodeLost("another"))
    assert run.phase == "TRAIN"
    run.put(NodeLost("n"))
    causes = [event["cause"] for event in run.events if event["kind"] == "worker_lost"]
    assert causes == ["its node n does not answer"] * 2
    assert A not in run.workers


def test_a_late_answer_of_an_older_generation_is_refused(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    run = started(A, B)
    run.workers.die(B, "gone")
    run.turn()
    run.leave(A, -1, "interrupted")
    run.join(A)
    before = run.engine.machine.group
    caplog.clear()
    run.put(Reported(A, 0, []))
    run.put(Sent(worker=A, buddy="", generation=0, step=0, bytes=1, stall_s=0.0))
    assert caplog.messages == [
        f"refused: a report from {A} in generation 0; the current one is 1",
        f"refused: a copy from {A} in generation 0; the current one is 1",
    ]
    assert run.engine.machine.group == before


def test_a_member_that_left_twice_is_heard_once(started: Started) -> None:
    run = started(A, B)
    run.workers.die(B, "gone")
    run.turn()
    # Its run is to stop, and it still computes: it provides what it held before, and comes out a moment later too.
    run.put(e.Stop())
    run.turn(2.6)
    assert run.workers.take("stand_aside") == [(A, "stand_aside")]
    run.workers.answer(A, "stand_aside", None)
    run.turn()
    run.turn(0.1)
    assert run.workers.take("stand_aside") == [(A, "stand_aside")]
    run.workers.answer(A, "stand_aside", Outcome(holds=-1, why="interrupted"))
    run.leave(A, -1, "interrupted")
    assert run.phase == "END"
    assert run.engine.closing is not None
    assert run.engine.closing.result.status == "stopped"


def written(step: int, writer: int, error: str) -> Written:
    return Written(
        step=step,
        generation=0,
        writer=writer,
        writers=2,
        share=None,
        tree=None,
        metrics={},
        time=0.0,
        stall_s=0.0,
        error=error,
    )


def test_a_checkpoint_that_fails_is_reported_and_requested_again(started: Started) -> None:
    run = started(A, B, checkpoint=Checkpoint(every_s=60))
    run.workers.take()
    run.turn(61.0)
    assert run.workers.take("save") == [(A, "save")], "one member asks the others, in the header"
    run.turn(61.0)
    assert run.workers.take("save") == []
    run.put(written(0, 1, "no space left"))
    assert run.told("checkpoint_failed")["error"] == f"{B} could not write its share: no space left"
    assert run.workers.take("settled") == [(A, "settled"), (B, "settled")]
    run.turn(59.0)
    assert run.workers.take("save") == []
    run.turn(2.0)
    assert run.workers.take("save") == [(A, "save")]


def test_a_run_ends_when_its_model_is_exported_and_its_last_state_kept(started: Started) -> None:
    run = started(A)
    run.report(A, 0, 1, 2, 3)
    run.workers.take()
    run.finish([A])
    assert run.phase == "CLOSE"
    assert run.workers.take("keep") == [(A, "keep")]
    run.export(A, "a picture")
    assert run.engine.closing is None, "the last state is still being kept"
    for attempt in range(ENDS_KEPT):
        run.workers.answer(A, "keep", RunError("out of memory"))
        run.turn()
        assert run.told("checkpoint_failed")["error"] == f"{A} could not copy its state: out of memory"
        assert (run.engine.closing is None) == (attempt + 1 < ENDS_KEPT)
    assert run.engine.closing is not None
    result = run.engine.closing.result
    assert (result.status, result.show, run.engine.closing.error) == ("finished", "a picture", None)
    assert run.kinds()[-1] == "run_finished"


def test_an_interrupted_export_is_retried_a_moment_later(started: Started) -> None:
    run = started(A)
    run.report(A, 0, 1, 2, 3)
    tried: list[str] = []
    go = threading.Semaphore(0)

    def interrupted(worker: str, method: str, arguments: tuple[Any, ...]) -> Any:
        assert go.acquire(timeout=10)
        tried.append(method)
        raise Interrupted("it has no copy any more")

    run.workers.exports = interrupted
    run.finish([A])
    run.workers.answer(A, "keep", RunError("no"))
    run.turn()
    for attempt in range(EXPORT_TRIES + 1):
        # Its thread tries; the controller hears it, and tries again when the pause is over.
        go.release()
        run.engine.turn(10.0)
        assert tried == ["inventory"] * (attempt + 1)
        run.turn(EXPORT_AGAIN_S - 0.1)
        run.turn(0.2)
    run.workers.answer(A, "keep", RunError("no"))
    run.turn()
    assert run.engine.closing is not None
    assert isinstance(run.engine.closing.error, Interrupted), "it is not retried for ever"


def test_a_worker_whose_state_nobody_else_holds_is_copied_to_its_buddy(started: Started) -> None:
    run = started(A, spares=1)
    assert (run.assignment(A).buddy, run.assignment(A).copies) == (None, False)
    run.prepare(B)
    run.workers.take()
    run.workers.answer(B, "warm_up")
    run.turn()
    assert run.workers.take() == [(A, "copy_to")]
    sent = Sent(worker=A, buddy=B, generation=0, step=0, bytes=8, stall_s=0.0)
    run.put(sent)
    assert run.workers.take("copied") == [], "the group could not go back to a step that was never announced"
    run.report(A, 0, 1)
    assert run.workers.take("copied") == [(A, "copied"), (B, "copied")]
    run.put(sent)
    assert run.workers.take("copied") == []
    run.workers.die(A, "gone")
    run.turn()
    # The buddy is asked whether its copy is whole; then it is its own donor, and computes the second step again.
    assert run.workers.take() == [(B, name) for name in ("has_copy", "serve", "take")]
    assert run.assignment(B).own_copies == ((Stage(), None, None),)
    assert (run.assignment(B).lacks, run.assignment(B).first_step) == ("newer", 1)
    assert "resumed" not in run.kinds()


def test_a_copy_that_turns_out_to_be_damaged_no_longer_counts(
    started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    run = started(A, spares=1)
    run.prepare(B)
    run.workers.answer(B, "warm_up")
    run.turn()
    run.report(A, 0)
    run.put(Sent(worker=A, buddy=B, generation=0, step=0, bytes=8, stall_s=0.0))
    run.workers.die(A, "gone")
    run.turn()
    run.workers.answer(B, "has_copy", False)
    run.turn()
    assert f"{B}: the copy that it should provide is missing or damaged; please report this" in caplog.messages
    run.leave(B, None, "interrupted")
    assert (run.assignment(B).lacks, run.assignment(B).first_step) == ("initial", 0)
    assert run.told("resumed")["step"] == -1


def saved(run: Run, step: int) -> None:
    """Have the only member write a checkpoint."""
    write(run, step)
    run.until(lambda: "checkpoint_saved" in run.kinds())


def write(run: Run, step: int) -> None:
    folder = run.engine.run_folder
    [share] = shares(folder, state(step), name_of(step, 0), 1)
    tree = {"optimizer": {}, "groups": [], "scheduler": {}, "scales": {}, "persistent": []}
    run.put(replace(written(step, 0, ""), writers=1, share=share, tree=tree))


def test_a_state_that_nobody_holds_is_read_from_the_checkpoint(started: Started) -> None:
    run = started(A)
    run.report(A, 0, 1)
    saved(run, 0)
    run.workers.die(A, "gone")
    run.turn()
    run.prepare(B)
    assert run.workers.take("restore", "serve") == [(A, "serve"), (B, "restore")]
    run.workers.answer(B, "restore", StorageError("no answer"))
    run.turn()
    assert run.told("waiting")["for"] == "the checkpoint storage: no answer"
    run.turn(RESTORE_AGAIN_S - 0.1)
    assert run.workers.take("restore") == []
    run.turn(0.2)
    assert run.workers.take("restore") == [(B, "restore")]
    run.workers.answer(B, "restore")
    run.turn()
    told = run.told("resumed")
    assert (told["step"], told["checkpoint"], told["voided_to"]) == (0, name_of(0, 0), 1)
    assert run.assignment(B).first_step == 1


@pytest.mark.parametrize("found", [None, DamagedError("there is no such file", where="a file")])
def test_a_checkpoint_that_is_published_while_an_older_one_is_read_is_read_instead(
    started: Started, found: Exception | None
) -> None:
    run, later = started(A), LaterThread()
    run.report(A, 0, 1)
    saved(run, 0)
    publisher: Any = run.engine
    publisher._checkpoints._publisher._thread = later
    run.workers.die(A, "gone")
    run.turn()
    run.prepare(B)
    assert run.workers.take("restore") == [(B, "restore")]
    # What the dead worker said last.
    write(run, 1)
    if found is not None:
        # The older one is removed.
        later.waiting.pop()()
    run.workers.answer(B, "restore", found)
    run.turn()
    if found is None:
        assert run.workers.take("restore", "serve") == []
        later.waiting.pop()()
    run.turn(1.0)
    assert run.workers.take("restore", "serve") == [(B, "restore")]
    run.workers.answer(B, "restore")
    run.turn(1.0)
    assert run.assignment(B).first_step == 2
    assert not {"resumed", "checkpoint_failed"} & set(run.kinds())


def test_a_run_whose_only_checkpoint_is_damaged_fails(started: Started) -> None:
    run = started(A)
    run.report(A, 0)
    saved(run, 0)
    run.workers.die(A, "gone")
    run.turn()
    run.prepare(B)
    run.workers.answer(B, "restore", DamagedError("its hash differs", where="a file"))
    with pytest.raises(CheckpointError, match="no checkpoint can be used; the last one tried: its hash differs"):
        run.turn()


def test_a_rescaled_run_pauses_and_forms_the_requested_group(started: Started) -> None:
    run = started(A, B)
    for name in (A, B):
        run.report(name, 0)
    run.workers.take()
    run.put(e.Rescale(1, 1, 0))
    assert run.workers.take() == [(A, "pause"), (B, "pause")]
    for name in (A, B):
        run.leave(name, 0, "paused")
    assert [member["worker"] for member in run.told("view_formed")["members"]] == [A, B]
    run.join(A)
    assert (run.told("rescaled")["from"], run.told("rescaled")["to"]) == (2, 1)
    assert B not in run.workers


def stopped(started: Started) -> Run:
    """A run that was stopped after a step; its two workers write the last checkpoint, and the model is exported."""
    run = started(A, B)
    for name in (A, B):
        run.report(name, 0)
    run.workers.take()
    run.put(e.Stop())
    assert run.workers.take() == [(A, "pause"), (B, "pause")]
    for name in (A, B):
        run.leave(name, 0, "paused")
    assert run.workers.take("keep") == [(A, "keep"), (B, "keep")]
    run.export(A)
    return run


def test_the_last_checkpoint_of_a_stopped_run_is_waited_for_as_long_as_it_advances(started: Started) -> None:
    run = stopped(started)
    for done in range(0, 100, 10):
        # Far beyond the grace time, and in all far beyond the limit of a wait without an advance.
        run.turn(1.0)
        for name in (A, B):
            assert run.workers.owes(name, "writing")
            run.workers.answer(name, "writing", (done * 1_000_000, 100_000_000))
        run.turn()
        run.turn(EXPORT_S / 2)
    told = [event for event in run.events if event["kind"] == "saving"]
    assert [(event["step"], event["written"], event["total"]) for event in told[:3]] == [
        (0, 0, 0),
        (0, 0, 200_000_000),
        (0, 20_000_000, 200_000_000),
    ]
    assert "checkpoint_failed" not in run.kinds()
    assert run.engine.closing is None
    written_shares = shares(run.engine.run_folder, state(0), name_of(0, 1), 2)
    tree = {"optimizer": {}, "groups": [], "scheduler": {}, "scales": {}, "persistent": []}
    for writer, share in enumerate(written_shares):
        run.put(replace(written(0, writer, ""), generation=1, share=share, tree=None if writer else tree))
    run.until(lambda: run.engine.closing is not None)
    assert run.engine.closing is not None
    result = run.engine.closing.result
    assert (result.status, result.steps, result.saved_step, result.unsaved) == ("stopped", 1, 0, None)


def test_a_last_checkpoint_that_does_not_advance_is_given_up(started: Started) -> None:
    run = stopped(started)
    run.turn(EXPORT_S - 1)
    assert run.engine.closing is None
    run.turn(2)
    assert run.engine.closing is not None
    result = run.engine.closing.result
    assert (result.status, result.steps, result.saved_step) == ("stopped", 1, None)
    assert result.unsaved == run.told("checkpoint_failed")["error"] == "nothing of it was written for 121 s"
    assert run.told("run_finished")["unsaved"] == result.unsaved


def test_the_deadline_of_a_writer_s_machine_cuts_the_last_checkpoint(started: Started) -> None:
    run = stopped(started)
    run.put(Draining({"other": 1e9 + run.time.now + 5, "n": 1e9 + run.time.now + 20}))
    run.turn(10)
    assert run.engine.closing is None
    run.turn(8.5)
    assert run.engine.closing is not None
    assert run.engine.closing.result.unsaved == "a machine that writes it leaves now"


def test_a_member_lost_while_the_last_state_is_kept_ends_the_run_as_finished(started: Started) -> None:
    run = started(A)
    run.report(A, 0, 1, 2, 3)
    run.finish([A])
    run.export(A)
    run.workers.die(A, "gone")
    run.turn()
    assert run.engine.closing is not None
    assert run.engine.closing.result.status == "finished"


def test_members_that_end_with_different_states_fail_the_run(started: Started) -> None:
    run = started(A, B)
    for name, sha in ((A, "ab"), (B, "cd")):
        run.report(name, 0, 1, 2, 3)
        run.finish([name], sha)
    run.export(A)
    assert run.engine.closing is not None
    assert "the workers' states differ at the end (worker-0: ab, worker-1: cd)" in str(run.engine.closing.error)


def test_tensor_ranks_end_with_states_of_their_own(started: Started) -> None:
    run = started(A, B)
    run.engine.handlers[e.Join](e.Join(form_view(0, [A, B], Shape(1, 1, 2), 2), 0, (), {}))
    for name, sha in ((A, "ab"), (B, "cd")):
        run.report(name, 0, 1, 2, 3)
        run.finish([name], sha)
    run.export(A)
    assert run.engine.closing is None, "the last checkpoint is being written"


def test_what_interrupted_the_members_is_told_with_the_next_view_and_with_the_runs_failure(started: Started) -> None:
    run = started(A, B)
    for _ in range(FRUITLESS + 1):
        assert run.phase == "TRAIN"
        run.leave(A, -1, "interrupted", fault="cannot start the all-reduce of gradients.0: no")
        run.leave(B, -1, "interrupted", fault="the connection was closed")
        if run.phase == "JOIN":
            run.join(A, B)
            assert run.told("view_formed")["cause"] == f"{A}: cannot start the all-reduce of gradients.0: no"
    closing = run.engine.closing
    assert closing is not None
    assert run.told("run_finished")["error"] == (
        f"{FRUITLESS} failures in a row with no step between them; "
        "the last one: cannot start the all-reduce of gradients.0: no"
    )


def test_an_error_of_the_task_is_the_runs_error_if_it_recurs(started: Started) -> None:
    run = started(A)
    run.report(A, 0)
    failed = {"fault": "ValueError at task.py:3", "error": RunError("step 1 failed: no"), "stage": None}
    run.leave(A, None, "failed", **failed, final=True)
    run.turn()
    assert run.engine.closing is not None
    assert run.engine.closing.result.status == "failed"
    assert str(run.engine.closing.error) == "step 1 failed: no"


CHANGED = DataChanged("the file changed while the run used it: it was removed", where="a.parquet")


@pytest.mark.parametrize("heard", ["prepare", "warm_up"])
def test_data_that_changed_when_a_newcomer_used_it_stops_the_run_and_fails_it(started: Started, heard: str) -> None:
    run = started(A, spares=1)
    run.report(A, 0)
    if heard == "warm_up":
        run.prepare(B)
    else:
        run.workers.answer(B, "location", WorkerLocation(worker=B, pid=1, node="n", address="127.0.0.1"))
        run.turn()
    run.workers.take()
    run.workers.answer(B, heard, CHANGED)
    run.turn()
    assert run.workers.take("pause") == [(A, "pause")]
    run.leave(A, 0, "paused")
    run.export(A)
    run.workers.die(A, "gone")
    run.turn()
    assert run.engine.closing is not None
    assert (run.engine.closing.result.status, run.engine.closing.error) == ("failed", CHANGED)


@pytest.mark.parametrize(("heard", "cause"), [("prepare", "no"), ("warm_up", "its warm-up step failed: no")])
def test_a_newcomer_that_fails_is_lost(started: Started, heard: str, cause: str) -> None:
    run = started(A, spares=1)
    if heard == "warm_up":
        run.prepare(B)
    else:
        run.workers.answer(B, "location", WorkerLocation(worker=B, pid=1, node="n", address="127.0.0.1"))
        run.turn()
    run.workers.answer(B, heard, RunError("no"))
    run.turn()
    assert (run.told("worker_lost")["worker"], run.told("worker_lost")["cause"]) == (B, cause)
    assert run.phase == "TRAIN"


def test_what_only_a_worker_can_see_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", job_of(maximum=1))
    run.begin()
    run.workers.answer(A, "location", WorkerLocation(worker=A, pid=1, node="n", address="127.0.0.1"))
    run.turn()
    run.workers.answer(A, "prepare", InputError("no such file", where="args"))
    with pytest.raises(InputError, match="no such file"):
        run.turn()
    run.engine.close()
    assert not (tmp_path / "run").exists()


def test_workers_with_different_gpus_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", job_of(minimum=2))
    run.begin()
    run.prepare(A, gpu="NVIDIA H100 80GB HBM3")
    with pytest.raises(InputError, match=f"the GPU of {B} is NVIDIA L4, but that of {A} is NVIDIA H100 80GB HBM3"):
        run.prepare(B, gpu="NVIDIA L4")
    run.engine.close()
    assert not (tmp_path / "run").exists()


def test_a_later_worker_with_another_gpu_is_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", job_of(), expected=1)
    run.begin()
    run.prepare(A, gpu="NVIDIA L4")
    run.join(A)
    run.prepare(B, gpu="NVIDIA T4")
    assert run.told("worker_lost")["worker"] == B
    assert run.told("worker_lost")["cause"].startswith("workers.accelerator: the GPU of ")
    assert run.phase == "TRAIN"


def test_different_models_of_the_accelerator_that_a_job_names_train_together(tmp_path: Path) -> None:
    job = job_of()
    run = Run(tmp_path / "run", replace(job, workers=replace(job.workers, accelerator="A100")))
    run.begin()
    run.prepare(A, gpu="NVIDIA A100-SXM4-40GB")
    run.prepare(B, gpu="NVIDIA A100-SXM4-80GB")
    run.join(A, B)
    assert run.phase == "TRAIN"


def test_later_workers_of_a_node_get_what_its_first_worker_saw_of_the_data(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", job_of(spares=2))
    run.begin()
    seen = [{"data": (Sight(size=1, modified_ns=at, changed_ns=at, inode=1),)} for at in (1, 2, 3)]
    nodes = ["one", "two", "one", "one"]
    for number, (node, sights) in enumerate(zip(nodes, [*seen, {}], strict=True)):
        run.prepare(f"worker-{number}", node, sights=sights)
    plans = [call.arguments[0] for call in run.workers.calls if call.method == "prepare"]
    assert [plan.sights for plan in plans] == [{}, {}, seen[0], seen[0]]
    run.engine.close()


LAYERS = (Layer("front", 1.0, 60), Layer("back", 1.0, 50))


def test_partitions_that_do_not_fit_the_first_workers_are_not_used(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", job_of(maximum=2, parallel=Parallel(pipeline=2)))
    run.begin()
    limits = run.engine.machine.group.limits
    assert (limits.sizes.stage_counts, limits.sizes.fewest) == ((2, 1), 1)
    run.prepare(A, room=80, layers=LAYERS)
    limits = run.engine.machine.group.limits
    assert (limits.sizes.stage_counts, limits.sizes.fewest) == ((2,), 2)
    run.engine.close()


def test_a_hung_worker_is_lost_and_told_apart_from_a_controller_that_stood_still(started: Started) -> None:
    run = started(A, B)
    # The controller stood still for an hour.
    run.turn(3600.0)
    assert run.phase == "TRAIN"
    for _ in range(46):
        run.turn(1.0)
    causes = [event["cause"] for event in run.events if event["kind"] == "worker_lost"]
    assert causes == ["hung: its process has not answered for 46 s"] * 2
    assert run.nodes.suspected == set()


def test_nodes_of_workers_that_owe_an_answer_are_probed(started: Started) -> None:
    run = started(A, B)
    for _ in range(17):
        run.turn(1.0)
    assert run.nodes.suspected == set(), "all who hold the state: our own network may be down"
    run.turn(1.0)
    run.turn(1.0)
    assert run.nodes.suspected == {"n"}


def test_a_driver_is_there_while_its_process_lives_or_else_while_it_calls() -> None:
    assert drives(True, 2 * UNHEARD_S)
    assert not drives(False, 0.0)
    assert drives(None, UNHEARD_S - 1)
    assert not drives(None, UNHEARD_S + 1)


GPU = "NVIDIA H100 (GPU-7d3)"
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def test_a_worker_whose_gpu_fails_is_lost_and_a_gpu_that_fails_twice_is_used_no_more(started: Started) -> None:
    run = started(A, B)
    for name in (A, B):
        run.report(name, 0)
    run.workers.die(B, error=DeviceBroken(GPU, ILLEGAL))
    run.turn()
    assert run.told("worker_lost")["cause"] == f"its GPU failed: {ILLEGAL} ({GPU})"
    assert run.phase == "LEAVE"
    assert not run.workers.withheld
    assert not run.workers.vacant
    run.leave(A, 0, "interrupted")
    run.join(A)
    run.report(A, 1)
    run.workers.die(A, error=DeviceBroken(GPU, ILLEGAL))
    run.turn()
    assert run.workers.withheld == [A]
    assert f"{GPU} failed twice and is not used again in this run" in run.told("noted")["text"]


def test_two_gpus_that_fail_alike_in_a_step_end_the_run(started: Started) -> None:
    run = started(A, B)
    for name in (A, B):
        run.report(name, 0)
    run.workers.die(B, error=DeviceBroken("one", ILLEGAL))
    run.turn()
    run.leave(A, 0, "interrupted")
    run.join(A)
    run.workers.die(A, error=DeviceBroken("another", ILLEGAL))
    run.turn()
    assert run.engine.closing is not None
    assert (run.engine.closing.result.status, ILLEGAL in str(run.engine.closing.error)) == ("failed", True)


def test_a_request_is_in_the_record_before_whoever_asks_is_answered(started: Started) -> None:
    run, noted = started(A, B), list[bool]()
    for number, message in enumerate((e.Rescale(1, 3, 1), e.Stop(), e.Stop())):
        what = "stop" if isinstance(message, e.Stop) else "rescale"
        numbers = {} if what == "stop" else {"minimum": 1, "maximum": 3, "spares": 1}
        run.put(Requested(what, numbers, lambda: noted.append("requested" in run.kinds())))
        run.until(lambda count=number: len(noted) > count)
        run.put(message)
    # A second stop says nothing new.
    assert [event["what"] for event in run.events if event["kind"] == "requested"] == ["rescale", "stop"]
    assert noted == [True] * 3


def test_a_controller_that_its_workers_refuse_ends_none_of_them(started: Started) -> None:
    run = started(A, B)
    run.workers.die(A, error=StaleController("controller 0 is refused"))
    with pytest.raises(StaleController):
        run.turn()
    assert set(run.workers) == {A, B}
    assert "worker_lost" not in run.kinds()


def test_the_controller_moves_from_a_node_that_will_leave_once_nothing_waits_for_it(started: Started) -> None:
    run = started(A, B)
    host: Any = run.engine._host
    engine: Any = run.engine
    engine._checkpoints._publishing.add("one")
    run.put(Draining({"here": None}))
    run.turn(0.1)
    assert host.moved == 0
    engine._checkpoints._publishing.clear()
    run.turn(0.1)
    run.until(lambda: host.moved)
    run.turn(0.1)
    assert host.moved == 1
