"""Planned changes on a cluster of raylets: machines join, drain, or are too few; and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray._private.state import state
from ray.cluster_utils import Cluster

from raytrain_plus import Data, Elastic, RunError, Workers
from raytrain_plus.audit.audit import audit
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, born, job, raylets
from tests.integration.tasks import write_data
from tests.support.elastic_runs import PAD_S, alive, drain, losses_of_an_undisturbed_run

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with raylets(2) as cluster:
        yield cluster


SLOW_TRANSFERS = {"object_manager_default_chunk_size": 1 << 16, "object_manager_max_bytes_in_flight": 1 << 16}
"""Ray settings with which a state of 50 MB takes a second or more from machine to machine."""
SHARED_MEMORY = "/dev/shm"
RAYS_OWN = {"_StatsActor", "_UsageCollectionActor", "_AutoscalingCoordinatorActor"}
"""Classes of the actors that Ray Data starts once per cluster, and keeps."""


@pytest.mark.slow
def test_machines_join_while_the_others_train(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    expected = losses_of_an_undisturbed_run(tmp_path)
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=2, max=4)))
    before = born(run.until_size(2))
    run.until_step(10)
    added = time.time()
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    members = run.until_size(4)
    assert {pid: psutil.Process(pid).create_time() for pid in before} == before
    assert [member["pid"] for member in members][:2] == list(before)
    result = run.finish()
    assert result.recoveries == 0
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-5)
    found = audit(result.path)
    assert found.clean, found.faults
    assert len(run.events("worker_joined")) == 2
    changes = run.events("view_formed")[1:]
    assert [event["to"] for event in run.events("rescaled")] == [len(change["members"]) for change in changes]
    # The others train while the new machines start. How long they pause at last: `tests.benchmarks.replacement`.
    started = [event["time"] for event in run.events("step_committed")]
    assert sum(added < at < changes[0]["time"] for at in started) > 5


@pytest.mark.slow
def test_machines_join_a_group_with_a_state_of_fifty_megabytes(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    run = Run(job(tmp_path, task="tasks:Wide", args={"pad_s": PAD_S}, workers=Workers(min=2, max=4), steps=300))
    run.until_size(2)
    run.until_step(10)
    for size in (3, 4):
        cluster.add_node(num_cpus=1)
        run.until_size(size)
        run.until_step(run.committed() + 30)
        gap, step = longest_gap(run, run.events("view_formed")[-1]["time"])
        print(f"to {size} workers: the longest gap {gap:.3f} s, a step {step:.3f} s")
    assert run.finish().recoveries == 0


@pytest.mark.slow
def test_the_machine_of_a_donor_leaves_during_the_transfer(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    shape: dict[str, Any] = {"task": "tasks:Wide", "args": {"pad_s": PAD_S, "fault": "snapshot:sleep0:1"}, "steps": 150}
    with raylets(2, settings=SLOW_TRANSFERS) as cluster:
        expected = losses_of_an_undisturbed_run(tmp_path, **shape)
        run = Run(job(tmp_path, workers=Workers(min=2, max=3), **shape))
        before = born(run.until_size(2))
        run.until_step(10)
        (tmp_path / "fault").unlink(missing_ok=True)
        cluster.add_node(num_cpus=1)
        marks = {pid: tmp_path / f"reached-{pid}" for pid in before}
        run.until(lambda: any(mark.exists() for mark in marks.values()), "a donor")
        time.sleep(0.2)
        [donor] = [pid for pid, mark in marks.items() if mark.exists()]
        assert not list(tmp_path.glob("adopted-*")), "its state is on its way"
        node = next(member["node"] for member in run.members() if member["pid"] == donor)
        cluster.remove_node(next(one for one in cluster.worker_nodes if one.node_id == node), allow_graceful=False)
        assert run.finish().status == "finished"
    [survivor] = set(before) - {donor}
    newcomers = {member["pid"] for member in run.members()} - {survivor}
    assert len(newcomers) == len(run.members()) - 1 == 1
    assert {int(path.name.partition("-")[2]) for path in tmp_path.glob("adopted-*")} == newcomers
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-5)
    assert {event["steps_lost"] for event in run.events("recovered")} == {0}


def longest_gap(run: Run, when: float) -> tuple[float, float]:
    """Return the longest time between two commits around a moment, and the usual time before."""
    times = np.array([event["time"] for event in run.events("step_committed")])
    around = np.diff(times[(times > when - 2) & (times < when + 2)])
    return float(around.max()), float(np.median(np.diff(times[times < when])))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["ring", "exact"])
def test_a_draining_machine_is_left_before_its_deadline(tmp_path: Path, cluster: Cluster, reduction: Any) -> None:
    write_data(tmp_path / "data")
    undisturbed = Run(job(tmp_path, name="undisturbed", workers=Workers(min=2), reduction=reduction))
    state = undisturbed.finish().state_sha256
    cluster.add_node(num_cpus=1)
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=1, max=3), reduction=reduction))
    run.until_size(3)
    run.until_step(10)
    leaver = run.members()[0]
    others = born(run.members()[1:])
    idle = cluster.add_node(num_cpus=0)
    drain(cluster, idle.node_id, 30)
    noticed = time.time()
    drain(cluster, leaver["node"], 20)
    notice = run.until_told("drain_notice")
    assert (notice["node"], abs(notice["deadline"] - noticed - 20) < 1) == (leaver["node"], True)
    run.until(lambda: leaver["pid"] not in [member["pid"] for member in run.members()], "a group without it")
    # Not according to the run: it may end before the process is gone.
    while alive(leaver["pid"]):
        assert time.time() < noticed + 20, psutil.Process(leaver["pid"])
        time.sleep(0.01)
    assert {pid: psutil.Process(pid).create_time() for pid in others} == others
    result = run.finish()
    assert (result.recoveries, result.steps, run.events("worker_lost")) == (0, 200, [])
    # The drain of a node without workers changes nothing.
    assert len(run.events("drain_notice")) == 1
    np.testing.assert_allclose(run.losses(), undisturbed.losses(), rtol=0, atol=1e-5)
    if reduction == "exact":
        assert (result.state_sha256, run.losses()) == (state, undisturbed.losses())
    found = audit(result.path)
    assert found.clean, found.faults


@pytest.mark.slow
def test_a_machine_is_left_during_a_step_that_would_outlast_it(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    cluster.add_node(num_cpus=1)
    slow = {"fault": "loss:sleep1.5:8", "always": True}  # steps of six seconds, after the second one
    run = Run(job(tmp_path, args=slow, workers=Workers(min=1, max=2), steps=6))
    run.until_size(2)
    run.until_step(2)
    leaver = run.members()[0]
    made = run.committed()
    drain(cluster, leaver["node"], 5)
    run.until(lambda: not alive(leaver["pid"]), "the end of its process")
    assert run.committed() == made, "it waited for the end of the step"
    result = run.finish()
    assert (result.status, result.steps, run.events("worker_lost")) == ("finished", 6, [])
    assert audit(result.path).clean


@pytest.mark.slow
@pytest.mark.parametrize("who", ["another", "the one that leaves"])
def test_a_loss_while_a_machine_is_left(tmp_path: Path, cluster: Cluster, who: str) -> None:
    write_data(tmp_path / "data")
    expected = losses_of_an_undisturbed_run(tmp_path)
    cluster.add_node(num_cpus=1)
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=1, max=3)))
    leaver, *others = run.until_size(3)
    before = born(others)
    run.until_step(10)
    drain(cluster, leaver["node"], 20)
    noticed = time.time()
    run.until_told("drain_notice")
    victim = others[1] if who == "another" else leaver
    run.kill(victim)
    run.until(lambda: not alive(leaver["pid"]), "the end of its process")
    assert time.time() < noticed + 20
    kept = [member["pid"] for member in others if member is not victim]
    assert {pid: psutil.Process(pid).create_time() for pid in kept} == {pid: before[pid] for pid in kept}
    result = run.finish()
    assert (result.status, result.steps) == ("finished", 200)
    assert set(kept) <= {member["pid"] for member in run.members()}
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-5)
    found = audit(result.path)
    assert found.clean, found.faults


@pytest.mark.slow
def test_a_size_that_would_make_no_step_faster_is_not_formed(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    cluster.add_node(num_cpus=1)
    # 4 shards: three workers would have 2 on the fullest, as two have. The third is a spare, until it is needed.
    data = Data(path=str(tmp_path / "data"), batch_size=48, shards=4)
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, data=data, workers=Workers(min=1, max=4)))
    members = run.until_size(2)
    run.until(lambda: len(list(tmp_path.glob("computes-*"))) == 3, "a third worker that has made its step for practice")
    at = run.committed()
    run.until_step(at + 20)
    assert len(run.events("view_formed")) == 1
    run.kill(members[0])
    recovered = run.until_told("recovered")
    assert ([kept["pid"] for kept in recovered["kept"]], len(recovered["replaced"])) == ([members[1]["pid"]], 1)
    run.finish()


@pytest.mark.slow
def test_too_few_workers_wait_for_capacity_and_continue_with_their_state(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    expected = losses_of_an_undisturbed_run(tmp_path, steps=60)
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=2), steps=60))
    members = run.until_size(2)
    run.until_step(10)
    node = next(node for node in cluster.worker_nodes if node.node_id == members[0]["node"])
    cluster.remove_node(node, allow_graceful=False)
    waiting = run.until_told("waiting")
    assert waiting["for"] == "1 more of at least 2 workers (each needs 1 CPU)"
    held = run.committed()
    time.sleep(1)
    assert run.committed() == held
    cluster.add_node(num_cpus=1)
    recovered = run.until_told("recovered")
    assert [kept["pid"] for kept in recovered["kept"]] == [members[1]["pid"]]
    run.finish()
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_too_few_workers_for_too_long_end_the_run_with_the_last_committed_model(
    tmp_path: Path, cluster: Cluster
) -> None:
    write_data(tmp_path / "data")
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=2), elastic=Elastic(wait_s=3)))
    members = run.until_size(2)
    run.until_step(10)
    node = next(node for node in cluster.worker_nodes if node.node_id == members[0]["node"])
    cluster.remove_node(node, allow_graceful=False)
    result = run.finish()
    assert (result.status, result.exit_code) == ("failed", 1)
    assert result.error.startswith("only 1 of at least 2 workers were available within elastic.wait_s: Ray has ")
    assert "raise elastic.wait_s" in result.error
    assert (result.path / "model.safetensors").exists()
    assert result.steps == run.committed() + 1


@pytest.mark.slow
def test_failures_are_bounded(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    elastic = Elastic(max_failures=1, wait_s=30)
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=1, max=2), elastic=elastic))
    run.until_size(2)
    run.until_step(10)
    run.kill(run.members()[0])
    run.until_told("recovered")
    run.until_size(2)
    run.kill(run.members()[0])
    result = run.finish()
    assert result.status == "failed"
    assert str(result.error) == (
        "more failures than elastic.max_failures = 1; the last one: its process was killed or crashed"
    )
    assert (result.path / "model.safetensors").exists()


@pytest.mark.slow
def test_nothing_is_left_however_a_run_ends(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    shared = os.listdir(SHARED_MEMORY)
    for name, fault, steps, status in (("well", "", 20, "finished"), ("badly", "loss:raise:80", 200, "failed")):
        args = {"fault": fault, "always": True, "pad_s": PAD_S}
        run = Run(job(tmp_path, name=name, args=args, steps=steps, workers=Workers(min=2)))
        run.until_step(0)
        ports = listening()
        # Only Ray's own ports, one per process, are open to every machine: ours listen on one address.
        assert len([host for host, _ in ports if host in ("::", "0.0.0.0")]) == 3 < len(ports)
        assert run.finish().status == status
        check_nothing_is_left(ports, shared)
    driver = attached_driver(tmp_path, cluster)
    ports = listening()
    assert len(ports) >= 3
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(timeout=30) == 143
    check_nothing_is_left(ports, shared)
    driver = attached_driver(tmp_path, cluster)
    ports = listening()
    driver.kill()
    driver.wait()
    check_nothing_is_left(ports, shared)


def attached_driver(tmp_path: Path, cluster: Cluster) -> subprocess.Popen[str]:
    """Start `raytrain run` on the cluster; return it once it trains."""
    file = tmp_path / "attached.yaml"
    file.write_text(job(tmp_path, name="attached", args={"pad_s": PAD_S}, workers=Workers(min=2), steps=5000).to_yaml())
    events = tmp_path / "runs" / "attached" / "events.ndjson"
    driver = subprocess.Popen(
        [sys.executable, "-m", "raytrain_plus", "run", str(file), "--fresh", "--address", cluster.address],
        cwd=TASKS,
        env={**os.environ, "PYTHONPATH": str(TASKS.parents[1])},
        stdout=subprocess.DEVNULL,
        text=True,
    )
    deadline = time.monotonic() + 60
    begun = time.time()
    while time.monotonic() < deadline:
        if events.exists() and events.stat().st_mtime > begun and "step_committed" in events.read_text():
            return driver
        time.sleep(0.05)
    raise AssertionError("the attached run made no step")


def listening() -> set[tuple[str, int]]:
    """Return host and port of each socket on which the run's workers and controller listen."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(word in " ".join(process.cmdline()) for word in ("WorkerActor", "Controller")):
                opened = process.net_connections("tcp")
                found |= {tuple(one.laddr) for one in opened if one.status == psutil.CONN_LISTEN}
    return found


