"""`reduction: exact` on a real cluster: the same bits on any number of workers, through any death; every row once."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_plus import Checkpoint, Data, Elastic, Evaluate, Job, Parallel, Workers
from raytrain_plus.audit.audit import audit
from tests.integration.elastic import Run, ended, job
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("eight")]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def eight() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


def exact(tmp_path: Path, name: str, **changes: Any) -> Job:
    """Return a job with BatchNorm, dropout, AdamW, clipping and an augmentation; a step straddles epochs."""
    data = Data(path=str(tmp_path / "data"), batch_size=36, shards=12, transform="tasks:noisy", granule=7, cache_mb=0)
    held_out = Evaluate(path=str(tmp_path / "data"), every_steps=20)
    settings: dict[str, Any] = {"data": data, "steps": 60, "reduction": "exact", "evaluate": held_out, **changes}
    return job(tmp_path, name=name, **settings)


def rings(run: Run) -> set[str]:
    """Return the libraries that summed over the workers, if there were several."""
    return {event["collective"] for event in run.events("view_formed") if len(event["members"]) > 1}


def train(job: Job) -> tuple[str | None, list[float], dict[str, float]]:
    run = Run(job)
    found = ended(run)
    wanted = "horovod" if job.collective == "auto" else job.collective
    assert rings(run) == ({wanted} if job.workers.min > 1 else set())
    return found


def test_the_same_bits_on_other_numbers_of_workers_and_through_a_death(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    # Two epochs and an evaluation in each; more sizes, and longer runs, are below.
    short: dict[str, Any] = {"steps": 30, "evaluate": Evaluate(path=str(tmp_path / "data"), every_steps=12)}
    expected = train(exact(tmp_path, "one", workers=Workers(min=1), **short))
    run = Run(exact(tmp_path, "killed", workers=Workers(min=2, max=3), args={"fault": "applied:kill:15"}, **short))
    assert ended(run) == expected
    assert rings(run) == {"horovod"}
    assert len(run.events("recovered")) >= 1


@pytest.mark.slow
def test_torch_sums_to_the_same_bits_and_a_ring_does_not(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    expected = train(exact(tmp_path, "one", workers=Workers(min=1)))
    assert train(exact(tmp_path, "torch", workers=Workers(min=2), collective="torch")) == expected
    ring = train(exact(tmp_path, "ring", workers=Workers(min=2), reduction="ring"))
    assert ring[0] != expected[0]
    assert ring[1] == pytest.approx(expected[1], rel=1e-4)


def verify(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "raytrain_plus", "verify", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=REPOSITORY,
    )


@pytest.mark.slow
def test_verify_compares_sizes_with_real_deaths(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    sound = exact(tmp_path, "sound", args={"pad_s": 0.01}, task="tests.integration.tasks:Faulty", evaluate=None)
    sound = replace(sound, data=replace(sound.data, transform=None), workers=Workers())
    (tmp_path / "sound.yaml").write_text(sound.to_yaml())
    done = verify(tmp_path / "sound.yaml", "--workers", "1,3", "--kill", "1", "--steps", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 workers, 1 killed" in done.stdout
    assert "all runs gave the same bits and used every row once" in done.stdout
    done = verify(tmp_path / "sound.yaml", "--set", "reduction=ring")
    assert done.returncode == 2
    assert "--set reduction=exact" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Unkeyed", "Remembers", "Timed"])
def test_verify_names_what_differs(tmp_path: Path, task: str) -> None:
    write_data(tmp_path / "data")
    sound = exact(tmp_path, "sound", evaluate=None)
    unsound = replace(sound, name="unsound", task=f"tests.integration.tasks:{task}", args={}, workers=Workers())
    unsound = replace(unsound, data=replace(unsound.data, transform=None))
    (tmp_path / "unsound.yaml").write_text(unsound.to_yaml())
    done = verify(tmp_path / "unsound.yaml", "--workers", "1,2", "--steps", "6", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["differs"] == "after step 0, first in 'first.weight'"
    assert [trial["audit_clean"] for trial in found["trials"]] == [True, True]


@pytest.mark.slow
def test_layers_that_are_computed_again_change_no_bit(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    expected = train(exact(tmp_path, "none", workers=Workers(min=1)))
    killed = exact(tmp_path, "full", workers=Workers(min=2, max=3), args={"fault": "applied:kill:15"}, recompute="full")
    assert ended(Run(killed)) == expected
    stages = exact(tmp_path, "stages", workers=Workers(min=2), parallel=Parallel(pipeline=2), recompute="selective")
    assert ended(Run(stages)) == expected


@pytest.mark.slow
def test_a_running_run_is_audited_up_to_what_is_durable(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    often = Checkpoint(every_steps=10)
    args = {"pad_s": 0.02}
    run = Run(exact(tmp_path, "run", steps=60, evaluate=None, args=args, workers=Workers(min=2), checkpoint=often))
    run.until_step(25)
    found = audit(run.folder)
    assert (found.status, found.clean) == ("unfinished", True), found.faults
    assert 0 < found.audited_to <= run.committed() < 59
    used = found.audited_to + 1
    assert run.finish().status == "finished"
    found = audit(run.folder)
    assert (found.status, found.clean, found.audited_to) == ("finished", True, 59), found.faults
    assert used < 60


@pytest.mark.slow
def test_what_changes_behind_a_runs_back_is_found(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    result = Run(exact(tmp_path, "run", steps=5, evaluate=None)).finish()
    command = [sys.executable, "-m", "raytrain_plus", "audit", "run", "--storage", str(result.path.parent)]
    clean = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (clean.returncode, "used exactly once" in clean.stdout) == (0, True), clean.stdout + clean.stderr
    (tmp_path / "data" / "9.parquet").write_bytes((tmp_path / "data" / "0.parquet").read_bytes())
    foreign = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert foreign.returncode == 1
    assert json.loads(foreign.stdout)["faults"] == ["9.parquet is new; the run began without it"]
    gone = subprocess.run([*command[:-3], "nobody"], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert (gone.returncode, "there is no run 'nobody'" in gone.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_bits_on_one_to_eight_workers(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    found = [train(exact(tmp_path, f"on-{size}", workers=Workers(min=size))) for size in (1, 2, 3, 4, 5, 8)]
    assert all(other == found[0] for other in found)


def disturbed(job: Job, number: int) -> tuple[str | None, list[float], dict[str, float]]:
    """Run a job whose workers die at random times."""
    draw = random.Random(number)
    run = Run(job)
    assert job.steps is not None
    wanted, deaths = draw.randint(1, 4), 0
    while deaths < wanted and run.committed() < job.steps // 2:
        run.until(lambda: whole(run), "a group of two or more")
        run.until_step(run.committed() + draw.randint(1, job.steps // 10))
        time.sleep(draw.random() * 0.1)
        run.kill(draw.choice(run.members()))
        deaths += 1
        run.until_told("worker_lost", deaths)
    assert deaths
    found = ended(run)
    assert rings(run) == {"horovod"}
    return found


def whole(run: Run) -> bool:
    """Return whether the newest view has several members, all alive: one holder of the state must survive."""
    kinds = [event["kind"] for event in run.events() if event["kind"] in ("view_formed", "worker_lost")]
    return kinds[-1:] == ["view_formed"] and len(run.members()) > 1


def example(tmp_path: Path, name: str, model: str, workers: Workers) -> Job:
    """Return a job of the examples: `digits` (BatchNorm, dropout) or `byte_gpt` (AdamW, clipping)."""
    spelled = {"digits": "Digits", "byte_gpt": "ByteGPT"}[model]
    data = Data(
        path=str(tmp_path / model / "train"),
        prepare=f"examples.{model}:prepare",
        batch_size=96 if model == "digits" else 12,
        shards=12,
    )
    return Job(
        name=name,
        task=f"examples.{model}:{spelled}",
        data=data,
        steps=800 if model == "digits" else 80,
        clip_norm=1.0,
        reduction="exact",
        workers=workers,
        elastic=Elastic(wait_s=60),
        storage=str(tmp_path / "runs"),
    )


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("model", ["digits", "byte_gpt"])
def test_one_hash_through_ten_runs_with_deaths(tmp_path: Path, model: str) -> None:
    expected = train(example(tmp_path, "quiet", model, Workers(min=2)))
    for number in range(10):
        job = example(tmp_path, f"run-{number}", model, Workers(min=1, max=4))
        assert disturbed(job, number) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_deaths_between_apply_and_hand_over_leave_the_ledger_whole(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    elastic = Elastic(wait_s=60, max_failures=50)
    settings: dict[str, Any] = {"steps": 1_000_000, "workers": Workers(min=1, max=3), "evaluate": None}
    job = exact(tmp_path, "run", task="tasks:Mortal", args={}, elastic=elastic, **settings)
    run = Run(job)
    result = run.finish(timeout_s=1100)
    assert rings(run) == {"horovod"}
    assert "more failures than elastic.max_failures = 50" in str(result.error)
    assert len(list(tmp_path.glob("died-*"))) > 50
    found = audit(result.path)
    assert found.clean, found.faults
    assert found.audited_to + 1 == result.steps > 100
    kept = {when: kept_steps(tmp_path, run, when) for when in ("applied", "told")}
    print(f"of the steps at which somebody died, so many were kept, and not: {kept}")
    assert all(kept[when].count(True) for when in kept), kept
    undisturbed = Run(
        replace(job, name="undisturbed", steps=result.steps, task="tasks:Net", args={}, workers=Workers())
    )
    state = undisturbed.finish(timeout_s=600).state_sha256
    assert (result.state_sha256, run.losses()) == (state, undisturbed.losses())


def kept_steps(tmp_path: Path, run: Run, when: str) -> list[bool]:
    """Return, for each member that died after it applied a step, whether that step was committed in its generation.

    Then a survivor had applied the step too; otherwise the step was computed again in a later generation.
    """
    committed = {event["step"]: event["generation"] for event in run.events("step_committed")}
    inside: dict[int, int] = {}
    for view in run.events("view_formed"):
        inside |= {member["pid"]: view["generation"] for member in view["members"]}
    kept = []
    for file in tmp_path.glob("died-*"):
        died, step = file.read_text().split()
        pid = int(file.name.removeprefix("died-"))
        # A warm-up step has number 0.
        if died == when and pid in inside and int(step) > 0 and int(step) in committed:
            kept.append(committed[int(step)] == inside[pid])
    return kept
