"""Losses on a cluster of raylets: the healthy processes continue the training, to the same losses."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from raytrain_plus import Elastic, Evaluate, Result, Workers
from raytrain_plus.audit.audit import audit
from raytrain_plus.controller.group.monitor import PULSE_S
from tests.integration.elastic import Run, born, job, raylets
from tests.integration.tasks import write_data

pytestmark = pytest.mark.timeout(240)

PAD_S = 0.003
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with raylets(4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def four_nodes(cluster: Cluster) -> None:
    """Every test begins with four nodes whose CPUs are free."""
    cluster.wait_for_nodes()
    while len(cluster.worker_nodes) < 4:
        cluster.add_node(num_cpus=1)
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU", 0) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> list[float]:
    """Return the losses of a run without incident."""
    return losses_of_a_quiet_run(tmp_path_factory.mktemp("undisturbed"), double=False)


def losses_of_a_quiet_run(folder: Path, double: bool) -> list[float]:
    write_data(folder / "data")
    run = Run(job(folder, name="quiet", args={"double": double}, workers=Workers(min=2)))
    assert run.finish().status == "finished"
    return run.losses()


def started(tmp_path: Path, size: int = 4, **changes: Any) -> tuple[Run, dict[int, float]]:
    """Start a run; return it after some steps, and its workers' processes."""
    write_data(tmp_path / "data")
    args = {"pad_s": PAD_S, **changes.pop("args", {})}
    run = Run(job(tmp_path, args=args, **changes))
    before = born(run.until_size(size))
    run.until_step(20)
    return run, before


def tmp_path_of(run: Run) -> Path:
    return run.folder.parents[1]


def check(run: Run, before: dict[int, float], lost: list[int], expected: list[float]) -> Result:
    """Check that the run ended as the undisturbed one, and that healthy processes stayed."""
    kept = [pid for pid in before if pid not in lost]
    assert {pid: psutil.Process(pid).create_time() for pid in kept} == {pid: before[pid] for pid in kept}
    last = {member["pid"] for member in run.members()}
    assert last >= set(kept)
    result = run.finish()
    assert result.status == "finished", result.error
    assert {member["pid"] for member in run.members()} >= set(kept)
    # The lost processes are gone, and the others built the task once.
    assert not [pid for pid in lost if psutil.pid_exists(pid)]
    assert {pid: (tmp_path_of(run) / f"built-{pid}").read_text() for pid in kept} == dict.fromkeys(kept, "built\n")
    np.testing.assert_allclose(run.losses(), expected[: run.job.steps], rtol=0, atol=1e-5)
    found = audit(result.path)
    assert found.clean, found.faults
    for recovered in run.events("recovered"):
        assert recovered["steps_lost"] == 0
        assert recovered["stall_s"] == pytest.approx(sum(recovered["phases"].values()), abs=0.01)
    return result


@pytest.mark.parametrize("collective", ["horovod", pytest.param("torch", marks=SLOW)])
def test_a_killed_worker(tmp_path: Path, undisturbed: list[float], collective: str) -> None:
    run, before = started(tmp_path, collective=collective, steps=60)
    victim = run.members()[1]
    run.kill(victim)
    recovered = run.until_told("recovered")
    assert [kept["pid"] for kept in recovered["kept"]] == [pid for pid in before if pid != victim["pid"]]
    # Not because it was silent.
    assert "was killed" in recovered["cause"]
    [lost] = run.events("worker_lost")
    assert (lost["worker"], lost["pid"]) == (victim["worker"], victim["pid"])
    result = check(run, before, [victim["pid"]], undisturbed)
    assert (result.recoveries, result.stall_s > 0, 0 < result.goodput < 1) == (1, True, True)


@pytest.mark.slow
def test_a_killed_worker_with_fp64_parameters(tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / "quiet").mkdir()
    expected = losses_of_a_quiet_run(tmp_path / "quiet", double=True)
    run, before = started(tmp_path, args={"double": True})
    run.kill(victim := run.members()[2])
    run.until_told("recovered")
    check(run, before, [victim["pid"]], expected)
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-12)


@SLOW
def test_a_killed_raylet(tmp_path: Path, cluster: Cluster, undisturbed: list[float]) -> None:
    run, before = started(tmp_path)
    node = next(node for node in cluster.worker_nodes if node.node_id == run.members()[1]["node"])
    victim = run.members()[1]
    cluster.remove_node(node, allow_graceful=False)
    run.until_told("recovered")
    check(run, before, [victim["pid"]], undisturbed)


