"""Workers leave a machine before its cloud preempts it, and lose no step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from ray.cluster_utils import Cluster

from raytrain_plus import Workers
from raytrain_plus.audit.audit import audit
from raytrain_plus.ray_compat import draining_nodes
from tests.integration.elastic import Run, born, job, raylets
from tests.integration.network import raylet
from tests.integration.tasks import write_data
from tests.support.elastic_runs import PAD_S, alive, losses_of_an_undisturbed_run
from tests.unit.workers.clouds import Service, speaking

pytestmark = pytest.mark.timeout(240)

NOTICE_S = 20.0
DRAIN_S = 12
"""As in clusters/kuberay."""
STEPS = 80


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with raylets(3) as cluster:
        yield cluster


@pytest.fixture
def clouds(cluster: Cluster) -> Iterator[dict[str, Service]]:
    """Start a metadata service of AWS for each machine; yield node id -> service."""
    with ExitStack() as stack:
        yield {node.node_id: stack.enter_context(speaking("AWS")) for node in cluster.worker_nodes}


def test_a_preempted_machine_is_left_before_its_end(tmp_path: Path, clouds: dict[str, Service]) -> None:
    write_data(tmp_path / "data")
    expected = losses_of_an_undisturbed_run(tmp_path, steps=STEPS)
    places = {node: list(service.place) for node, service in clouds.items()}
    args = {"pad_s": PAD_S, "cloud": "AWS", "services": places}
    run = Run(job(tmp_path, task="tasks:Noticed", args=args, workers=Workers(min=1, max=3), steps=STEPS))
    leaver, *others = run.until_size(3)
    before = born(others)
    run.until_step(10)
    run.until(lambda: all(len(service.seen) >= 4 for service in clouds.values()), "two looks of each")
    assert draining_nodes() == {}
    goes = float(round(time.time() + NOTICE_S))
    clouds[leaver["node"]].goes = goes
    notice = run.until_told("drain_notice")
    assert (notice["node"], notice["deadline"]) == (leaver["node"], goes)
    assert draining_nodes() == {leaver["node"]: goes}
    run.until(lambda: leaver["pid"] not in [member["pid"] for member in run.members()], "a group without it")
    run.until(lambda: not alive(leaver["pid"]), "the end of its process")
    assert time.time() < goes
    assert {pid: psutil.Process(pid).create_time() for pid in before} == before
    result = run.finish()
    assert (result.status, result.steps, result.recoveries) == ("finished", STEPS, 0)
    assert run.events("worker_lost") == run.events("resumed") == []
    assert len(run.events("drain_notice")) == 1
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-5)
    assert audit(result.path).clean


@pytest.mark.slow
def test_a_terminating_pod_is_left_before_its_end(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    told = ["env", f"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S={DRAIN_S}"]
    with raylets(1) as cluster, raylet(told, cluster.address) as pod:
        run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=1, max=2), steps=4 * STEPS))
        members = run.until_size(2)
        [node] = cluster.worker_nodes
        [stays] = [member for member in members if member["node"] == node.node_id]
        [leaver] = [member for member in members if member is not stays]
        run.until_step(10)
        pod.terminate()
        goes = time.time() + DRAIN_S
        notice = run.until_told("drain_notice")
        assert (notice["node"], notice["deadline"]) == (leaver["node"], pytest.approx(goes, abs=1))
        # The pod ends when no worker is left on it.
        pod.wait(DRAIN_S - 2)
        assert run.committed() < 4 * STEPS - 1
        result = run.finish()
    assert (result.status, result.steps, result.recoveries) == ("finished", 4 * STEPS, 0)
    assert [member["pid"] for member in run.members()] == [stays["pid"]]
    assert run.events("worker_lost") == run.events("resumed") == []
    assert run.losses()[-1] < run.losses()[0]
    assert audit(result.path).clean
