"""Detached runs survive the process that started them, and can be followed, stopped and rescaled from elsewhere."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from raytrain_plus import RunError, attach
from raytrain_plus.launch.cluster import NAMESPACE
from raytrain_plus.runs.folder import lease_holder
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS, background
from tests.integration.elastic import raylets
from tests.integration.tasks import write_data
from tests.processes import still_alive
from tests.support.commands import command, losses, outliving, raytrain, until, write_job

pytestmark = pytest.mark.timeout(180)


@pytest.mark.slow
def test_a_detached_run_on_one_machine(tmp_path: Path, nothing_goes_on: None) -> None:
    write_data(tmp_path / "data")
    job, folder = write_job(tmp_path, task="tasks:Sleeps", steps=60), tmp_path / "runs" / "job"
    code, out, err = raytrain("run", job, "--detach", "--json")
    assert (code, json.loads(out)) == (0, {"name": "job", "path": str(folder)}), err
    processes = background()
    assert len(processes) > 3
    following = command("attach", folder)
    watching = command("attach", folder)
    until(lambda: len(losses(folder)) > 5, "5 steps")
    assert "<run job: running (process " in repr(attach(folder))
    # The starting process has ended; a watching one may end too.
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("job: 60 steps")
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=10)
    assert (watching.returncode, f"the run continues; stop it with: raytrain stop '{folder}'" in err) == (130, True), (
        err
    )
    code, _, err = raytrain("run", job, "--detach")
    assert (code, "a run with this name is already running" in err) == (2, True), err
    result = attach(folder).result(timeout_s=60)
    assert (result.status, result.exit_code, result.steps) == ("finished", 0, 60)
    out, err = following.communicate(timeout=10)
    assert following.returncode == 0, err
    assert "2 workers ready" in out
    assert "job finished: 60 steps" in out
    assert len(losses(folder)) == 60
    # Watched by another process, later.
    code, out, _ = raytrain("attach", folder, "--json")
    assert (code, json.loads(out)["state_sha256"]) == (0, result.state_sha256)
    code, out, _ = raytrain("logs", "job", "--storage", tmp_path / "runs")
    assert code == 0
    assert "2 workers ready" in out
    # A finished run is not run again.
    code, _, err = raytrain("run", job, "--detach")
    assert code == 0, err
    assert not still_alive(processes, 10)


@pytest.mark.slow
def test_a_run_stopped_from_elsewhere_is_saved_and_resumes_later(tmp_path: Path, nothing_goes_on: None) -> None:
    write_data(tmp_path / "data")
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test-alone")
    token.chmod(0o600)
    # The cluster requires a token; the process that stops the run has it.
    asking = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    job, folder = write_job(tmp_path, task="tasks:Sleeps", steps=5000), tmp_path / "runs" / "job"
    code, _, err = raytrain("run", job, "--detach", **asking)
    assert code == 0, err
    until(lambda: len(losses(folder)) > 5, "5 steps")
    code, out, err = raytrain("stop", folder, **asking)
    assert code == 0, err
    made = len(losses(folder))
    assert out == f"job: stopped after {made:,} steps\nstate after step {made:,} saved\n"
    assert [one.step for one in attach(folder).status().checkpoints] == [made - 1]
    code, _, _ = raytrain("attach", folder)
    assert code == 143
    code, _, err = raytrain("stop", folder)
    assert (code, "the run is not running" in err) == (2, True), err
    code, out, err = raytrain("resume", folder, "--set", f"steps={made + 3}", "--json")
    assert (code, json.loads(out)["steps"]) == (0, made + 3), err
    until(lambda: not background(), "the end of its processes")


@pytest.mark.slow
def test_nothing_is_left_of_a_run_whose_background_process_is_killed(tmp_path: Path, nothing_goes_on: None) -> None:
    """Ray's agents outlived it by more than 40 s."""
    write_data(tmp_path / "data")
    code, _, err = raytrain("run", write_job(tmp_path, task="tasks:Sleeps", steps=5000), "--detach")
    assert code == 0, err
    processes = background()
    processes[0].kill()
    assert not outliving(processes)
    # Until its lease has expired, it might be replaced.
    left = attach(tmp_path / "runs" / "job")
    until(lambda: left.status().state.startswith("unfinished (its controller died: process "), "its end")


def test_what_prevents_a_run_from_starting_is_reported_at_once(tmp_path: Path, nothing_goes_on: None) -> None:
    write_data(tmp_path / "data")
    job = write_job(tmp_path, workers={"min": 1, "cpus": 1, "gpus": 1})
    code, out, err = raytrain("run", job, "--detach")
    assert (code, out) == (2, "")
    assert "the cluster has room for 0 workers of 1 CPU and 1 GPU each" in err
    assert not (tmp_path / "runs" / "job").exists()
    until(lambda: not background(), "the end of its processes")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with raylets(2, cpus=1) as made:
        yield made


