"""The progress that events add up to, and the lines shown for them."""

import doctest
from typing import Any

import pytest

from raytrain_plus.observe import run_progress as module
from raytrain_plus.observe.run_progress import RunProgress
from tests.unit.observe.feed import evaluated, event, step, view


def after(*events: dict[str, Any], total: int = 10) -> RunProgress:
    progress = RunProgress(total=total)
    for one in events:
        progress.add(one)
    return progress


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("events", "line"),
    [
        ([], "step 0/10  starting workers"),
        ([view(6, 6)], "step 0/10  2 workers"),
        ([view(6, 6), step(0)], "step 1/10  loss 1.2500  2 workers"),
        ([view(6, 6), step(0), step(1)], "step 2/10  loss 1.2500  96 samples/s  2 workers  0:04 left"),
        ([view(12), step(0), event("waiting", **{"for": "a worker"})], "step 1/10  loss 1.2500  waiting for a worker"),
        ([view(12), event("waiting", **{"for": "a worker"}), view(12)], "step 0/10  1 worker"),
        ([view(12), step(0, loss="nan")], "step 1/10  loss nan  1 worker"),
        ([view(12), {**step(0), "metrics": {"accuracy": 0.5}}], "step 1/10  loss 1.2500  accuracy 0.5000  1 worker"),
        ([view(12), {**step(0), "metrics": {"a" * 40: 0.5}}], "step 1/10  loss 1.2500  1 worker"),
        ([view(12), {**step(0), "lr": [0.001, 0.001]}], "step 1/10  loss 1.2500  lr 0.001  1 worker"),
        ([view(12), {**step(0), "lr": 2e-05}, step(1)], "step 2/10  loss 1.2500  96 samples/s  1 worker  0:04 left"),
        (
            [view(12), {**step(0), "metrics": {"a": 0.5}}, step(1)],
            "step 2/10  loss 1.2500  96 samples/s  1 worker  0:04 left",
        ),
    ],
)
def test_the_line_shows_the_known_values(events: list[dict[str, Any]], line: str) -> None:
    assert after(*events).line() == line


def test_speed_leaves_out_a_groups_first_step_and_follows_the_last_ten_seconds() -> None:
    slow = [step(number, seconds=5.0) for number in range(1, 4)]
    fast = [step(number, seconds=0.5) for number in range(4, 24)]
    assert after(view(6), step(0, seconds=100.0), *slow, total=24).samples_per_s == 48 / 5.0
    whole = after(view(6), step(0, seconds=100.0), *slow, *fast, total=44)
    assert whole.samples_per_s == 48 / 0.5
    assert whole.seconds_left == 20 * 0.5


def test_an_evaluation_between_steps_does_not_lower_the_speed() -> None:
    there = after(view(6), step(0), step(1, time=1.0), evaluated(1, loss=2.0), step(2, time=60.0))
    assert there.samples_per_s == 96
    assert there.evaluations == [(1, {"loss": 2.0})]


def test_steps_that_took_no_time_have_no_speed() -> None:
    there = after(view(6), step(0, seconds=0.0), step(1, seconds=0.0))
    assert (there.samples_per_s, there.seconds_left) == (None, None)


def recovered(recomputed: int = 0) -> dict[str, Any]:
    return event(
        "recovered",
        cause="a collective broke",
        stall_s=0.314,
        steps_lost=0,
        steps_recomputed=recomputed,
        kept=[{}, {}],
        replaced=[{}],
        phases={},
    )


def test_a_recovery_says_how_much_of_the_state_it_copied() -> None:
    formed = {**view(6, 6), "moved_bytes": 3_500_000_000}
    progress = after(formed, lost(1))
    came_back = {**recovered(), "phases": {"transfer": 1.75}}
    assert "copied" not in str(progress.add(came_back)), "that was copied before the loss"
    progress = after(view(6, 6), lost(1), formed)
    assert str(progress.add(came_back)).endswith("; 2 kept, 1 replaced; 3.5 GB of state copied at 2.0 GB/s")


def lost(number: int) -> dict[str, Any]:
    return event("worker_lost", worker=f"worker-{number}", pid=7, node="n", cause="killed")


