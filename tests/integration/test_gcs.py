"""Ray's head service (GCS) keeps its tables in Redis, dies, and is started again: the run does not notice.

Something beside Ray starts it again on a real cluster, for example KubeRay.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from raytrain_plus import Data, Job, Workers
from tests.integration.elastic import Run, born, ended, job, raylets
from tests.integration.head import free_port
from tests.integration.tasks import write_data

REDIS = shutil.which("redis-server")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(REDIS is None, reason="needs redis-server: apt-get install redis-server"),
]

AWAY_S = 12.0
"""Seconds for which there is no GCS; more than a controller may be silent."""
STEPS = 1000


@contextmanager
def redis() -> Iterator[int]:
    """Start a Redis server that keeps nothing on disk; yield its port."""
    folder, port = tempfile.mkdtemp(prefix="redis"), free_port()
    assert REDIS is not None
    words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([REDIS, *words], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not answers(port):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait(10)
        shutil.rmtree(folder)


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as client:
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of two workers' nodes beside the head, whose tables are in Redis."""
    with redis() as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_REDIS_ADDRESS", f"127.0.0.1:{port}")
        patch.setenv("RAY_external_storage_namespace", f"test-{port}")
        with raylets(2) as made:
            yield made


def without_gcs(cluster: Cluster, meanwhile: Callable[[], None]) -> None:
    """Kill the GCS, and start it again after `AWAY_S`."""
    head = cluster.head_node
    head.kill_gcs_server()
    time.sleep(AWAY_S / 2)
    meanwhile()
    time.sleep(AWAY_S / 2)
    head.start_gcs_server()


def exact(folder: Path, workers: int, pad_s: float) -> Job:
    write_data(folder / "data")
    return job(
        folder,
        reduction="exact",
        steps=STEPS,
        workers=Workers(min=workers, max=workers),
        data=Data(path=str(folder / "data"), batch_size=48, shards=4),
        args={"pad_s": pad_s},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Any:
    return ended(Run(exact(tmp_path_factory.mktemp("undisturbed"), 1, 0.0)))


def started(tmp_path: Path) -> Run:
    """Start a run of two workers that lasts longer than the GCS is away."""
    run = Run(exact(tmp_path, 2, 0.004))
    run.until_size(2)
    run.until_step(40)
    return run


def check(run: Run, expected: Any, before: dict[int, float], controllers: int) -> None:
    """Check that the run ended as the undisturbed one, with the same workers, and that no step was made twice."""
    assert ended(run) == expected
    assert len(run.events("step_committed")) == STEPS
    assert {member["pid"] for member in run.members()} == before.keys()
    assert not run.events("worker_lost")
    assert not run.events("resumed")
    assert len(run.events("controller_started")) == controllers


def kill_controller(run: Run) -> None:
    os.kill(run.events("controller_started")[-1]["pid"], signal.SIGKILL)


def test_a_gcs_that_is_started_again_costs_no_step(tmp_path: Path, cluster: Cluster, undisturbed: Any) -> None:
    run = started(tmp_path)
    before, seen = born(run.members()), []
    without_gcs(cluster, lambda: seen.append(run.committed()))
    # The controller hears of steps meanwhile.
    assert run.committed() > seen[0]
    check(run, undisturbed, before, 1)


def test_the_controller_dies_while_there_is_no_gcs(tmp_path: Path, cluster: Cluster, undisturbed: Any) -> None:
    run = started(tmp_path)
    before = born(run.members())
    without_gcs(cluster, lambda: kill_controller(run))
    run.until_told("controller_started", 2)
    check(run, undisturbed, before, 2)


def test_the_controller_dies_once_the_gcs_is_back(tmp_path: Path, cluster: Cluster, undisturbed: Any) -> None:
    run = started(tmp_path)
    before = born(run.members())
    without_gcs(cluster, lambda: None)
    kill_controller(run)
    run.until_told("controller_started", 2)
    check(run, undisturbed, before, 2)


def test_a_worker_dies_while_there_is_no_gcs(tmp_path: Path, cluster: Cluster, undisturbed: Any) -> None:
    run = started(tmp_path)
    without_gcs(cluster, lambda: run.kill(run.members()[1]))
    run.until_told("recovered")
    assert ended(run) == undisturbed
    assert len(run.events("step_committed")) == STEPS
    assert not run.events("resumed")
