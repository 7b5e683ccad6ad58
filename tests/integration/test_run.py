"""Runs as a user starts them: by the command, in their own processes, with valid and invalid input."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray

from raytrain_plus import Data, Job, TaskError, run
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.result import Result
from raytrain_plus.runs.status import state_of, status
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS
from tests.integration.tasks import Net, write_data
from tests.support.commands import REPOSITORY, command, outliving, raytrain, write_job

pytestmark = pytest.mark.timeout(180)


def wait_for_a_step(tmp_path: Path, steps: int = 1) -> Path:
    """Wait for a number of steps; return the file of the run's events."""
    events = tmp_path / "runs" / "job" / "events.ndjson"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (events.exists() and events.read_text().count("step_committed") >= steps):
        time.sleep(0.1)
    return events


@pytest.mark.slow
def test_digits_learn(tmp_path: Path) -> None:
    paths = [
        f"data.path={tmp_path}/digits/train",
        f"evaluate.path={tmp_path}/digits/held_out",
        f"storage={tmp_path}/runs",
    ]
    overrides = [word for path in paths for word in ("--set", path)]
    code, out, err = raytrain("run", "jobs/digits.yaml", *overrides, cwd=REPOSITORY)
    assert code == 0, err
    assert "collective: horovod" in out
    assert "untrained ->" in out
    result = json.loads((tmp_path / "runs" / "digits" / "result.json").read_text())
    assert result["metrics"]["accuracy"] > 0.95
    assert result["samples"] == 20 * 1437
    assert result["data_wait"] < 0.05
    assert (tmp_path / "runs" / "digits" / "model.safetensors").stat().st_size > 10_000
    assert list((tmp_path / "runs" / "digits" / "tensorboard").iterdir())
    # Running the job again changes nothing; another job of this name is refused.
    code, out, err = raytrain("run", "jobs/digits.yaml", *overrides, cwd=REPOSITORY)
    assert (code, "digits was already finished on" in out) == (0, True), err
    code, _, err = raytrain("run", "jobs/digits.yaml", *overrides, "--set", "seed=5", cwd=REPOSITORY)
    assert (code, "they differ in seed" in err) == (2, True), err


@pytest.mark.slow
def test_byte_gpt_trains_and_writes_json(tmp_path: Path) -> None:
    paths = [f"data.path={tmp_path}/text/train", f"evaluate.path={tmp_path}/text/held_out", f"storage={tmp_path}/runs"]
    overrides = [word for path in [*paths, "steps=30", "evaluate.every_steps=30"] for word in ("--set", path)]
    code, out, err = raytrain("run", "jobs/byte_gpt.yaml", *overrides, "--json", cwd=REPOSITORY)
    assert code == 0, err
    result = json.loads(out)
    assert (result["status"], result["steps"], result["samples"]) == ("finished", 30, 30 * 48)
    assert result["metrics"]["loss"] < 4
    assert result["data_wait"] < 0.05
    assert result["show"].startswith("def ")
    events = list(read_events(LocalFolder(Path(result["path"]))))
    kinds = [event["kind"] for event in events[:4]]
    assert kinds == ["run_started", "controller_started", "view_formed", "evaluated"]
    assert [event["step"] for event in events if event["kind"] == "step_committed"] == list(range(30))
    assert events[-1]["kind"] == "run_finished"
    assert events[-1]["state_sha256"] == result["state_sha256"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"task": "tasks:Nett"}, ["did you mean 'Net'?"]),
        pytest.param({"task": "no_tasks:Net"}, ["module 'no_tasks' not found"], marks=pytest.mark.slow),
        pytest.param(
            {"data": {"path": "nowhere", "batch_size": 48}},
            ["nowhere: there is no such file or folder"],
            marks=pytest.mark.slow,
        ),
        pytest.param({"steps": None}, ["neither `steps` nor `epochs`"], marks=pytest.mark.slow),
        pytest.param(
            {"data": {"path": "DATA", "batch_size": 996, "shards": 498}},
            ["the data has 400 rows, fewer than data.shards = 498"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": {"path": "DATA", "batch_size": 402, "shards": 201}, "evaluate": {"path": "FEW", "every_steps": 1}},
            ["the data has 200 rows, fewer than data.shards = 201"],
            marks=pytest.mark.slow,
        ),
        ({"workers": {"min": 1, "gpus": 1}}, ["the cluster has room for 0 workers of 1 CPU and 1 GPU each"]),
        ({"storage": "/proc/nowhere"}, ["storage: /proc/nowhere: the storage folder cannot be written"]),
    ],
    ids=["class", "module", "data", "length", "rows", "held out", "gpu", "storage"],
)
def test_bad_input_is_reported_before_a_run_starts(
    tmp_path: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    write_data(tmp_path / "data", rows=400)
    write_data(tmp_path / "few", rows=200)
    text = json.dumps(changes).replace("DATA", str(tmp_path / "data")).replace("FEW", str(tmp_path / "few"))
    code, out, err = raytrain("run", write_job(tmp_path, **json.loads(text)))
    assert code == 2, err
    assert all(part in err for part in expected), err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "runs" / "job").exists()