@SLOW
def test_three_of_four_at_once(tmp_path: Path, undisturbed: list[float]) -> None:
    run, before = started(tmp_path)
    victims = run.members()[:3]
    for victim, number in zip(victims, (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL), strict=True):
        run.kill(victim, number)
    run.until(lambda: not any(psutil.pid_exists(victim["pid"]) for victim in victims), "their end", 2)
    recovered = run.until_told("recovered")
    assert len(recovered["kept"]) == 1
    check(run, before, [victim["pid"] for victim in victims], undisturbed)


@pytest.mark.parametrize("what", ["stop", pytest.param("loop", marks=SLOW), pytest.param("hold", marks=SLOW)])
def test_a_worker_that_hangs_is_found_and_replaced(tmp_path: Path, undisturbed: list[float], what: str) -> None:
    elastic = Elastic(wait_s=30, hang_timeout_s=2)
    run, before = started(tmp_path, args={"fault": f"loss:{what}:100"}, elastic=elastic, steps=80)
    lost = run.until_told("worker_lost")
    assert "hung: " in lost["cause"]
    assert len(run.until_told("recovered")["kept"]) == 3
    check(run, before, [lost["pid"]], undisturbed)


@SLOW
@pytest.mark.parametrize("fault", ["loss:sleep0.8:16", "loss:sleep3:0", "evaluate:sleep3:0", "build:sleep3:0"])
def test_a_slow_but_healthy_worker_does_not_hang(tmp_path: Path, fault: str) -> None:
    write_data(tmp_path / "data")
    slow = {"fault": fault, "always": "0.8" in fault}
    changes: dict[str, Any] = {"elastic": Elastic(hang_timeout_s=1), "workers": Workers(min=2), "steps": 8}
    run = Run(job(tmp_path, args=slow, evaluate=Evaluate(path=str(tmp_path / "data"), every_steps=5), **changes))
    assert run.finish().status == "finished"
    assert run.events("worker_lost") == []
    assert len(run.events("view_formed")) == 1


@pytest.mark.slow
def test_a_collective_in_which_all_wait_is_formed_again(tmp_path: Path, undisturbed: list[float]) -> None:
    elastic = Elastic(wait_s=30, hang_timeout_s=2)
    run, before = started(tmp_path, args={"fault": "backward:rename:100"}, elastic=elastic)
    recovered = run.until_told("recovered")
    assert (recovered["cause"], len(recovered["kept"])) == ("all workers waited for one another", 4)
    check(run, before, [], undisturbed)


@SLOW
@pytest.mark.parametrize("pad_s", [PAD_S, 0.04])
def test_a_survivor_that_does_not_leave_is_replaced(tmp_path: Path, undisturbed: list[float], pad_s: float) -> None:
    args = {"pad_s": pad_s, "fault": "backward:sleep3:100"}
    run, before = started(tmp_path, args=args, elastic=Elastic(wait_s=30, hang_timeout_s=60))
    run.until(lambda: list(tmp_path.glob("reached-*")), "the slow backward")
    # A worker that is stopped while it computes gets the time of a hang. By now the others wait for the slow one, and
    # have been asked for their phase.
    time.sleep(2 * PULSE_S)
    members = run.members()
    killed = next(member for member in members if (tmp_path / f"reached-{member['pid']}").exists())
    stopped = next(member for member in members if member is not killed)
    run.kill(stopped, signal.SIGSTOP)
    run.kill(killed)
    recovered = run.until_told("recovered")
    assert len(recovered["kept"]) == 2
    # From the moment that the death is known; the slow step precedes it. It did not take the time of a hang.
    assert recovered["stall_s"] - recovered["phases"]["detect"] < 60
    if pad_s > PAD_S:
        # Slow enough that the replacements join before its end.
        run.until_size(4)
    check(run, before, [stopped["pid"], killed["pid"]], undisturbed)


@SLOW
@pytest.mark.parametrize("fault", ["loss:kill:60", "backward:kill:60", "apply:kill:30", "applied:kill:30"])
def test_a_worker_that_is_killed_anywhere_in_a_step(tmp_path: Path, undisturbed: list[float], fault: str) -> None:
    run, before = started(tmp_path, args={"fault": fault})
    lost = run.until_told("worker_lost")
    assert len(run.until_told("recovered")["kept"]) == 3
    check(run, before, [lost["pid"]], undisturbed)


