"""Models in stages on a cluster of raylets: the bits of one worker, through losses, replacements and repartitions."""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from raytrain_plus import Checkpoint, Data, Elastic, Evaluate, Job, Parallel, Result, Workers, resume
from raytrain_plus.audit.audit import audit
from tests.integration.conftest import TASKS
from tests.integration.elastic import Event, Run, born, job, raylets
from tests.integration.tasks import write_data
from tests.support.elastic_runs import drain

pytestmark = pytest.mark.timeout(240)

SLOW = pytest.mark.slow
PAD_S = 0.003


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with raylets(4) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def four_nodes(cluster: Cluster) -> None:
    """Every test begins with four nodes."""
    cluster.wait_for_nodes()
    while len(cluster.worker_nodes) < 4:
        cluster.add_node(num_cpus=1)


def staged(tmp_path: Path, size: int, pipeline: int, schedule: Any = "1f1b", **changes: Any) -> Job:
    """Return a job of 80 steps with exact sums, evaluations, BatchNorm, dropout, AdamW, a scheduler and clipping."""
    write_data(tmp_path / "data")
    write_data(tmp_path / "held", rows=90, files=1, seed=3)
    settings: dict[str, Any] = {
        "data": Data(path=str(tmp_path / "data"), batch_size=48, shards=4),
        "steps": 80,
        "reduction": "exact",
        "evaluate": Evaluate(path=str(tmp_path / "held"), every_steps=30),
        "workers": Workers(min=size),
        "parallel": Parallel(pipeline=pipeline, schedule=schedule, microbatches=4),
    }
    return job(tmp_path, **{**settings, **changes})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Result:
    """Return the result of the same job on one worker."""
    return Run(staged(tmp_path_factory.mktemp("alone"), 1, 1)).finish()


def check(run: Run, alone: Result) -> Result:
    """Check that the final state has the bits of one worker, and that every row was used once."""
    result = run.finish()
    check_end(result, alone)
    run.losses()
    return result


def check_end(result: Result, alone: Result) -> None:
    assert (result.status, result.error) == ("finished", None)
    assert (result.state_sha256, result.metrics) == (alone.state_sha256, alone.metrics)
    found = audit(result.path)
    assert found.clean, found.faults


def at(run: Run, replica: int, stage: int) -> Event:
    """Return the member at a seat of the newest view."""
    return next(member for member in run.members() if (member["replica"], member["stage"]) == (replica, stage))


@pytest.mark.parametrize(
    ("size", "pipeline", "schedule", "collective"),
    [
        pytest.param(2, 2, "gpipe", "horovod", marks=SLOW),
        pytest.param(2, 2, "zero-bubble", "horovod", marks=SLOW),
        pytest.param(4, 2, "1f1b", "horovod", marks=SLOW),
        pytest.param(4, 2, "interleaved", "torch", marks=SLOW),
        pytest.param(4, 4, "1f1b", "horovod", marks=SLOW),
    ],
)
def test_the_bits_are_those_of_one_worker(
    tmp_path: Path, alone: Result, size: int, pipeline: int, schedule: str, collective: str
) -> None:
    run = Run(staged(tmp_path, size, pipeline, schedule, collective=collective))
    check(run, alone)
    members = run.members()
    assert {(member["replica"], member["stage"]) for member in members} == {
        (replica, stage) for replica in range(size // pipeline) for stage in range(pipeline)
    }
    of_a_replica = [member["params"] for member in members if member["replica"] == 0]
    assert sum(of_a_replica) == 6 * 16 + 2 * 16 + 16 * 3 + 3
    assert len(run.events("evaluated")) == 4


def elastic(tmp_path: Path, spares: int = 0, **changes: Any) -> tuple[Run, dict[int, float]]:
    """Start two replicas of two stages; return the run after some steps, and its processes."""
    workers = Workers(min=2, max=4 - 2 * bool(spares), spares=spares)
    run = Run(staged(tmp_path, 4, 2, **{"args": {"pad_s": PAD_S}, "workers": workers, **changes}))
    before = born(run.until_size(run.job.workers.max or run.job.workers.min))
    run.until_step(10)
    return run, before


class Forger:
    """A foreign process on the same machine that tries to publish and to read at every new port.

    It begins when the run has its folder: then the rendezvous are served.
    """

    def __init__(self, folder: Path) -> None:
        self.answers: Counter[str] = Counter()
        self._folder = folder
        self._known: set[tuple[str, int]] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._forge)

    def __enter__(self) -> Forger:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join(30)

    def _forge(self) -> None:
        while not self._end.wait(0.1):
            listening = self._listening()
            if self._folder.exists():
                break
            # All of these ports are older than the first rendezvous.
            self._known = listening
        while not self._end.wait(0.02):
            listening = self._listening()
            new, self._known = listening - self._known, listening
            for place in new:
                for method, path in (
                    ("PUT", "/global/0"),
                    ("PUT", "/torch/1"),
                    ("GET", "/global/0"),
                    ("GET", "/torch/0"),
                ):
                    lines = (f"{method} {path} HTTP/1.1", f"Authorization: Bearer 0.{'0' * 32}", "Content-Length: 6")
                    said = self._say(place, "\r\n".join((*lines, "", "forged")).encode())
                    if not said.startswith(b"HTTP/1.1 "):
                        break
                    self.answers[f"{method} {said[9:12].decode()}"] += 1

    @staticmethod
    def _say(place: tuple[str, int], what: bytes) -> bytes:
        with contextlib.suppress(OSError), socket.create_connection(place, timeout=1) as connection:
            connection.sendall(what)
            return connection.recv(100)
        return b""

    @staticmethod
    def _listening() -> set[tuple[str, int]]:
        found = set()
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            if state == "0A":
                address, port = place.split(":")
                found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
        return found


