"""Checkpoints on a real cluster: after any loss a run continues from the newest complete one, to the same bits."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import safetensors.torch
import torch
import xxhash

from raytrain_plus import (
    Checkpoint,
    CheckpointError,
    Data,
    DataError,
    Evaluate,
    InputError,
    Job,
    KeepBest,
    RunError,
    Workers,
    load,
)
from raytrain_plus.audit.audit import audit
from raytrain_plus.launch.runner import resume
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.state.stored.checkpoint import survey
from raytrain_plus.storage.address import within
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.workers.run_actors import NAMESPACE
from tests.integration import elastic
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, job
from tests.integration.tasks import Net, write_data
from tests.unit.storage.store import Proxy, at, relaying, serving

pytestmark = [pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def eight() -> Iterator[None]:
    """Start Ray, with credentials of a store in the environment of all its processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("AWS_ACCESS_KEY_ID", "KEYID"), ("AWS_SECRET_ACCESS_KEY", "pa55word")):
            patch.setenv(name, value)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def data(tmp_path: Path) -> Path:
    """Write the data: the same rows in every test."""
    return write_data(tmp_path / "data", rows=517)


def exact(tmp_path: Path, name: str, **changes: Any) -> Job:
    """Return a job with BatchNorm, dropout, AdamW, a scheduler and clipping; a checkpoint every ten steps."""
    settings: dict[str, Any] = {
        "data": Data(path=str(tmp_path / "data"), batch_size=36, shards=12, cache_mb=0),
        "steps": 60,
        "reduction": "exact",
        "evaluate": Evaluate(path=str(tmp_path / "data"), every_steps=20),
        "checkpoint": Checkpoint(every_steps=10),
        **changes,
    }
    return job(tmp_path, name=name, **settings)


def ended(run: Run) -> tuple[str | None, list[float], dict[str, float]]:
    """See `elastic.ended`; check also that no checkpoint has failed."""
    found = elastic.ended(run)
    assert not run.events("checkpoint_failed")
    return found