def in_two_by_two() -> dict[str, Any]:
    """Return a view of two replicas, of two stages at two tensor ranks each."""
    formed = view(*[6] * 8)
    for seat, member in enumerate(formed["members"]):
        member |= {"replica": seat // 4, "stage": seat // 2 % 2}
    return formed


def in_slices(stages: int) -> dict[str, Any]:
    """Return a view of one replica, of so many stages of two workers that share their slices."""
    formed = view(*[6] * 2 * stages)
    for seat, member in enumerate(formed["members"]):
        member |= {"replica": 0, "stage": seat // 2, "tensor_rank": seat % 2, "slices": [seat % 2]}
    return formed


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (
            in_two_by_two(),
            "8 workers ready in 2 replicas of 2 stages, 6 shards each; 4,000 parameters; collective: horovod",
        ),
        (
            in_slices(2),
            "4 workers ready in 1 replica of 2 stages of 2 workers, 6 shards each; up to 1,000 parameters each; "
            "collective: horovod",
        ),
        (
            in_slices(1),
            "2 workers ready in 1 replica of 2 workers, 6 shards each; up to 1,000 parameters each; "
            "collective: horovod",
        ),
        (view(5, 4, 3), "3 workers ready, 5 or 4 or 3 shards each; 1,000 parameters; collective: horovod"),
        (evaluated(-1, loss=5.5, accuracy=0.1), "held out, untrained: loss 5.5000, accuracy 0.1000"),
        (evaluated(99, loss=5.5), "held out, after step 100: loss 5.5000"),
        (lost(2), "worker-2 (pid 7) was lost: killed"),
        (recovered(1), "recovered in 0.31 s: a collective broke; 0 steps lost, 1 step recomputed; 2 kept, 1 replaced"),
        (event("waiting", **{"for": "2 CPUs"}), "waiting for 2 CPUs"),
        (event("drain_notice", node="ab12" * 10, deadline=1.0), "node ab12ab12ab12 will leave"),
        (event("checkpoint_failed", step=9, error="disk full"), "the checkpoint after step 10 failed: disk full"),
        (event("resumed", step=9, checkpoint="c-9", voided_to=12), "resumed from the checkpoint after step 10"),
        (event("resumed", step=9, checkpoint=None, voided_to=12), "returned to the state after step 10"),
        (event("resumed", step=-1, checkpoint=None, voided_to=12), "restarted from the initial state"),
        (event("worker_joined", worker="worker-2", pid=7, node="n"), None),
        (event("rescaled", **{"from": 1, "to": 3}), None),
        (step(3), None),
        (event("checkpoint_saved", step=3, seconds=1.0, stall_s=0.0), None),
        (event("run_started", job="", versions={}, address=""), None),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_lines_of_single_events(one: dict[str, Any], line: str | None) -> None:
    assert RunProgress(total=10).add(one) == line


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        (
            [lost(1), view(6, 6), recovered()],
            ["recovered in 0.31 s: worker-1 (pid 7) was lost: killed; 0 steps lost; 2 kept, 1 replaced"],
        ),
        (
            [lost(1), event("waiting", **{"for": "1 more"}), view(6, 6), recovered()],
            [
                "worker-1 (pid 7) was lost: killed; waiting for 1 more",
                "recovered in 0.31 s: a collective broke; 0 steps lost; 2 kept, 1 replaced",
            ],
        ),
        ([event("worker_joined", worker="worker-3"), view(3, 3, 3, 3)], ["4 workers now: worker-3 joined"]),
        ([event("rescaled", **{"from": 3, "to": 2}), view(6, 6)], ["2 workers now: worker-2 left"]),
        ([lost(9)], ["worker-9 (pid 7) was lost: killed"]),
        ([lost(1), event("run_finished", status="stopped")], ["worker-1 (pid 7) was lost: killed"]),
    ],
    ids=["loss", "long loss", "join", "leave", "spare", "last loss"],
)
def test_a_change_of_the_group_has_one_line(events: list[dict[str, Any]], lines: list[str]) -> None:
    progress = after(view(4, 4, 4), step(0))
    told = [progress.add(one) for one in events]
    assert [line for line in told if line] == lines


def test_a_partition_that_is_not_used_is_reported_once() -> None:
    progress = after(view(6, 6), step(0))
    told = [progress.add(one) for one in (lost(1), view(12) | {"repartitioned": True}, recovered())]
    line = "parallel.partition is for more than 1 stage, so the platform partitions the layers"
    assert told[:2] == [None, line]
    joined = [view(6, 6), view(12) | {"repartitioned": True}]
    assert [progress.add(one) for one in joined] == ["2 workers now: worker-1 joined", "1 worker now: worker-1 left"]


def test_parameters_are_counted_over_the_stages_of_one_replica() -> None:
    formed = view(6, 6, 6, 6)
    for index, member in enumerate(formed["members"]):
        member.update(replica=index // 2, stage=index % 2, params=[700, 300][index % 2])
    assert "; 1,000 parameters;" in (RunProgress(total=10).add(formed) or "")


def test_a_full_disk_has_one_line_and_its_failed_checkpoints_none() -> None:
    run = RunProgress(total=10)
    full = event("storage_failed", place="/mnt", error="No space left on device", wanted=2_000_000, free=0)
    failed = event("checkpoint_failed", step=3, error="a could not write its share: [Errno 28] No space left on device")
    over = event("storage_recovered", place="/mnt", error="No space left on device", seconds=12.4)
    other = event("checkpoint_failed", step=3, error="a was lost before it had written its share")
    assert [run.add(one) for one in (full, failed, other, failed, over, failed)] == [
        "cannot write to /mnt: No space left on device (2.0 MB wanted, 0 bytes free); training continues",
        None,
        "the checkpoint after step 4 failed: a was lost before it had written its share",
        None,
        "can write to /mnt again after 12 s (No space left on device)",
        f"the checkpoint after step 4 failed: {failed['error']}",
    ]


def test_a_controller_that_takes_workers_over_has_a_line_and_the_first_one_has_none() -> None:
    progress = RunProgress(total=10)
    started = [event("controller_started", pid=1, node="n", adopted=names) for names in ([], ["a"], ["a", "b"])]
    assert [progress.add(one) for one in (started[0], view(6, 6), *started[1:])][::2] == [
        None,
        "the controller was replaced; 1 worker trains on",
    ]
    assert progress.add(started[2]) == "the controller was replaced; 2 workers train on"
    assert progress.add(event("requested", what="stop")) is None
