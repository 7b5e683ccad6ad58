"""Runs as jobs of a cluster that was started with `ray start`: submitted, followed, stopped, resumed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray._private.runtime_env.packaging import create_package

from raytrain_plus import attach
from tests.integration.conftest import TASKS
from tests.integration.head import Head, head
from tests.integration.tasks import write_data
from tests.support.commands import REPOSITORY, command, losses, raytrain, until, write_job

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def nothing_is_left() -> None:
    """Check nothing: the head manages its own processes, and restarts some during any test."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Head]:
    with head(cpus=6) as started:
        yield started


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder as a user has it: a job file, and the module with its task."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(TASKS / "tasks.py", folder)
    write_data(tmp_path / "data")
    return folder


def job_in(project: Path, **changes: Any) -> str:
    changes = {"task": "tasks:Sleeps", "storage": str(project.parent / "runs"), "steps": 60, **changes}
    data = {"path": str(project.parent / "data"), "batch_size": 48, "shards": 8}
    write_job(project, data=data, **changes)
    return "job.yaml"


def submit(project: Path, cluster: Head, *words: str) -> tuple[int, str, str]:
    return raytrain("submit", "job.yaml", "--address", cluster.dashboard, *words, cwd=project)


def drivers(cluster: Head) -> list[psutil.Process]:
    """Return the drivers of the cluster's runs."""
    own = cluster.process.children(recursive=True)
    return [one for one in own if one.cmdline()[1:4] == ["-m", "raytrain_plus", "run"]]


@pytest.mark.slow
def test_two_jobs_are_sent_and_followed(project: Path, cluster: Head) -> None:
    job_in(project)
    code, out, err = submit(project, cluster, "--set", "name=other")
    assert code == 0, err
    assert f"follow it with: raytrain attach other --address {cluster.dashboard}" in out
    code, out, err = submit(project, cluster, "--follow")
    assert (code, "job finished: 60 steps" in out) == (0, True), out + err
    code, out, err = raytrain("attach", "other", "--address", cluster.dashboard)
    assert (code, "other finished: 60 steps" in out) == (0, True), out + err
    folders = [project.parent / "runs" / name for name in ("job", "other")]
    assert losses(folders[0]) == losses(folders[1])
    times = [[event["time"] for event in attach(folder).events("step_committed")] for folder in folders]
    assert max(one[0] for one in times) < min(one[-1] for one in times), "neither waited for the other"
    assert [attach(folder).result().recoveries for folder in folders] == [0, 0]
    code, out, _ = raytrain("status", "job", "--address", cluster.dashboard, "--json")
    assert (code, json.loads(out)["state"]) == (0, "succeeded")
    code, _, err = raytrain("logs", "othr", "--address", cluster.dashboard)
    assert (code, "the cluster has no job for a run 'othr'" in err, "did you mean other?" in err) == (2, True, True)