@pytest.mark.slow
def test_a_secret_is_referred_to_and_never_written(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    job = write_job(tmp_path, task="tasks:Secretive", args={"word": "open ${env:WORD}"})
    code, _, err = raytrain("run", job)
    assert (code, "args.word: the environment variable WORD is not set" in err) == (2, True), err
    code, out, err = raytrain("run", job, WORD="sesame")
    assert code == 0, err
    written = [file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert any(b"open ${env:WORD}" in text for text in written)
    assert not any(b"sesame" in text for text in [*written, out.encode(), err.encode()])


@pytest.mark.slow
def test_credentials_are_stripped_from_a_librarys_error_everywhere(tmp_path: Path) -> None:
    """Its error went into events, result and messages unchanged; Ray's logs are searched too."""
    write_data(tmp_path / "data")
    job = write_job(tmp_path, task="tasks:Repeats", args={"address": "${env:STORE}"})
    # The names of Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as logs:
        code, out, err = raytrain("run", job, STORE="s3://KEY:hunter2@bucket/x?secret_key=hunter2", RAY_TMPDIR=logs)
        printed = [file.read_bytes() for file in Path(logs).rglob("*") if file.is_file()]
    assert code == 1, err
    written = [file.read_bytes() for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(printed) > 5
    assert sum(b"no answer from 's3://***@bucket/x?secret_key=***'" in text for text in written) == 2
    assert "no answer from 's3://***@bucket/x?secret_key=***'" in err
    assert not any(b"hunter2" in text for text in [*printed, *written, out.encode(), err.encode()])


@pytest.mark.parametrize(
    ("where", "code", "expected"),
    [
        pytest.param(
            "init",
            2,
            ["Raises(...) raised ValueError: no such width", 'raise ValueError("no such width")'],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "layers", 2, ["Raises.layers raised ZeroDivisionError: in layers", "tasks.py"], marks=pytest.mark.slow
        ),
        pytest.param(
            "loss", 2, ["Raises.loss raised KeyError: 'label'", 'raise KeyError("label")'], marks=pytest.mark.slow
        ),
        ("step", 1, ["the task raised KeyboardInterrupt: enough", 'raise KeyboardInterrupt("enough")']),
    ],
)
def test_what_the_task_raises_is_shown_in_the_users_frames(
    tmp_path: Path, where: str, code: int, expected: list[str]
) -> None:
    write_data(tmp_path / "data")
    got, out, err = raytrain("run", write_job(tmp_path, task="tasks:Raises", args={"where": where}), "--json")
    assert got == code, err
    assert code == 2 or expected[0] in json.loads(out)["error"]["what"]
    assert all(part in err for part in expected), err
    assert "training/step/step.py" not in err
    assert "ray/" not in err
    assert (tmp_path / "runs" / "job").exists() == (code == 1)


@pytest.mark.parametrize("reduction", ["ring", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_shard(tmp_path: Path, reduction: str) -> None:
    write_data(tmp_path / "data")
    job = write_job(tmp_path, args={"explode_at": 4.0}, steps=40, reduction=reduction)
    code, out, err = raytrain("run", job, "--json")
    assert code == 1
    result = json.loads(out)
    assert result["error"]["what"].startswith(f"the loss of step {result['steps']} is not finite in shard")
    assert "not finite" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("{min: 3}", "workers.min: 3: the cluster"),
        pytest.param("{min: 2, spares: 1}", "workers.spares: 1: the cluster", marks=pytest.mark.slow),
    ],
)
def test_too_small_a_cluster_reports_what_it_has(tmp_path: Path, setting: str, expected: str) -> None:
    write_data(tmp_path / "data")
    script = (
        "import ray, sys\nfrom raytrain_plus import InputError, run\nfrom raytrain_plus.job.yaml import load_job\n"
        "ray.init(address='local', num_cpus=2, include_dashboard=False, logging_level='ERROR')\n"
        "job, roots = load_job(sys.argv[1], ['workers=' + sys.argv[2]])\n"
        "try: run(job, quiet=True, roots=roots)\n"
        "except InputError as error: print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{TASKS}"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(write_job(tmp_path)), setting],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    assert f"{expected} has room for 2 workers of 1 CPU" in done.stdout, done.stderr
    assert "its 1 nodes have: 2 CPU" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [1, 2.5])
def test_a_signal_that_comes_early_has_its_exit_code_too(tmp_path: Path, after_s: float) -> None:
    write_data(tmp_path / "data")
    process = command("run", write_job(tmp_path, task="tasks:Sleeps", steps=500))
    time.sleep(after_s)  # during the imports, during the start of Ray
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_drains_the_run(tmp_path: Path, number: int, code: int) -> None:
    write_data(tmp_path / "data")
    process = command("run", write_job(tmp_path, task="tasks:Sleeps", steps=500))
    wait_for_a_step(tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    *_, finished = read_events(LocalFolder(tmp_path / "runs" / "job"))
    assert finished["kind"] == "run_finished"
    assert "job stopped" in out
    result = json.loads((tmp_path / "runs" / "job" / "result.json").read_text())
    assert 0 < result["steps"] < 500
    assert (tmp_path / "runs" / "job" / "model.safetensors").exists()
    # A stopped run resumes.
    code, out, err = raytrain("run", write_job(tmp_path, task="tasks:Net", steps=500, args={}), "--json")
    assert (code, "they differ in task" in err) == (2, True), err
    code, out, err = raytrain(
        "resume", "job", "--storage", tmp_path / "runs", "--set", f"steps={result['steps'] + 3}", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["steps"] == result["steps"] + 3
    events = read_events(LocalFolder(tmp_path / "runs" / "job"))
    rates = {event["step"]: event["lr"] for event in events if event["kind"] == "step_committed"}
    assert rates == pytest.approx({step: 1e-2 * 0.99**step for step in range(result["steps"] + 3)})


@pytest.mark.slow
def test_a_run_whose_steps_overlap_stops_at_its_last_common_step(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    staged = {"pipeline": 2, "schedule": "pipedream", "microbatches": 2, "commit_every": 8}
    process = command("run", write_job(tmp_path, task="tasks:Paced", steps=500, parallel=staged))
    events = wait_for_a_step(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    result = json.loads((tmp_path / "runs" / "job" / "result.json").read_text())
    # Stopped during steps: the committed ones are kept.
    assert 0 < result["steps"] < 500
    assert result["steps"] % 8 == 0
    assert (tmp_path / "runs" / "job" / "model.safetensors").exists()
    told = [event["kind"] for event in read_events(LocalFolder(events.parent))]
    assert "resumed" not in told
    assert "checkpoint_saved" in told
    code, out, err = raytrain(
        "resume", "job", "--storage", tmp_path / "runs", "--set", f"steps={result['steps'] + 3}", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["steps"] == result["steps"] + 3


def test_a_driver_that_dies_takes_the_run_with_it(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    process = command("run", write_job(tmp_path, task="tasks:Sleeps", steps=5000))
    wait_for_a_step(tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(named(family, "Controller", "WorkerActor")) >= 3
    process.kill()
    process.communicate(timeout=10)
    # Two of Ray's agents outlived it by a minute.
    assert not outliving(family)


def slowly_stopped(tmp_path: Path, workers: int = 1) -> subprocess.Popen[str]:
    """Stop a run whose disk is slow; return its driver, which waits for the last checkpoint."""
    write_data(tmp_path / "data")
    job = write_job(tmp_path, task="tasks:SlowDisk", steps=500, workers={"min": workers}, elastic={"stop_grace_s": 2})
    process = command("run", job)
    events = wait_for_a_step(tmp_path)
    process.send_signal(signal.SIGINT)
    until = time.monotonic() + 60
    while '"kind": "saving"' not in events.read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_the_last_checkpoint_of_a_stopped_run_is_waited_for_beyond_its_grace(tmp_path: Path) -> None:
    process = slowly_stopped(tmp_path)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    result = json.loads((tmp_path / "runs" / "job" / "result.json").read_text())
    steps = result["steps"]
    assert (result["saved_step"], result["unsaved"]) == (steps - 1, None)
    assert f"saving the state after step {steps}: " in out
    assert out.splitlines()[-1] == f"state after step {steps} saved"
    code, out, err = raytrain("status", "job", "--storage", tmp_path / "runs", "--json")
    assert (code, json.loads(out)["saved_step"]) == (0, steps - 1), err
    code, out, err = raytrain("resume", "job", "--storage", tmp_path / "runs", "--set", f"steps={steps + 2}")
    assert code == 0, err
    assert f"resumed from the checkpoint after step {steps}" in out


@pytest.mark.slow
def test_the_last_checkpoint_is_completed_although_its_driver_was_killed(tmp_path: Path) -> None:
    process = slowly_stopped(tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=10)
    run = LocalFolder(tmp_path / "runs" / "job")
    until = time.monotonic() + 60
    while (result := Result.load(run)) is None:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert (result.status, result.saved_step) == ("stopped", result.steps - 1)
    assert not outliving(family)


def named(processes: list[psutil.Process], *words: str) -> list[psutil.Process]:
    """Return the processes that have one of the words in their command."""
    return [entry for entry in processes if any(word in " ".join(entry.cmdline()[:3]) for word in words)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "least_s"),
    # Ray ends a process that has had no contact with the GCS for a minute.
    [(30, 0), (420, 75)],
)
def test_the_result_decides_even_if_rays_head_is_gone(tmp_path: Path, steps: int, least_s: float) -> None:
    """Ray ended the driver a minute after the GCS, with an exit code of its own, though the run had finished."""
    write_data(tmp_path / "data")
    process = command("run", write_job(tmp_path, task="tasks:Sleeps", steps=steps))
    wait_for_a_step(tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    [gcs] = [entry for entry in family if entry.name() == "gcs_server"]
    gcs.kill()
    killed = time.monotonic()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert time.monotonic() - killed > least_s
    assert json.loads((tmp_path / "runs" / "job" / "result.json").read_text())["status"] == "finished"
    assert f"job finished: {steps} steps" in out
    assert "GCS" not in err
    assert not outliving(family)


def test_a_controller_that_is_killed_on_purpose_is_replaced(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    job = write_job(tmp_path, task="tasks:Sleeps", steps=60)
    code, out, err = raytrain("run", job, "--fault", "kill controller at=20")
    assert code == 0, err
    events = list(read_events(LocalFolder(tmp_path / "runs" / "job")))
    first, second = [event for event in events if event["kind"] == "controller_started"]
    assert f"fault injected: kill controller at=20 (process {first['pid']})" in err
    assert second["pid"] != first["pid"]
    assert "the controller was replaced" in out
    assert [event["step"] for event in events if event["kind"] == "step_committed"] == list(range(60))
    assert "Task Controller" not in out + err
    code, _, err = raytrain("run", job, "--fault", "kill everybody at=noon")
    assert (code, "'kill everybody at=noon' is no fault" in err) == (2, True), err


@pytest.mark.slow
def test_the_death_of_a_raylet_reports_what_is_kept_and_how_to_resume(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    folder = tmp_path / "runs" / "job"
    process = command("run", write_job(tmp_path, task="tasks:Sleeps", steps=500, checkpoint={"every_steps": 3}))
    events = wait_for_a_step(tmp_path)
    deadline = time.monotonic() + 60
    while "checkpoint_saved" not in events.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    [victim] = [entry for entry in family if "raylet" in entry.name()]
    assert state_of(LocalFolder(folder)).startswith("running (process ")
    victim.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    kept = next(one for one in status(LocalFolder(folder)).checkpoints if one.state == "complete")
    told = [line for line in err.splitlines() if line.startswith("the controller died: ")]
    assert len(told) == 1, err
    assert told[0].endswith(
        f"; the checkpoint after step {kept.step + 1} is kept; resume with: raytrain resume {folder}"
    )
    code, out, err = raytrain("status", folder)
    assert (code, out.splitlines()[-1]) == (0, f"  resume with: raytrain resume {folder}"), err
    assert not outliving(family)


@pytest.mark.slow
def test_a_lost_worker_is_reported_in_one_line_and_replaced(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    process = command("run", write_job(tmp_path, task="tasks:Sleeps", steps=60))
    events = wait_for_a_step(tmp_path)
    view = next(event for event in read_events(LocalFolder(events.parent)) if event["kind"] == "view_formed")
    os.kill(view["members"][1]["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    lost = f"worker-1 (pid {view['members'][1]['pid']}) was lost: its process was killed or crashed"
    assert f"{lost}; waiting for 1 more of at least 2 workers (each needs 1 CPU)" in out
    [line] = [line for line in out.splitlines() if line.startswith("recovered in ")]
    assert "0 steps lost" in line
    assert "1 kept, 1 replaced" in line
    assert "recovered from 1 loss" in out
    assert "1 recovery waited for a replacement" in out
    assert "workers: {min: 1} lets the others continue meanwhile" in out


def test_a_corrupt_file_is_reported_with_its_name(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    (tmp_path / "data" / "9.parquet").write_bytes(b"PAR1 and then nothing")
    code, _, err = raytrain("run", write_job(tmp_path))
    assert (code, "9.parquet: is not a readable Parquet file" in err) == (2, True), err


def write_plain(file: Path, table: pa.Table) -> None:
    """Overwrite the file in place; with other values its size and footer stay the same."""
    with file.open("r+b") as opened:
        pq.write_table(
            table, opened, row_group_size=20, compression="none", use_dictionary=False, write_statistics=False
        )
        opened.truncate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_mb", "steps", "before_it"),
    [
        pytest.param(0, 120, 1, id="read again in each epoch"),
        # All rows are in memory by then: the final check of all files finds the change.
        pytest.param(64, 40, 20, id="read once"),
    ],
)
def test_a_file_that_is_overwritten_while_a_run_reads_it_fails_the_run(
    tmp_path: Path, cache_mb: int, steps: int, before_it: int
) -> None:
    file = write_data(tmp_path / "data") / "1.parquet"
    table = pq.read_table(file)
    write_plain(file, table)
    # In the files' order, so that each worker has its rows in memory after an epoch, which takes 11 steps.
    data = {"path": str(tmp_path / "data"), "batch_size": 48, "shards": 8, "cache_mb": cache_mb, "shuffle": "none"}
    process = command("run", write_job(tmp_path, task="tasks:Sleeps", data=data, steps=steps))
    wait_for_a_step(tmp_path, before_it)
    before = file.stat()
    write_plain(file, table.set_column(1, "y", pc.subtract(2, table.column("y"))))
    assert (file.stat().st_size, file.stat().st_ino) == (before.st_size, before.st_ino)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, (out, err)
    told = rf"{file} on \S+: the file changed while the run used it: its modification time changed: 20\d\d-"
    assert re.search(told, err), err
    assert "Traceback" not in out + err
    result = json.loads((tmp_path / "runs" / "job" / "result.json").read_text())
    assert (result["status"], result["exit_code"]) == ("failed", 1)
    assert (result["steps"] < steps) == (cache_mb == 0)
    # It was not tried again in another generation.
    kinds = [event["kind"] for event in read_events(LocalFolder(tmp_path / "runs" / "job"))]
    assert kinds.count("view_formed") == 1
    # It does not resume with the other labels either: a run whose data has changed cannot succeed.
    folder = tmp_path / "runs" / "job"
    code, _, err = raytrain("resume", folder)
    assert (code, f"{file}: the file changed while the run used it and has not been restored" in err) == (2, True), err
    write_plain(file, table)
    subprocess.run(shlex.split(re.findall("`(touch .*)`", err)[0]), check=True)
    code, _, err = raytrain("resume", folder)
    assert code == 0, err


@pytest.mark.slow
def test_the_files_that_match_a_pattern_are_one_dataset(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=400)
    write_data(tmp_path / "held_out", rows=100, files=1)
    data = {"path": str(tmp_path / "d*" / "*.parquet"), "batch_size": 48}
    job = write_job(tmp_path, data=data, evaluate={"path": str(tmp_path / "held_out" / "?.parquet"), "every_steps": 2})
    code, out, err = raytrain("run", job, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert (result["samples"], result["steps"]) == (8 * 48, 8)
    code, out, _ = raytrain("audit", tmp_path / "runs" / "job", "--json")
    assert (code, json.loads(out)["files"]) == (0, len(list((tmp_path / "data").iterdir())))
    write_data(tmp_path / "data2", rows=10, files=1)
    code, _, err = raytrain("resume", tmp_path / "runs" / "job", "--set", "steps=9")
    assert (code, "data2/0.parquet is new" in err) == (2, True), err


def test_schemas_that_differ_are_reported_with_file_and_column(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    pq.write_table(pa.table({"x": [1.0], "y": [1]}), tmp_path / "data" / "9.parquet")
    code, _, err = raytrain("validate", write_job(tmp_path))
    assert (code, "9.parquet: column 'x' is double" in err) == (2, True), err


def test_validate_shows_the_sizes(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    code, out, err = raytrain("validate", write_job(tmp_path), "--set", "workers={min: 2, max: 3}")
    assert code == 0, err
    assert "500 rows in 27 row groups, 8 steps" in out
    assert "3 workers: up to 3 shards each; their work fills 89 % of the time" in out


def test_horovod_named_but_not_built_is_reported_before_any_actor_starts(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    # A stock build, as pip would show it.
    stub = tmp_path / "site" / "horovod-0.28.1.dist-info"
    stub.mkdir(parents=True)
    (stub / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    path = f"{tmp_path / 'site'}:{REPOSITORY}"
    code, _, err = raytrain("run", write_job(tmp_path, collective="horovod"), PYTHONPATH=path)
    assert code == 2, err
    assert "collective: horovod: Horovod cannot be used: the installed build 0.28.1 lacks fixes" in err
    assert "raytrain install-horovod" in err


def test_with_token_authentication_on(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test-alone")
    token.chmod(0o600)
    code, out, err = raytrain(
        "run", write_job(tmp_path), "--json", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)
    )
    assert code == 0, err
    assert json.loads(out)["steps"] == 8


@pytest.mark.slow
def test_an_address_joins_a_cluster_and_leaves_it_running(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        address = ray.get_runtime_context().gcs_address
        code, _, err = raytrain("run", write_job(tmp_path), "--json", "--address", address)
        assert code == 0, err
        assert ("the cluster requires no token" in err) == (not address.startswith("127."))
        started = next(iter(read_events(LocalFolder(tmp_path / "runs" / "job"))))
        assert started["address"] == address
        # The run's CPUs are free again.
        deadline = time.monotonic() + 10
        while ray.available_resources().get("CPU", 0) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ray.available_resources()["CPU"] == 3
    finally:
        ray.shutdown()
    code, _, err = raytrain("run", write_job(tmp_path, name="other"), "--address", "127.0.0.1:1")
    assert (code, "address: 127.0.0.1:1: no Ray cluster answers" in err) == (2, True), err
    code, _, err = raytrain("run", write_job(tmp_path, name="other"), "--address", "ray://127.0.0.1:10001")
    assert (code, "only a machine of the cluster can join it" in err) == (2, True), err


def test_a_task_that_cannot_be_sent_is_reported(tmp_path: Path) -> None:
    write_data(tmp_path / "data")

    class Locked(Net):
        lock = threading.Lock()

    job = Job(
        name="locked",
        task=Locked,
        data=Data(path=str(tmp_path / "data"), batch_size=48),
        steps=1,
        storage=str(tmp_path / "runs"),
    )
    with pytest.raises(TaskError, match=r"Locked cannot be sent to a worker: TypeError: cannot pickle"):
        run(job, quiet=True)
    assert not ray.is_initialized()


def test_doctor(tmp_path: Path) -> None:
    code, out, _ = raytrain("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0
    assert checks["Horovod"]["status"] == "PASS"
    assert checks["torch"]["status"] == "PASS"