def check_nothing_is_left(ports: Collection[tuple[str, int]], shared: Collection[str], within_s: float = 10) -> None:
    """Check that no actor, placement group or process of ours is left, and no CPU or object store memory is held.

    No process listens at `ports`, and shared memory holds only the files `shared`.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        actors = [actor["ActorClassName"] for actor in state.actor_table(None).values() if actor["State"] != "DEAD"]
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        ours = [name for name in names_of_processes() if "WorkerActor" in name or "Controller" in name]
        everybody = {tuple(one.laddr) for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        files = sorted(set(os.listdir(SHARED_MEMORY)) - set(shared))
        left = (sorted(set(actors) - RAYS_OWN), groups, ours, sorted(everybody & set(ports)), files)
        there, free = ray.cluster_resources(), ray.available_resources()
        held = {name: there[name] - free.get(name, 0) for name in ("CPU", "object_store_memory")}
        if left == ([], [], [], [], []) and held["CPU"] == 0 and held["object_store_memory"] < 1 << 20:
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: {left}, held: {held}")


def names_of_processes() -> list[str]:
    """Return the command lines of all processes that this test started directly or indirectly."""
    names = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline()))
    return names


@pytest.mark.slow
def test_a_run_that_cannot_start_reports_what_it_waits_for_and_gives_up(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")

    @ray.remote(num_cpus=2)
    class Holder:
        def here(self) -> bool:
            return True

    cluster.add_node(num_cpus=2)
    holder = Holder.remote()
    assert ray.get(holder.here.remote())
    run = Run(job(tmp_path, workers=Workers(min=4), elastic=Elastic(wait_s=8)))
    with pytest.raises(RunError, match="only 2 of at least 4 workers"):
        run.finish()
    assert not (tmp_path / "runs" / "run").exists()
