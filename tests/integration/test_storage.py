"""Faults of a run's folder during the run: its disk is full for a while or permanently; the folder is moved."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from raytrain_plus import Checkpoint, RunError, Workers
from raytrain_plus.audit.audit import audit
from raytrain_plus.launch.runner import resume
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data

pytestmark = pytest.mark.timeout(240)

PAD_S = 0.02
SPAN_S = 8.0
"""Seconds for which the disk is full: longer than all attempts to write one share."""


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a file system of 8 MB in `folder`; yield whether that worked, which needs the right to mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    with suppress(FileNotFoundError):
        if not subprocess.run(command, capture_output=True, timeout=10).returncode:
            try:
                yield True
            finally:
                subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)
            return
    yield False


@contextmanager
def filled(run: Path, driver: int) -> Iterator[str]:
    """Fill the disk of a run's folder; yield the system's error text."""
    filler = run / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        for _ in range(10_000):
            file.write(bytes(4096))
    yield "No space left on device"
    filler.unlink()


@contextmanager
def limited(run: Path, driver: int) -> Iterator[str]:
    """Limit the size of the run's files, which needs no privileges. Ray's own processes continue to write."""
    names = ("ray::Controller", "ray::WorkerActor")
    writers = [one for one in psutil.Process(driver).children(recursive=True) if one.cmdline()[0].startswith(names)]
    assert len(writers) == 3
    for one in writers:
        one.rlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    yield "File too large"
    for one in writers:
        one.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def started(tmp_path: Path, steps: int) -> subprocess.Popen[str]:
    """Start `raytrain run` on the small disk, with its own Ray, two workers, and a checkpoint every ten steps."""
    write_data(tmp_path / "data")
    made = job(
        tmp_path,
        steps=steps,
        args={"pad_s": PAD_S},
        workers=Workers(min=2),
        checkpoint=Checkpoint(every_steps=10),
        storage=str(tmp_path / "small" / "runs"),
    )
    (tmp_path / "job.yaml").write_text(made.to_yaml())
    return subprocess.Popen(
        [sys.executable, "-m", "raytrain_plus", "run", str(tmp_path / "job.yaml")],
        cwd=TASKS,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(folder: Path, kind: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if any(event["kind"] == kind for event in read_events(LocalFolder(folder))):
            return
        time.sleep(0.05)
    process.terminate()
    raise AssertionError(f"{kind} was not seen: {process.communicate(timeout=60)[0]}")


def lines_of(output: str, words: str) -> list[str]:
    return [line for line in output.splitlines() if words in line]


@pytest.mark.slow
@pytest.mark.parametrize("unprivileged", [False, True])
def test_a_disk_that_is_full_for_a_while_is_reported_in_two_lines(tmp_path: Path, unprivileged: bool) -> None:
    """One run printed 516 tracebacks of the same full disk."""
    with small_disk(tmp_path / "small") as own:
        folder = tmp_path / "small" / "runs" / "run"
        full = filled if own and not unprivileged else limited
        process = started(tmp_path, steps=200)
        wait_for(folder, "checkpoint_saved", process)
        with full(folder, process.pid) as words:
            time.sleep(SPAN_S)
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0, output
        assert "Traceback" not in output
        [failed] = lines_of(output, words)[:1]
        assert "cannot write to" in failed
        assert "wanted" in failed
        assert full is limited or "free" in failed
        assert "training continues" in failed
        assert len(lines_of(output, "again after")) == 1
        assert len(lines_of(output, words)) == 2, output
        found = audit(folder)
        assert found.clean, found.faults
        events = list(read_events(LocalFolder(folder)))
        kinds = Counter(event["kind"] for event in events)
        assert (kinds["storage_failed"], kinds["storage_recovered"], kinds["step_committed"]) == (1, 1, 200)
        # Steps do not wait for the disk: more are committed meanwhile than a wait at its beginning and end explains.
        [since] = [event["time"] for event in events if event["kind"] == "storage_failed"]
        [until] = [event["time"] for event in events if event["kind"] == "storage_recovered"]
        assert sum(event["kind"] == "step_committed" and since < event["time"] < until for event in events) > 5
        # TensorBoard's data is complete too.
        assert len(list((folder / "tensorboard").iterdir())) == 1


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as own:
        folder = tmp_path / "small" / "runs" / "run"
        process = started(tmp_path, steps=60)
        wait_for(folder, "checkpoint_saved", process)
        with (filled if own else limited)(folder, process.pid) as words:
            output, _ = process.communicate(timeout=150)
        assert process.returncode == 1, output
        assert "Traceback" not in output
        last = output.rstrip().splitlines()[-1]
        assert "the result cannot be written" in last
        assert words in last
        assert f"raytrain resume {folder}" in last
        assert not (folder / "result.json").exists()
        assert not (folder / "model.safetensors").exists()
        assert len(lines_of(output, "cannot write to")) == 1
        # There is room again: nothing is lost.
        done = subprocess.run(
            [sys.executable, "-m", "raytrain_plus", "resume", str(folder), "--json"],
            cwd=TASKS,
            env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert json.loads(done.stdout)["status"] == "finished", done.stderr
        assert audit(folder).clean


@pytest.fixture
def four() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def moved(folder: Path, away: Path) -> None:
    away.parent.mkdir()
    folder.rename(away)


@pytest.mark.slow
def test_a_folder_that_is_moved_away_ends_its_run_and_frees_its_name(four: None, tmp_path: Path) -> None:
    """The workers created `checkpoints/` again at the old place, and the name was refused from then on."""
    write_data(tmp_path / "data")
    changes: dict[str, Any] = {"reduction": "exact", "clip_norm": None, "workers": Workers(min=2)}
    made = job(tmp_path, args={"pad_s": 0.03}, steps=80, checkpoint=Checkpoint(every_steps=5), **changes)
    run, away = Run(made), tmp_path / "away" / "kept"
    run.until_told("checkpoint_saved", 2)
    moved(run.folder, away)
    with pytest.raises(RunError, match=f"{run.folder} was moved to {away}: the run stops") as told:
        run.finish(30)
    assert f"raytrain resume {away}" in str(told.value)
    assert not run.folder.exists()
    assert audit(away).clean
    # The name is free, and the moved run resumes at its new place; both end alike.
    again = Run(made, fresh=False)
    result = again.finish()
    assert result.status == "finished"
    resumed = resume(str(away), roots=[TASKS])
    assert (resumed.status, resumed.state_sha256) == ("finished", result.state_sha256)
    assert audit(away).clean
