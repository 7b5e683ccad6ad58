"""If all holders of the state leave, or cannot finish a step, the state is saved before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ray.cluster_utils import Cluster

from raytrain_plus import Workers, resume
from raytrain_plus.audit.audit import audit
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, job, raylets
from tests.integration.tasks import write_data
from tests.support.elastic_runs import PAD_S, drain, losses_of_an_undisturbed_run

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with raylets(2) as cluster:
        yield cluster


@pytest.mark.slow
def test_when_all_machines_leave_no_step_is_lost_and_new_ones_continue(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    expected = losses_of_an_undisturbed_run(tmp_path)
    run = Run(job(tmp_path, args={"pad_s": PAD_S}, workers=Workers(min=2)))
    members = run.until_size(2)
    run.until_step(10)
    nodes = [node for node in cluster.worker_nodes if node.node_id in [member["node"] for member in members]]
    for node in nodes:
        drain(cluster, node.node_id, 13)
    # It continues to train while that is safe.
    run.until_step(run.committed() + 5)
    saved = run.until_told("checkpoint_saved")
    assert saved["step"] == run.committed() < 199
    for node in nodes:
        cluster.remove_node(node, allow_graceful=False)
    run.until_told("worker_lost", 2)
    for _ in nodes:
        cluster.add_node(num_cpus=1)
    result = run.finish()
    assert (result.status, result.steps) == ("finished", 200)
    assert not run.events("resumed")
    np.testing.assert_allclose(run.losses(), expected, rtol=0, atol=1e-5)
    assert audit(result.path).clean


@pytest.mark.slow
def test_a_run_that_is_stopped_in_a_long_step_saves_the_state_before_it(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    # From the sixth step on, both compute for half a minute.
    slow = {"fault": "loss:sleep8:20", "always": True}
    file = tmp_path / "run.yaml"
    file.write_text(job(tmp_path, args=slow, workers=Workers(min=2), steps=50).to_yaml())
    driver = subprocess.Popen(
        [sys.executable, "-m", "raytrain_plus", "run", str(file), "--address", cluster.address],
        cwd=TASKS,
        env={**os.environ, "PYTHONPATH": str(TASKS.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("reached-*"))) < 2:
        assert time.monotonic() < deadline, "the long step was not reached"
        time.sleep(0.05)
    driver.send_signal(signal.SIGTERM)
    said, _ = driver.communicate(timeout=30)
    assert driver.returncode == 143, said
    # It did not wait for the end of that step.
    result = json.loads((tmp_path / "runs" / "run" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("stopped", 5)
    assert result["state_sha256"]
    # The run continues from there.
    file.write_text(job(tmp_path, workers=Workers(min=2), steps=50).to_yaml())
    ended = resume(tmp_path / "runs" / "run", [f"args={{folder: {tmp_path}}}"], quiet=True, roots=[TASKS])
    assert (ended.status, ended.steps) == ("finished", 50)
    assert audit(ended.path).clean