@SLOW
def test_a_loss_during_the_recovery_from_another(tmp_path: Path, undisturbed: list[float]) -> None:
    run, before = started(tmp_path)
    victim, second = run.members()[0], run.members()[3]
    run.kill(victim)
    # Recovering takes at least three times as long.
    time.sleep(0.06)
    run.kill(second)
    recovered = run.until_told("recovered")
    assert len(recovered["kept"]) == 2
    check(run, before, [victim["pid"], second["pid"]], undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["mesh", "adopt"])
def test_a_newcomer_that_is_killed_while_it_joins(tmp_path: Path, undisturbed: list[float], place: str) -> None:
    run, before = started(tmp_path, args={"fault": f"{place}:kill:0", "pad_s": 0.02})
    (tmp_path / "late").touch()
    run.kill(victim := run.members()[1])
    newcomer = run.until_told("worker_lost", 2)
    assert newcomer["pid"] not in before
    run.until_told("recovered", 2)
    check(run, before, [victim["pid"]], undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["apply:raise:40", "applied:raise:40"])
def test_a_step_counts_if_only_one_workers_optimizer_raises_in_it(
    tmp_path: Path, undisturbed: list[float], fault: str
) -> None:
    run, before = started(tmp_path, args={"fault": fault})
    recovered = run.until_told("recovered")
    assert len(recovered["kept"]) == 4
    assert "ValueError" in recovered["cause"]
    assert run.events("worker_lost") == []
    check(run, before, [], undisturbed)


def test_a_worker_whose_device_fails_is_replaced(tmp_path: Path, undisturbed: list[float]) -> None:
    run, before = started(tmp_path, args={"fault": "backward:device:100"})
    run.until_told("recovered")
    lost = run.until_told("worker_lost")
    assert lost["cause"] == "its device failed: CUDA error: an illegal memory access was encountered"
    check(run, before, [lost["pid"]], undisturbed)


@SLOW
def test_devices_that_fail_alike_in_a_step_end_the_run(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    run = Run(job(tmp_path, args={"fault": "loss:device:100", "always": True}, workers=Workers(min=2)))
    result = run.finish()
    assert (result.status, result.exit_code) == ("failed", 1)
    assert "CUDA error: an illegal memory access was encountered" in str(result.error)


@pytest.mark.slow
def test_a_donor_that_is_killed_in_mid_transfer(tmp_path: Path, undisturbed: list[float]) -> None:
    run, before = started(tmp_path, args={"fault": "snapshot:kill:1", "pad_s": 0.02})
    run.kill(victim := run.members()[3])
    run.until_told("recovered")
    # The worker that takes the empty seat needs a copy; its donor dies.
    donor = run.until_told("worker_lost", 2)
    check(run, before, [victim["pid"], donor["pid"]], undisturbed)


@SLOW
def test_a_survivor_that_computes_is_waited_for(tmp_path: Path, undisturbed: list[float]) -> None:
    run, before = started(tmp_path, args={"fault": "backward:sleep3:100"})
    run.until(lambda: (tmp_path / "fault").exists(), "the slow backward")
    slow = _youngest_sleeper(run)
    victim = next(member for member in run.members() if member["pid"] != slow)
    run.kill(victim)
    recovered = run.until_told("recovered")
    assert slow in [kept["pid"] for kept in recovered["kept"]]
    check(run, before, [victim["pid"]], undisturbed)


def _youngest_sleeper(run: Run) -> int:
    """Return the member that uses no CPU because it sleeps in its backward pass: the others wait for it, and poll."""
    before = {member["pid"]: sum(psutil.Process(member["pid"]).cpu_times()[:2]) for member in run.members()}
    time.sleep(1)
    used = {pid: sum(psutil.Process(pid).cpu_times()[:2]) - at for pid, at in before.items()}
    return min(used, key=lambda pid: used[pid])


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("raise", "the task raised ValueError: a fault in loss"),
        pytest.param(
            "memory", "out of memory (MemoryError): cannot allocate 64 GiB; use more microbatches", marks=SLOW
        ),
    ],
)
def test_the_same_exception_twice_ends_the_run_with_the_state_of_the_last_commit(
    tmp_path: Path, what: str, expected: str
) -> None:
    write_data(tmp_path / "data")
    run = Run(job(tmp_path, args={"fault": f"loss:{what}:100", "always": True}, workers=Workers(min=2)))
    result = run.finish()
    assert (result.status, result.exit_code) == ("failed", 1)
    assert expected in str(result.error)
    assert "Traceback (your code only)" in str(result.error)
    assert re.search(r"; the rows: of shard \d in step \d+, rows? .+ \(step \d+ was not applied\)$", str(result.error))
    assert (result.path / "model.safetensors").exists()
    assert json.loads((result.path / "result.json").read_text())["steps"] == run.committed() + 1 > 10
    # It was tried again only once; the second world may break before all have joined it. If memory has run out on one
    # worker before it could on the other, a new process was tried, too.
    tried = max(len(file.read_text().split()) for file in tmp_path.glob("reached-*"))
    assert tried == 2 or (what == "memory" and tried == 3)