@pytest.mark.slow
def test_a_stopped_job_is_saved_and_resumes_when_submitted_again(project: Path, cluster: Head) -> None:
    job_in(project, steps=200, reduction="exact")
    folder = project.parent / "runs" / "job"
    code, _, err = submit(project, cluster)
    assert code == 0, err
    following = command("logs", "job", "-f", "--address", cluster.dashboard)
    until(lambda: (folder / "job.yaml").exists() and len(losses(folder)) > 5, "5 steps", 120)
    code, out, _ = submit(project, cluster, "--follow")
    assert (code, "a run with this name is already running" in out) == (2, True), out
    # That one has ended: the name refers to the first one.
    code, out, err = raytrain("stop", "job", "--address", cluster.dashboard)
    assert (code, "job: stopped" in out) == (0, True), out + err
    out, _ = following.communicate(timeout=30)
    made = len(losses(folder))
    assert f"job stopped: {made} steps" in out
    assert 5 < made < 200
    assert [one.step for one in attach(folder).status().checkpoints] == [made - 1]
    assert attach(folder).result().exit_code == 143
    assert submit(project, cluster)[0] == 0
    until(lambda: len(losses(folder)) > made + 5, "5 steps more", 120)
    # A run without its driver continues to its end.
    for one in drivers(cluster):
        one.kill()
        one.wait(10)
    following = command("logs", folder, "-f")
    assert following.stdout is not None
    following.stdout.readline()
    assert "running" in repr(attach(folder))
    until(lambda: "failed" in raytrain("status", "job", "--address", cluster.dashboard)[1], "the end of its job", 30)
    code, _, err = raytrain("stop", "job", "--address", cluster.dashboard)
    assert (code, "a run can outlive a killed driver" in err) == (2, True), err
    result = attach(folder).result(timeout_s=60)
    assert (result.status, result.steps, len(losses(folder))) == ("finished", 200, 200)
    out, err = following.communicate(timeout=30)
    assert following.returncode == 0, err
    assert ["  step 200/200  " in out.splitlines()[-2], out.splitlines()[-1].endswith("  finished: 200 steps")] == [
        True,
        True,
    ]
    job_in(project, steps=200, reduction="exact", name="undisturbed")
    assert submit(project, cluster, "--follow")[0] == 0
    assert attach(project.parent / "runs" / "undisturbed").result().state_sha256 == result.state_sha256


@pytest.mark.slow
def test_what_cannot_be_sent_is_reported(project: Path, cluster: Head, tmp_path: Path) -> None:
    job_in(project)
    code, _, err = raytrain("submit", project / "job.yaml", "--address", cluster.dashboard, cwd=TASKS)
    assert (code, "the job file is not inside the working directory" in err) == (2, True), err
    code, _, err = raytrain("run", "job.yaml", "--address", cluster.dashboard, cwd=project)
    assert (code, "raytrain submit JOB --address http://HOST:8265" in err) == (2, True), err
    code, _, err = raytrain("status", "job", "--address", "http://127.0.0.1:9")
    assert (code, "does not answer" in err) == (2, True), err


def ray(cwd: Path, cluster: Head, *words: str | Path) -> str:
    """Return the output of Ray's own command."""
    command = [Path(sys.executable).with_name("ray"), *words]
    known = {**os.environ, "RAY_API_SERVER_ADDRESS": cluster.dashboard}
    done = subprocess.run(command, cwd=cwd, env=known, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_job_submitted_by_rays_own_command(cluster: Head, tmp_path: Path) -> None:
    """`ray job submit` of a job file of this repository, as the page states it."""
    words = "job submit --working-dir . -- python -m raytrain_plus run jobs/byte_gpt.yaml --set steps=5"
    out = ray(REPOSITORY, cluster, *words.split())
    assert "byte_gpt finished: 5 steps" in out
    assert "Ray may remove it" in out
    package = tmp_path / "package.zip"
    create_package(str(REPOSITORY), package, include_gitignore=True)
    with zipfile.ZipFile(package) as opened:
        sent = {name for name in opened.namelist() if not name.endswith("/")}
    # No results, data, environments or what was built: nothing but sources.
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    assert sent <= set(subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True).stdout.splitlines())
    assert not [name for name in sent if name.startswith("tests/")]
    needed = [file.relative_to(REPOSITORY).as_posix() for file in (REPOSITORY / "raytrain_plus").rglob("*.py")]
    assert sent.issuperset([*needed, "examples/byte_gpt.py", "jobs/byte_gpt.yaml"])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raytrain submit", "ray job submit"])