DRIVER = """
import sys, time
from pathlib import Path
from raytrain_plus import start
from raytrain_plus.job.yaml import load_job
job, roots = load_job(sys.argv[1], [])
print(start(job, address=sys.argv[2], roots=roots), flush=True)
time.sleep(600)
"""


def begun(job: Path, cluster: Cluster) -> subprocess.Popen[str]:
    """Start a driver on the cluster that starts a run, and stays."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(job), cluster.address], cwd=TASKS, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline().startswith("<run job: running")
    return driver


def left_alone(tmp_path: Path, cluster: Cluster, **changes: Any) -> Path:
    """Return the folder of a run on the cluster whose driver has been killed."""
    write_data(tmp_path / "data")
    driver = begun(write_job(tmp_path, task="tasks:Sleeps", **changes), cluster)
    driver.kill()
    driver.communicate()
    return tmp_path / "runs" / "job"


def nothing_is_held() -> bool:
    """Return whether no actor or CPU of ours is held; Ray Data's own cluster-wide actors stay."""
    names = [one for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    return not names and ray.available_resources().get("CPU") == 2


def test_on_a_cluster_the_death_of_the_driver_changes_nothing(tmp_path: Path, cluster: Cluster) -> None:
    folder = left_alone(tmp_path, cluster, steps=60)
    at = len(losses(folder))
    until(lambda: len(losses(folder)) > at + 10, "10 steps more")
    other = write_job(tmp_path, storage=str(tmp_path / "others"))
    code, _, err = raytrain("run", other, "--set", "name=job", "--address", cluster.address)
    assert (code, f"name: job: a run with this name is already running on this cluster (in {folder})" in err) == (
        2,
        True,
    ), err
    result = attach(folder).result(timeout_s=60)
    assert (result.status, len(losses(folder)), result.recoveries) == ("finished", 60, 0)
    until(nothing_is_held, "its room to be free again")


@pytest.mark.slow
def test_a_detached_run_is_rescaled(tmp_path: Path, cluster: Cluster) -> None:
    folder = left_alone(tmp_path, cluster, steps=5000, workers={"min": 1})
    handle = attach(folder)

    def sizes() -> list[int]:
        return [len(view["members"]) for view in handle.events("view_formed")]

    assert sizes() == [1]
    handle.rescale(max=2)
    until(lambda: sizes() == [1, 2], "a second worker")
    at = len(losses(folder))
    until(lambda: len(losses(folder)) > at + 3, "3 steps")
    with pytest.raises(RunError, match=r"workers\.max"):
        handle.rescale(min=4, max=3)
    handle.rescale(max=1)
    until(lambda: sizes() == [1, 2, 1], "its going")
    until(lambda: ray.available_resources().get("CPU") == 1, "its room to be free again")
    views = handle.events("view_formed")
    assert views[0]["members"][0]["pid"] == views[-1]["members"][0]["pid"]
    handle.stop()
    result = handle.result(timeout_s=30)
    assert (result.status, result.recoveries) == ("stopped", 0)
    until(nothing_is_held, "its room to be free again")


@pytest.mark.slow
def test_a_killed_controller_is_replaced(tmp_path: Path, cluster: Cluster) -> None:
    folder = left_alone(tmp_path, cluster, steps=5000)
    until(lambda: len(losses(folder)) > 5, "5 steps")
    holder = lease_holder(LocalFolder(folder))
    assert holder is not None
    handle = attach(folder)
    psutil.Process(int(holder.split()[1])).kill()
    assert handle.status().state.startswith("running (its controller, process ")
    # It waits for the next one.
    handle.stop()
    assert handle.result(timeout_s=60).status == "stopped"
    assert [event["adopted"] for event in handle.events("controller_started")] == [[], ["worker-0", "worker-1"]]
    assert not handle.events("resumed")
    until(nothing_is_held, "its room to be free again")


@pytest.mark.slow
def test_a_signal_to_its_watcher_does_not_stop_a_run(tmp_path: Path, cluster: Cluster) -> None:
    write_data(tmp_path / "data")
    job, folder = write_job(tmp_path, task="tasks:Sleeps", steps=5000), tmp_path / "runs" / "job"
    driver = begun(job, cluster)
    watching = command("attach", folder)
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("job: 5,000 steps")
    until(lambda: len(losses(folder)) > 5, "5 steps")
    watching.send_signal(signal.SIGTERM)
    _, err = watching.communicate(timeout=60)
    assert (watching.returncode, f"the run continues; stop it with: raytrain stop '{folder}'" in err) == (143, True), (
        err
    )
    seen = len(losses(folder))
    until(lambda: len(losses(folder)) > seen, "a later step")
    code, out, err = raytrain("stop", folder)
    assert (code, out.splitlines()[-1].endswith(" saved")) == (0, True), (out, err)
    driver.kill()
    driver.communicate()
    until(nothing_is_held, "its room to be free again")