class Canary:
    """An object that creates a file in the process that unpickles it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._file), "w")


@pytest.mark.slow
def test_a_forger_on_the_same_machine_is_refused_and_the_run_continues(tmp_path: Path, alone: Result) -> None:
    canary = tmp_path / "canary"
    pickled = pickle.dumps(Canary(canary))
    with Forger(tmp_path / "runs" / "run") as forger, contextlib.ExitStack() as stack:
        run = Run(staged(tmp_path, 4, 2, collective="horovod", task="tasks:Encodes", args={"pad_s": PAD_S}))
        run.until(lambda: run.committed() >= 5, "step 5", 120)
        for member in run.members():
            for one in psutil.Process(member["pid"]).net_connections("tcp"):
                if one.status != psutil.CONN_LISTEN:
                    continue
                for number in range(3):
                    # The number of a connection in Gloo's format, and a message's length.
                    said = stack.enter_context(socket.create_connection(one.laddr[:2], timeout=5))
                    said.sendall(struct.pack("<qq", number, len(pickled)) + pickled)
        check(run, alone)
    assert not canary.exists()
    # Two rings and two replicas, with four attempts each.
    assert set(forger.answers) == {"PUT 403", "GET 403"}, forger.answers
    assert forger.answers["PUT 403"] >= 8
    assert len(run.events("view_formed")) == 1


PLACES = [(replica, stage) for replica in range(2) for stage in range(2)]


@pytest.mark.parametrize(
    ("replica", "stage"), [pytest.param(*place, marks=() if place == (1, 0) else SLOW) for place in PLACES]
)
def test_a_killed_stage_takes_its_replica_out_until_it_is_replaced(
    tmp_path: Path, alone: Result, replica: int, stage: int
) -> None:
    run, before = elastic(tmp_path)
    victim = at(run, replica, stage)
    run.kill(victim)
    recovered = run.until_told("recovered")
    assert recovered["steps_lost"] == recovered["steps_recomputed"] == 0
    assert len(run.events("view_formed")[1]["members"]) == 2
    check(run, alone)
    healthy = [pid for pid in before if pid != victim["pid"]]
    kept = {member["pid"] for view in run.events("view_formed")[1:] for member in view["members"]}
    assert kept >= set(healthy), "who was left of the broken replica trains on, once there is another"
    assert len(run.events("worker_lost")) == 1


WHERE = ("F0", "F3", "B4", "B7", "summed", "agreed", "exchanged", "apply", "applied")
"""Warm-up, steady state, drain; then between the sums, the ring's number, the replica's exchange and the apply."""


@SLOW
@pytest.mark.parametrize(("where", "stage"), [(where, stage) for where in WHERE for stage in (0, 1)])
def test_a_stage_that_dies_anywhere_in_a_step(tmp_path: Path, alone: Result, where: str, stage: int) -> None:
    # "agreed" is reached once for each stage of the replica that it tells.
    after = 40 if where == "agreed" else 20
    args = {"fault": f"{where}:kill:{after}", "stage": stage, "pad_s": PAD_S}
    run, before = elastic(tmp_path, task="tasks:FaultyStage", args=args)
    recovered = run.until_told("recovered")
    [lost] = run.events("worker_lost")
    assert recovered["steps_lost"] == recovered["steps_recomputed"] == 0
    members = {member["pid"]: member["stage"] for member in run.events("view_formed")[0]["members"]}
    assert members[lost["pid"]] == stage
    check(run, alone)
    kept = {member["pid"] for view in run.events("view_formed")[1:] for member in view["members"]}
    assert kept >= before.keys() - {lost["pid"]}
    assert len(run.events("worker_lost")) == 1


@SLOW
@pytest.mark.parametrize("killed", [0, 1])
def test_a_wholly_frozen_stage_has_the_bits_of_one_worker(tmp_path: Path, cluster: Cluster, killed: int) -> None:
    (tmp_path / "alone").mkdir()
    alone = Run(staged(tmp_path / "alone", 1, 1, task="tasks:Frozen")).finish()
    parallel = Parallel(pipeline=2, microbatches=4, partition=["first", "drop"])
    run, _ = elastic(tmp_path, task="tasks:Frozen", parallel=parallel)
    trained = {member["stage"]: member["params"] for member in run.members()}
    assert trained == {0: 0, 1: 16 * 3 + 3}
    victim = at(run, 1, killed)
    run.kill(victim)
    recovered = run.until_told("recovered")
    assert recovered["steps_lost"] == recovered["steps_recomputed"] == 0
    check(run, alone)


@SLOW
def test_a_spare_takes_the_place_of_any_stage(tmp_path: Path, cluster: Cluster, alone: Result) -> None:
    extra = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    run, before = elastic(tmp_path, workers=Workers(min=4, max=4, spares=1))
    [spare] = run.until(lambda: run.events("view_formed")[-1]["spares"], "a spare")
    victim = at(run, 0, 1)
    run.kill(victim)
    recovered = run.until_told("recovered")
    assert [one["worker"] for one in recovered["replaced"]] == [spare]
    assert {one["pid"] for one in recovered["kept"]} == set(before) - {victim["pid"]}
    assert at(run, 0, 1)["worker"] == spare
    assert recovered["steps_lost"] == 0
    check(run, alone)
    cluster.remove_node(extra)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_without_another_holder_comes_from_its_buddys_memory(tmp_path: Path, alone: Result, stage: int) -> None:
    run, before = elastic(tmp_path, workers=Workers(min=2))
    victim = at(run, 0, stage)
    run.kill(victim)
    recovered = run.until_told("recovered")
    assert recovered["steps_lost"] == 0
    assert {one["pid"] for one in recovered["kept"]} == set(before) - {victim["pid"]}
    result = check(run, alone)
    assert not run.events("resumed")
    assert result.copies > 20


@pytest.mark.slow
def test_the_model_is_repartitioned_from_copies_if_no_worker_replaces_a_stage(
    tmp_path: Path, cluster: Cluster, alone: Result
) -> None:
    for one in list(cluster.worker_nodes)[2:]:
        cluster.remove_node(one)
    run = Run(staged(tmp_path, 2, 2, args={"pad_s": PAD_S}, workers=Workers(min=1, max=2)))
    run.until_size(2)
    run.until_step(10)
    victim = at(run, 0, 1)
    node = next(one for one in cluster.worker_nodes if one.node_id == victim["node"])
    cluster.remove_node(node)
    [whole] = run.until_size(1)
    assert whole["stage"] == 0
    assert run.until_told("recovered")["steps_lost"] == 0
    check(run, alone)
    assert not run.events("resumed")


@SLOW
def test_what_one_worker_holds_alone_is_in_its_spares_memory(tmp_path: Path, alone: Result) -> None:
    run = Run(staged(tmp_path, 1, 1, args={"pad_s": PAD_S}, workers=Workers(min=1, max=1, spares=1)))
    run.until_size(1)
    [spare] = run.until(lambda: run.events("view_formed")[-1]["spares"], "a spare")
    run.until_step(10)
    run.kill(at(run, 0, 0))
    recovered = run.until_told("recovered")
    assert recovered["steps_lost"] == 0
    assert [one["worker"] for one in recovered["replaced"]] == [spare]
    check(run, alone)
    assert not run.events("resumed")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stage"), [(2, 1), (2, 0), (4, 0), (4, 1)])
def test_steps_that_overlap_are_committed_together_and_lost_together(tmp_path: Path, size: int, stage: int) -> None:
    job = staged(
        tmp_path,
        size,
        2,
        "pipedream",
        task="tasks:Flowing",
        args={"pad_s": PAD_S},
        reduction="ring",
        clip_norm=None,
        parallel=Parallel(pipeline=2, schedule="pipedream", microbatches=4, commit_every=8),
        workers=Workers(min=2, max=size),
    )
    run = Run(job)
    before = born(run.until_size(size))
    run.until_step(10)
    victim = at(run, 0, stage)
    run.kill(victim)
    recovered = run.until_told("recovered")
    assert recovered["steps_lost"] == 0, "of those that were committed"
    # If no other worker holds a stage, the copies of the newest steps may still have been on their way.
    assert recovered["steps_recomputed"] in ((0,) if size == 4 else (0, 8))
    assert {one["pid"] for one in recovered["kept"]} <= set(before) - {victim["pid"]}
    result = run.finish()
    assert (result.status, result.error) == ("finished", None)
    losses = run.losses()
    assert len(losses) == 80
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8])
    assert not run.events("resumed")
    found = audit(result.path)
    assert found.clean, found.faults
    kept = {member["pid"] for view in run.events("view_formed")[1:] for member in view["members"]}
    assert kept >= set(before) - {victim["pid"]}


@pytest.mark.slow
def test_two_runs_of_a_pipedream_job_train_alike_in_the_counted_or_the_given_partition(tmp_path: Path) -> None:
    def trained(name: str, partition: list[str] | None) -> tuple[list[int], list[float]]:
        (tmp_path / name).mkdir()
        job = staged(
            tmp_path / name,
            2,
            2,
            "pipedream",
            task="tasks:Flowing",
            steps=16,
            reduction="ring",
            clip_norm=None,
            evaluate=None,
            parallel=Parallel(pipeline=2, schedule="pipedream", microbatches=4, commit_every=8, partition=partition),
        )
        run = Run(job)
        assert run.finish().status == "finished"
        assert all("repartitioned" not in view for view in run.events("view_formed"))
        return [member["params"] for member in run.members()], run.losses()

    counted = trained("one", None)
    assert len(counted[1]) == 16
    assert trained("two", None) == counted
    params, losses = trained("three", ["first", "last"])
    assert params == [6 * 16 + 2 * 16, 16 * 3 + 3]
    assert counted[0] != params
    assert losses != counted[1]


@SLOW
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_without_another_holder_is_read_from_the_checkpoint(tmp_path: Path, alone: Result, stage: int) -> None:
    # The only copy is that of the first step, which is older.
    settings = {"checkpoint": Checkpoint(every_steps=30), "elastic": Elastic(wait_s=30, copy_every=1000)}
    run, _ = elastic(tmp_path, workers=Workers(min=2), **settings)
    # Between two checkpoints: the survivors hold a step from which the run cannot continue.
    run.until_step(run.until_told("checkpoint_saved")["step"] + 3)
    run.kill(at(run, 0, stage))
    resumed = run.until_told("resumed")
    assert resumed["checkpoint"] is not None
    check(run, alone)


def test_a_model_is_repartitioned_into_fewer_stages_and_back(tmp_path: Path, cluster: Cluster, alone: Result) -> None:
    parallel = Parallel(pipeline=2, microbatches=4, partition=["first", "last"])
    run = Run(staged(tmp_path, 2, 2, args={"pad_s": 2 * PAD_S}, workers=Workers(min=1, max=2), parallel=parallel))
    params = [member["params"] for member in run.until_size(2)]
    assert params == [6 * 16 + 2 * 16, 16 * 3 + 3]
    run.until_step(10)
    nodes = {one.node_id: one for one in cluster.worker_nodes}
    going = nodes[at(run, 0, 0)["node"]]
    for one in nodes.values():
        # So that no other node has room.
        if one.node_id not in (going.node_id, at(run, 0, 1)["node"]):
            cluster.remove_node(one)
    drain(cluster, going.node_id, 10.0)
    [whole] = run.until_size(1)
    assert (whole["replica"], whole["stage"], whole["params"]) == (0, 0, 6 * 16 + 2 * 16 + 16 * 3 + 3)
    cluster.remove_node(going)
    cluster.add_node(num_cpus=1)
    assert [(member["stage"], member["params"]) for member in run.until_size(2)] == list(enumerate(params))
    result = check(run, alone)
    assert [view.get("repartitioned", False) for view in run.events("view_formed")] == [False, True, False]
    assert result.recoveries == 0
    first, *others = [event["moved_bytes"] for event in run.events("view_formed")]
    # One worker took the first stage, and then another one the second: weights and AdamW's averages in four bytes each,
    # five step counts, and the buffers of BatchNorm.
    assert (first, sum(others)) == (0, 3 * 4 * whole["params"] + 5 * 4 + 2 * 4 * 16 + 8)


@SLOW
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([(4, 2), (4, 4)], id="2x2, 1x4"),
        pytest.param([(2, 1), (4, 2), (1, 1), (4, 4), (4, 2)], id="2x1, 2x2, 1x1, 1x4, 2x2"),
    ],
)
def test_checkpoints_of_one_layout_are_those_of_any(
    tmp_path: Path, alone: Result, layouts: list[tuple[int, int]]
) -> None:
    for number, (size, pipeline) in enumerate(layouts):
        steps = 80 if number + 1 == len(layouts) else 10 + 13 * number
        made = staged(tmp_path, size, pipeline, steps=steps)
        if number:
            result = resume(made.storage + "/run", overrides(made), quiet=True, roots=[TASKS])
        else:
            result = Run(made).finish()
    check_end(result, alone)


def overrides(made: Job) -> list[str]:
    """Return the settings of a job that may change when it resumes."""
    return [
        f"steps={made.steps}",
        f"workers.min={made.workers.min}",
        f"parallel.pipeline={made.parallel.pipeline}",
    ]