def test_stopped_by_ray_in_a_long_step(project: Path, cluster: Head, how: str) -> None:
    """The step takes longer than the 3 s that Ray gives a stopping driver by default."""
    job_in(project, task="tasks:Faulty", args={"folder": str(project.parent), "pad_s": 1.2}, steps=4)
    shutil.copytree(REPOSITORY / "raytrain_plus", project / "raytrain_plus")
    folder = project.parent / "runs" / "job"

    def send() -> str:
        if how == "raytrain submit":
            code, out, err = submit(project, cluster, "--json")
            assert code == 0, err
            return str(json.loads(out)["job"])
        known = ("--runtime-env", REPOSITORY / "clusters" / "runtime_env.yaml", "--working-dir", ".")
        words = ("--no-wait", *known, "--", "python", "-m", "raytrain_plus", "run", "job.yaml")
        out = ray(project, cluster, "job", "submit", "--submission-id", f"by-ray-{len(found(folder))}", *words)
        assert "submitted successfully" in out
        return f"by-ray-{len(found(folder))}"

    def found(folder: Path) -> list[float]:
        return losses(folder) if (folder / "job.yaml").exists() else []

    job = send()
    until(lambda: len(found(folder)) == 1, "a step", 120)
    ray(project, cluster, "job", "stop", job)
    result = attach(folder).result(timeout_s=30)
    assert (result.status, result.exit_code, result.steps) == ("stopped", 143, len(losses(folder)))
    assert 1 <= result.steps < 4
    assert [one.step for one in attach(folder).status().checkpoints] == [result.steps - 1]
    # Its driver had the time to report this.
    assert f"job stopped: {result.steps:,} step" in ray(project, cluster, "job", "logs", job)
    send()
    until(lambda: len(found(folder)) > result.steps, "a step more", 120)
    result = attach(folder).result(timeout_s=60)
    assert (result.status, result.steps, len(losses(folder))) == ("finished", 4, 4)


@pytest.mark.slow
def test_a_head_that_forgot_everything(project: Path) -> None:
    job_in(project, steps=80, reduction="exact", checkpoint={"every_steps": 10})
    folder = project.parent / "runs" / "job"
    with head() as first:
        assert submit(project, first)[0] == 0
        until(lambda: (folder / "job.yaml").exists() and len(losses(folder)) > 25, "25 steps", 120)
    with head() as second:
        code, out, err = submit(project, second, "--follow")
        assert (code, "job finished: 80 steps" in out) == (0, True), out + err
        assert attach(folder).events("resumed")
        assert submit(project, second, "--set", "name=undisturbed", "--follow")[0] == 0
        shas = [attach(project.parent / "runs" / name).result().state_sha256 for name in ("job", "undisturbed")]
        assert shas[0] == shas[1]
        # A finished run can be continued there too.
        where = ("--address", second.dashboard)
        code, out, err = raytrain("resume", "job", "--storage", folder.parent, "--set", "steps=85", *where, cwd=project)
        assert (code, "job was submitted" in out) == (0, True), out + err
        code, out, err = raytrain("attach", "job", *where)
        assert (code, "job finished: 85 steps" in out) == (0, True), out + err


@pytest.mark.slow
def test_a_cluster_that_requires_a_token(project: Path, tmp_path: Path) -> None:
    job_in(project, steps=8)
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("a-token-of-this-test-alone")
    wrong.write_text("another-token")
    asking = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with head(**asking) as cluster:
        words = ("submit", "job.yaml", "--address", cluster.dashboard)
        joining = ("run", "job.yaml", "--address", cluster.address)
        nothing = {**asking, "RAY_AUTH_TOKEN_PATH": str(tmp_path / "nothing")}
        for shown in ({"RAY_AUTH_MODE": "disabled"}, {**asking, "RAY_AUTH_TOKEN_PATH": str(wrong)}, nothing):
            for told in (words, joining):
                code, _, err = raytrain(*told, cwd=project, **shown)
                assert (code, "the cluster requires a valid token" in err) == (2, True), err
        # A token in its usual file is sent without being asked for.
        lies_here = {name: value for name, value in {**os.environ, **asking}.items() if name != "RAY_AUTH_MODE"}
        joined = subprocess.run(
            [sys.executable, "-m", "raytrain_plus", *joining, "--set", "name=joined"],
            cwd=project,
            env={**lies_here, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (joined.returncode, "joined finished: 8 steps" in joined.stdout) == (0, True), joined.stderr
        code, out, err = raytrain(*words, "--follow", cwd=project, **asking)
        assert (code, "job finished: 8 steps" in out) == (0, True), out + err