@pytest.fixture(scope="module")
def undisturbed(
    eight: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str | None, list[float], dict[str, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_data(folder / "data", rows=517)
    return ended(Run(exact(folder, "quiet", workers=Workers(min=2))))


def test_a_group_that_is_lost_completely_continues_from_its_checkpoint(
    undisturbed: tuple[Any, ...], tmp_path: Path
) -> None:
    run = Run(exact(tmp_path, "lost", workers=Workers(min=3), args={"pad_s": 0.03}))
    run.until(lambda: run.committed() >= 25 and run.events("checkpoint_saved")[1:], "step 25 and two checkpoints")
    for member in run.members():
        run.kill(member)
    assert ended(run) == undisturbed
    [resumed] = run.events("resumed")
    assert resumed["step"] >= 19
    assert resumed["checkpoint"].startswith(f"{resumed['step']:012d}-")
    assert resumed["voided_to"] >= 25
    [recovered] = run.events("recovered")
    assert recovered["steps_lost"] == resumed["voided_to"] - resumed["step"]


@pytest.mark.slow
def test_before_the_first_checkpoint_a_run_starts_again(undisturbed: tuple[Any, ...], tmp_path: Path) -> None:
    run = Run(exact(tmp_path, "early", workers=Workers(min=2), args={"pad_s": 0.03}, checkpoint=Checkpoint()))
    run.until_step(8)
    for member in run.members():
        run.kill(member)
    assert ended(run) == undisturbed
    [resumed] = run.events("resumed")
    assert (resumed["step"], resumed["checkpoint"]) == (-1, None)


def raytrain(*arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_plus", *map(str, arguments)],
        cwd=TASKS,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    return done.returncode, done.stdout, done.stderr


def spawn(file: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `raytrain run` with its own Ray."""
    return subprocess.Popen(
        [sys.executable, "-m", "raytrain_plus", "run", str(file), "--json", *arguments],
        cwd=TASKS,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end_all(process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to driver, Ray, controller and workers at once."""
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        one.kill()
    process.communicate(timeout=30)


def until_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    events = folder / "events.ndjson"
    while time.monotonic() < deadline and process.poll() is None:
        if events.exists() and f'"step": {step}, ' in events.read_text():
            return
        time.sleep(0.02)
    out, err = process.communicate(timeout=30)
    raise AssertionError(f"step {step} was not seen: {out}{err}")


@pytest.mark.slow
def test_after_the_loss_of_everything_the_same_command_resumes(undisturbed: tuple[Any, ...], tmp_path: Path) -> None:
    padded = exact(tmp_path, "job", workers=Workers(min=4), args={"pad_s": 0.03})
    file = tmp_path / "job.yaml"
    file.write_text(padded.to_yaml())
    process = spawn(file)
    until_step(tmp_path / "runs" / "job", 33, process)
    end_all(process)
    code, out, err = raytrain("resume", "job", "--storage", "elsewhere")
    assert (code, "there is no run 'job'" in err) == (2, True)
    # With fewer workers, by the folder alone.
    fewer = ("--set", "workers={min: 1}", "--set", "collective=torch", "--json")
    code, out, err = raytrain("resume", tmp_path / "runs" / "job", *fewer)
    assert code == 0, err
    result = json.loads(out)
    assert (result["state_sha256"], result["metrics"]) == (undisturbed[0], undisturbed[2])
    assert (result["steps"], result["samples"]) == (60, 60 * 36)
    [resumed] = [event for event in read_events(LocalFolder(tmp_path / "runs" / "job")) if event["kind"] == "resumed"]
    assert result["trained_steps"] == 60 - resumed["step"] - 1 < 60
    assert result["trained_samples"] == result["trained_steps"] * 36
    assert audit(tmp_path / "runs" / "job").clean
    again = spawn(file)
    out, err = again.communicate(timeout=60)
    assert (again.returncode, json.loads(out)["state_sha256"]) == (0, undisturbed[0]), err
    assert json.loads(out)["trained_steps"] == 0
    code, out, err = raytrain("status", tmp_path / "runs" / "job")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "job: finished; 60 steps"
    assert [line.split()[1] for line in lines[2:]] == ["60", "50", "40"]
    assert all(line.endswith("complete") for line in lines[2:])
    outside_of_us(tmp_path)


def outside_of_us(tmp_path: Path) -> None:
    """Load the exported model in a process that has only torch and safetensors."""
    code, _, err = raytrain("export", tmp_path / "runs" / "job", "--to", tmp_path / "model.safetensors")
    assert code == 0, err
    program = ("export", tmp_path / "runs" / "job", "--to", tmp_path / "model.pt2", "--format", "torch-export")
    code, _, err = raytrain(*program)
    assert code == 0, err
    script = f"""
import sys
import torch, safetensors.torch
weights = safetensors.torch.load_file({str(tmp_path / "model.safetensors")!r})
ended = safetensors.torch.load_file({str(tmp_path / "runs" / "job" / "model.safetensors")!r})
assert weights.keys() == ended.keys() and all(torch.equal(weights[name], ended[name]) for name in ended)
program = torch.export.load({str(tmp_path / "model.pt2")!r})
assert all(torch.equal(program.state_dict[name], weights[name]) for name in weights)
assert not [name for name in sys.modules if name.startswith(("raytrain", "ray.", "horovod"))]
assert program.module()(torch.zeros(5, 6)).shape == (5, 3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_losses_of_everything_and_one_hash(undisturbed: tuple[Any, ...], tmp_path: Path) -> None:
    for number in range(20):
        draw = random.Random(number)
        name = f"job-{number}"
        workers = Workers(min=draw.choice((1, 2, 3)))
        every = Checkpoint(every_steps=draw.choice((3, 10)), keep=draw.choice((1, 3)))
        padded = exact(tmp_path, name, workers=workers, args={"pad_s": 0.01}, checkpoint=every)
        file = tmp_path / f"{name}.yaml"
        file.write_text(padded.to_yaml())
        process = spawn(file)
        until_step(tmp_path / "runs" / name, draw.randrange(50), process)
        time.sleep(draw.random() * 0.2)
        end_all(process)
        code, out, err = raytrain("run", file, "--json")
        assert code == 0, err
        assert json.loads(out)["state_sha256"] == undisturbed[0], number
        found = audit(tmp_path / "runs" / name)
        assert found.clean, (number, found.faults)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_saved_by_four_and_resumed_by_any_number_on_either_library(
    undisturbed: tuple[Any, ...], tmp_path: Path
) -> None:
    for library, other in (("horovod", "torch"), ("torch", "horovod")):
        run = Run(exact(tmp_path, library, workers=Workers(min=4), collective=library, steps=30))
        run.finish()
        for size in (1, 2, 3, 8):
            folder = tmp_path / "runs" / f"{library}-{size}"
            shutil.copytree(run.folder, folder)
            longer = ("steps=60", f"workers={{min: {size}}}", f"collective={other}")
            result = resume(folder, longer, quiet=True, roots=[TASKS])
            assert result.state_sha256 == undisturbed[0], (library, size)
            assert audit(folder).clean


@pytest.mark.usefixtures("eight")
@pytest.mark.slow
def test_what_does_not_fit_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "quiet"
    ended(Run(exact(tmp_path, "quiet", workers=Workers(min=2))))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def refused(match: str, *overrides: str, kind: type[InputError] = InputError) -> None:
        with pytest.raises(kind, match=match):
            resume(folder, overrides, quiet=True, roots=[TASKS])
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

    refused(r"they differ in data\.shards", "data.shards=6")
    refused(r"they differ in seed, clip_norm", "seed=3", "clip_norm=2.0")
    refused("50 steps are fewer than the run has already made \\(60\\)", "steps=50")
    other = r"to another task: norm\.running_mean is float32 \[16\] in the checkpoint, float64 \[16\] in the task's"
    refused(other, "steps=80", f"args={{folder: {tmp_path}, double: true}}", kind=CheckpointError)
    more = (tmp_path / "data" / "0.parquet").read_bytes()
    (tmp_path / "data" / "new.parquet").write_bytes(more)
    refused("the data has changed since the run started: new.parquet is new", "steps=80", kind=DataError)
    (tmp_path / "data" / "new.parquet").unlink()
    document = next(iter(sorted((folder / "checkpoints").glob("*00059-*.json"))))
    written = document.read_bytes()
    rest = written.partition(b", ")[2].replace(b'"format": 1', b'"format": 7')
    document.write_bytes(b'{"xxh3_128": "' + xxhash.xxh3_128(rest).hexdigest().encode() + b'", ' + rest)
    before[document] = document.read_bytes()
    refused("the checkpoint has format 7, but this version reads format 1", "steps=80", kind=CheckpointError)
    document.write_bytes(written)
    # A finished run continues to more steps, and reports that it did.
    result = resume(folder, ["steps=70"], quiet=True, roots=[TASKS])
    assert (result.status, result.steps) == ("finished", 70)
    assert audit(folder).clean
    kinds = [event for event in read_events(LocalFolder(folder)) if event["kind"] in ("run_started", "resumed")]
    assert [event["kind"] for event in kinds] == ["run_started", "run_started", "resumed"]
    assert "steps: 70" in kinds[1]["job"]
    assert kinds[2]["step"] == 59


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    undisturbed: tuple[Any, ...], tmp_path: Path
) -> None:
    run = Run(exact(tmp_path, "broken", workers=Workers(min=2), steps=30, args={"pad_s": 0.02}))
    run.finish()
    [file] = (run.folder / "checkpoints").glob("*00029-*/00001-of-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = resume(run.folder, ["steps=60"], quiet=True, roots=[TASKS])
    assert result.state_sha256 == undisturbed[0]
    assert audit(run.folder).clean
    [resumed] = run.events("resumed")
    assert resumed["step"] == 19
    [failed] = run.events("checkpoint_failed")
    assert failed["step"] == 29
    assert "00001-of-00002.safetensors: the file is damaged" in failed["error"]


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a file system of its own in `folder`."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=10)


@contextmanager
def full(run: Path) -> Iterator[None]:
    """Fill the disk of a run's folder."""
    filler = run / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        for _ in range(10_000):
            file.write(bytes(4096))
    yield
    filler.unlink()


@contextmanager
def read_only(run: Path) -> Iterator[None]:
    """Remount the disk read-only, as a kernel does with a faulty disk."""
    folder = str(run / "checkpoints")
    subprocess.run(["mount", "--bind", folder, folder], check=True, timeout=10)
    subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True, timeout=10)
    yield
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=10)


@contextmanager
def forbidden(run: Path) -> Iterator[None]:
    """Forbid new files, even for the superuser."""
    folder = str(run / "checkpoints")
    subprocess.run(["chattr", "+i", folder], check=True, timeout=10)
    yield
    subprocess.run(["chattr", "-i", folder], check=True, timeout=10)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
@pytest.mark.parametrize(
    ("ailing", "words"),
    [
        (full, "[Errno 28] No space left on device"),
        (read_only, "[Errno 30] Read-only file system"),
        (forbidden, "[Errno 1] Operation not permitted"),
    ],
)
def test_a_disk_that_accepts_nothing_costs_checkpoints_and_no_step(
    undisturbed: tuple[Any, ...], tmp_path: Path, ailing: Any, words: str
) -> None:
    with small_disk(tmp_path / "small", 8):
        storage = str(tmp_path / "small" / "runs")
        run = Run(exact(tmp_path, "ailing", workers=Workers(min=2), storage=storage, args={"pad_s": 0.1}))
        run.until_told("checkpoint_saved")
        with ailing(run.folder):
            seen = len(run.told)
            run.until(lambda: any(event["kind"] == "checkpoint_failed" for event in run.told[seen:]), "a failure", 60)
            [failed, *_] = [event for event in run.told if event["kind"] == "checkpoint_failed"]
            assert f"could not write its share: {words}" in failed["error"]
            assert str(run.folder / "checkpoints") in failed["error"]
            # No step waits for the disk.
            at = [event["time"] for event in run.told if event["kind"] == "step_committed" and event["step"] >= 10]
            assert at[-1] - at[0] > 3
            assert max(after - before for before, after in pairwise(at)) < 2
            # The last complete checkpoint remains.
            assert kept_steps(run.folder)[-1] == 9
        result = run.finish()
        assert (result.status, result.state_sha256) == ("finished", undisturbed[0])
        # What could not be written earlier is written now.
        assert run.losses() == undisturbed[1]
        assert audit(run.folder).clean
        saved = [event["step"] for event in run.events("checkpoint_saved")]
        assert saved[-1] == 59


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    """Start a proxy in front of a local S3 with a bucket `runs`."""
    with serving("runs") as store, relaying(store) as server:
        yield server


def end_controller() -> None:
    """End the controller of the only running run for good: Ray does not start it again."""
    [name] = [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
    ray.kill(ray.get_actor(name, namespace=NAMESPACE))


@pytest.mark.slow
def test_a_run_on_an_object_store_survives_the_same(proxy: Proxy, undisturbed: tuple[Any, ...], tmp_path: Path) -> None:
    storage = at(f"s3://runs/{tmp_path.name}", proxy.address)
    far = exact(tmp_path, "far", workers=Workers(min=2), args={"pad_s": 0.03}, storage=storage)
    run = Run(far)
    run.until(lambda: run.committed() >= 15 and run.events("checkpoint_saved"), "step 15 and a checkpoint")
    for member in run.members():
        run.kill(member)
    run.until(lambda: run.events("resumed") and run.committed() >= 35, "step 35, after the loss")
    end_controller()
    with pytest.raises(RunError, match="the controller died"):
        run.finish()
    # Otherwise the test waits ten seconds for it.
    folder = open_folder(within(storage, "far"))
    folder.remove("lease.json")
    result = Run(far, fresh=False).finish()
    assert (result.status, result.state_sha256, dict(result.metrics)) == ("finished", undisturbed[0], undisturbed[2])
    assert result.path == folder.address
    found = audit(result.path)
    assert found.clean, found.faults
    told = list(read_events(folder))
    assert [event["kind"] for event in told].count("run_started") == 2
    assert [event["kind"] for event in told].count("resumed") == 2
    assert len([name for name in folder.files() if name.startswith("events-")]) == 2
    assert folder.files("tensorboard")
    model = torch.nn.ModuleDict({name: build() for name, build in Net().parts().items()})
    assert load(result.path, model) == 59
    ended = safetensors.torch.load(folder.read("model.safetensors"))
    assert all(torch.equal(ended[name], value) for name, value in model.state_dict().items())
    assert not [name for name in folder.files() if b"pa55word" in folder.read(name)]
    # It is not run again.
    assert resume(result.path, quiet=True, roots=[TASKS]) == replace(result, trained_steps=0, trained_samples=0)
    code, out, err = raytrain("status", "far", "--storage", storage)
    assert code == 0, err
    assert out.splitlines()[0] == "far: finished; 60 steps"
    assert "single writer not enforced" not in out


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_costs_no_step(
    proxy: Proxy, undisturbed: tuple[Any, ...], tmp_path: Path
) -> None:
    storage = at(f"s3://runs/{tmp_path.name}", proxy.address)
    run = Run(exact(tmp_path, "far", workers=Workers(min=2), args={"pad_s": 0.04}, storage=storage))
    run.until_told("checkpoint_saved")
    seen = run.committed()
    proxy.down = True
    run.until_step(seen + 30)
    proxy.down = False
    result = run.finish()
    assert (result.status, result.state_sha256) == ("finished", undisturbed[0])
    assert run.losses() == undisturbed[1]
    written = [event for event in read_events(open_folder(result.path)) if event["kind"] == "step_committed"]
    assert [event["loss"] for event in written] == undisturbed[1]
    found = audit(result.path)
    assert found.clean, found.faults
    saved = [event["step"] for event in run.events("checkpoint_saved")]
    assert saved[-1] == 59


def kept_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a run's folder, oldest first."""
    return sorted(found.step for found in survey(LocalFolder(folder)) if found.manifest is not None)


@pytest.mark.slow
def test_of_two_controllers_the_older_one_stops(undisturbed: tuple[Any, ...], tmp_path: Path) -> None:
    twice = exact(tmp_path, "twice", workers=Workers(min=2), args={"pad_s": 0.05})
    first = Run(twice)
    first.until_told("checkpoint_saved")
    ours = psutil.Process().children(recursive=True)
    [controller] = [child for child in ours if "Controller" in " ".join(child.cmdline())]
    controller.suspend()  # like one that has lost its network; its workers continue
    second = Run(replace(twice, workers=Workers(min=3)), fresh=False)
    second.until(lambda: [event for event in second.told if event["kind"] == "resumed"], "the second one")
    controller.resume()
    with pytest.raises(RunError, match="another controller has taken this run over"):
        first.finish()
    assert ended(second) == undisturbed
    assert len(second.events("resumed")) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("eight")
def test_a_checkpoint_every_few_seconds(tmp_path: Path) -> None:
    timed = Checkpoint(every_steps=None, every_s=1.0, keep=100)
    run = Run(exact(tmp_path, "timed", workers=Workers(min=3), args={"pad_s": 0.02}, checkpoint=timed))
    run.finish()
    saved = run.events("checkpoint_saved")
    times, steps = [event["time"] for event in saved], [event["step"] for event in saved]
    assert len(saved) >= 4
    # No request is fulfilled twice; the last checkpoint is the one at the end.
    assert all(after - before > 0.9 for before, after in pairwise(times[:-1])), times
    assert kept_steps(run.folder) == steps


@pytest.mark.slow
@pytest.mark.usefixtures("eight")
def test_the_best_checkpoint_stays_and_a_run_resumes_with_other_arguments(tmp_path: Path) -> None:
    best = Checkpoint(every_steps=None, every_s=None, keep=1, keep_best=KeepBest(metric="loss", mode="max"))
    evaluate = Evaluate(path=str(tmp_path / "data"), every_steps=10)
    settings = {"workers": Workers(min=2), "checkpoint": best, "evaluate": evaluate, "args": {"pad_s": 0.02}}
    run = Run(exact(tmp_path, "best", **settings))
    run.finish()
    losses = {event["step"]: event["metrics"]["loss"] for event in run.events("evaluated") if event["step"] >= 0}
    worst = max(losses, key=lambda step: losses[step])
    assert worst != 59
    assert kept_steps(run.folder) == [worst, 59]
    model = torch.nn.ModuleDict({name: build() for name, build in Net().parts().items()})
    assert (load(run.folder, model, best=True), load(run.folder, model)) == (worst, 59)
    code, out, err = raytrain("status", run.folder)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line.endswith("the best")] == [str(worst + 1)], err
    result = resume(run.folder, ["steps=70", "args.pad_s=0.001"], quiet=True, roots=[TASKS])
    assert (result.status, result.steps) == ("finished", 70)
    begun = [event["job"] for event in run.events("run_started")]
    assert ["pad_s: 0.001" in text for text in begun] == [False, True]
    assert kept_steps(run.folder) == [worst, 69]
    assert audit(run.folder).clean


def test_an_unknown_metric_is_an_error_that_lists_the_known_ones(undisturbed: tuple[Any, ...], tmp_path: Path) -> None:
    wrong = Checkpoint(keep_best=KeepBest(metric="accuracy", mode="max"))
    with pytest.raises(InputError, match="evaluate returns no metric 'accuracy'") as caught:
        Run(exact(tmp_path, "wrong", workers=Workers(min=1), checkpoint=wrong)).finish()
    assert caught.value.expected == "one of loss"


@pytest.mark.slow
def test_workers_killed_while_they_write_their_shares_cost_that_checkpoint_alone(
    proxy: Proxy, undisturbed: tuple[Any, ...], tmp_path: Path
) -> None:
    storage = at(f"s3://runs/{tmp_path.name}", proxy.address)
    slow = {"pad_s": 0.06}
    run = Run(exact(tmp_path, "far", workers=Workers(min=2), args=slow, storage=storage))
    run.until_told("checkpoint_saved")
    proxy.down = True
    # The next checkpoint is due, and cannot be written.
    run.until_step((run.committed() // 10 + 1) * 10 + 2)
    for member in run.members():
        run.kill(member)
    proxy.down = False
    result = run.finish()
    assert (result.status, result.state_sha256) == ("finished", undisturbed[0])
    [resumed] = run.events("resumed")
    assert resumed["step"] < resumed["voided_to"] - 1
    assert run.events("checkpoint_saved")[-1]["step"] == 59
    folder = open_folder(result.path)
    found = audit(result.path)
    assert found.clean, found.faults
    assert [one.why for one in survey(folder) if one.manifest is None] == []