@SLOW
def test_a_process_whose_memory_runs_out_twice_is_replaced(tmp_path: Path, undisturbed: list[float]) -> None:
    run, before = started(tmp_path, args={"fault": "loss:memory:80", "always": "here", "pad_s": 0.03})
    run.until_told("recovered", 1)
    [reached] = tmp_path.glob("reached-*")
    gone = int(reached.name.removeprefix("reached-"))
    run.until(lambda: gone not in [member["pid"] for member in run.members()], "another process", 60)
    run.until_size(4)
    check(run, before, [gone], undisturbed)
    assert len(reached.read_text().split()) == 2


@SLOW
@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_that_raises_in_every_worker_ends_the_run(tmp_path: Path, size: int) -> None:
    write_data(tmp_path / "data")
    args = {"fault": "apply:raise:40", "always": True}
    result = Run(job(tmp_path, args=args, workers=Workers(min=size))).finish()
    assert (result.status, result.exit_code) == ("failed", 1)
    told = str(result.error)
    assert re.search(r"the task raised ValueError: a fault in apply.*\(step \d+ was not applied\)", told), told


@SLOW
def test_a_spare_takes_the_empty_place(tmp_path: Path, undisturbed: list[float]) -> None:
    run, before = started(tmp_path, size=3, workers=Workers(min=3, max=3, spares=1))
    run.until(lambda: len(list(tmp_path.glob("computes-*"))) == 4, "a spare that has made its step for practice")
    run.kill(victim := run.members()[1])
    recovered = run.until_told("recovered")
    assert len(recovered["kept"]) == 2
    assert [entry["pid"] not in before for entry in recovered["replaced"]] == [True]
    check(run, before, [victim["pid"]], undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sixty_kills_in_a_row_make_nothing_grow_in_a_survivor(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    elastic = Elastic(wait_s=30, max_failures=60)
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, steps=1_000_000, workers=Workers(min=2, max=3), elastic=elastic))
    survivor = psutil.Process(run.until_size(3)[0]["pid"])
    figures: list[tuple[int, int, int]] = []
    known: list[float] = []
    for number in range(60):
        members = run.until(lambda: len(run.members()) == 3 and run.members(), "three members")
        after = run.committed()
        run.until(lambda: run.committed() > after + 3, "steps of three")  # noqa: B023
        figures.append((survivor.num_fds(), survivor.num_threads(), survivor.memory_full_info().uss))
        victim = next(member for member in reversed(members) if member["pid"] != survivor.pid)
        killed = time.time()
        run.kill(victim)
        recovered = run.until_told("recovered", number + 1)
        known.append(run.until_told("worker_lost", number + 1)["time"] - killed)
        assert survivor.pid in [kept["pid"] for kept in recovered["kept"]]
    print(*figures, sep="\n")
    print(f"a death is known after {np.median(known):.3f} s (median), {max(known):.3f} s at most")
    # Caches fill, and Ray adds threads, within the first kills.
    early, late = np.median(figures[10:20], axis=0), np.median(figures[-10:], axis=0)
    assert (late <= 1.02 * early).all(), (early, late)
    run.kill(run.members()[0])
    assert str(run.finish().error).startswith("more failures than elastic.max_failures = 60; the last one: ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundreds_of_interrupts_cost_no_process(tmp_path: Path) -> None:
    """Random errors of the task break the world again and again, at any point of the others' work."""
    write_data(tmp_path / "data")
    run = Run(job(tmp_path, task="tasks:Stumbles", args={}, steps=4000, workers=Workers(min=4)))
    before = born(run.until_size(4))
    result = run.finish(timeout_s=500)
    assert result.status == "finished", result.error
    # About one step in fifteen breaks at random: 265 of these, plus or minus 16.
    assert result.recoveries > 200
    assert {member["pid"] for member in run.members()} == set(before)
    stalls = sorted(event["stall_s"] for event in run.events("recovered"))
    print(f"{len(stalls)} recoveries: median {stalls[len(stalls) // 2]:.3f} s, longest {stalls[-1]:.3f} s")
