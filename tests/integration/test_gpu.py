"""Real runs with a GPU: of one worker, which resumes and exports its model, and of several that share it, and die."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import safetensors.torch
import torch

from raytrain_plus import Checkpoint, Data, Ema, Evaluate, Job, Parallel, Profile, Workers, load
from raytrain_plus.audit.audit import audit
from raytrain_plus.observe.step_profile import PHASES
from tests.gpu import DEVICE, NEEDS_GPU, needs, sharing
from tests.integration.elastic import Run, ended, job
from tests.integration.tasks import Net, write_data

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(300), pytest.mark.usefixtures("one_gpu")]

GPUS, SHARING = 1, 4


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[None]:
    """Start a Ray with one GPU, which it need not find itself, and which up to `SHARING` workers share."""
    # Otherwise Ray would show each of them a GPU of its own.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    for name, value in sharing(None).items():
        monkeypatch.setenv(name, value)
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=SHARING,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()
    monkeypatch.undo()


def on_gpu(tmp_path: Path, name: str, **changes: Any) -> Job:
    """Return a job for one worker with a GPU; a checkpoint every ten steps."""
    settings: dict[str, Any] = {
        "task": "tasks:Located",
        "data": Data(path=str(tmp_path / "data"), batch_size=48, shards=12),
        "steps": 60,
        "evaluate": Evaluate(path=str(tmp_path / "data"), every_steps=20),
        "checkpoint": Checkpoint(every_steps=10),
        "workers": Workers(min=1, max=1, gpus=GPUS),
        **changes,
    }
    return job(tmp_path, name=name, **settings)


def devices(tmp_path: Path) -> set[str]:
    """Return where the workers have computed."""
    return {file.read_text() for file in tmp_path.glob("device-*")}


def test_a_killed_worker_resumes_from_its_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    expected = ended(Run(on_gpu(tmp_path, "quiet", reduction="exact")))
    run = Run(on_gpu(tmp_path, "killed", reduction="exact", args={"pad_s": 0.005}))
    run.until(lambda: run.committed() >= 25 and run.events("checkpoint_saved")[1:], "step 25 and two checkpoints", 120)
    [member] = run.members()
    run.kill(member)
    assert ended(run) == expected
    [resumed] = run.events("resumed")
    assert resumed["step"] >= 9
    assert [other["pid"] for other in run.members()] != [member["pid"]]
    assert devices(tmp_path) == {f"{DEVICE} {DEVICE}"}
    assert not run.events("checkpoint_failed")


@pytest.mark.parametrize("precision", ["bf16", "bf16-params", "fp16"])
def test_techniques_together_train_a_model_that_is_exported(tmp_path: Path, precision: Any) -> None:
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"precision": precision, "compile": True, "recompute": "full", "ema": Ema(decay=0.9)}
    run = Run(on_gpu(tmp_path, "all", **settings))
    result = run.finish(240)
    assert result.status == "finished", result.error
    assert audit(result.path).clean
    assert devices(tmp_path) == {f"{DEVICE} {DEVICE}"}
    losses = run.losses()
    assert sum(losses[-10:]) < sum(losses[:10])
    exported = safetensors.torch.load_file(Path(result.path) / "model.safetensors")
    model = Net().model()
    # The layers have names in the export, and none in this model.
    assert {value.dtype for value in exported.values()} <= {torch.float32, torch.int64}
    named = dict(zip(Net().parts(), model, strict=True))
    assert load(run.folder, torch.nn.ModuleDict(named)) == 59


def test_profiled_steps_add_up(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    run = Run(on_gpu(tmp_path, "profiled", profile=Profile(steps=[10, 20], workers=1)))
    result = run.finish(240)
    assert result.status == "finished", result.error
    found = json.loads((Path(result.path) / "profile" / "summary.json").read_text())
    [row] = found["workers"]
    assert row["steps"] == [*range(10, 20)]
    assert sum(row[f"{phase}_ms"] for phase in PHASES) == pytest.approx(row["step_ms"], rel=1e-3)
    assert min(row[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer")) > 0
    assert row["device"] == torch.cuda.get_device_name(DEVICE)


HOROVOD = pytest.param("horovod", marks=needs("horovod", "Horovod"))
NCCL = pytest.param("nccl", marks=needs("nccl", "nccl4py"))


def losses_of_a_cpu(tmp_path: Path, **settings: Any) -> list[float]:
    """Return the losses of a run of one worker without a GPU, whose model is whole."""
    # One worker is too few for stages.
    _, losses, _ = ended(Run(on_gpu(tmp_path, "cpu", workers=Workers(min=1, max=1), parallel=Parallel(), **settings)))
    return losses


def sharing_workers(
    tmp_path: Path, collective: Any, least: int = 1, nccl: bool = False, fault: str = "", **settings: Any
) -> Run:
    """Start a run of `least` to four workers on the one GPU, slow enough to be disturbed; return it once all train.

    `nccl`: slow enough that NCCL forms in it, which takes seconds, in which the host sums.
    """
    args = {"pad_s": 0.1 if nccl else 0.01, **({"fault": fault} if fault else {})}
    workers = Workers(min=least, max=SHARING, cpus=0.25, gpus=GPUS)
    run = Run(on_gpu(tmp_path, "gpu", workers=workers, collective=collective, args=args, **settings))
    run.until_size(SHARING)
    return run


def kill_one(run: Run, tmp_path: Path, nccl: bool) -> None:
    """Kill a worker between steps that all four make, with `nccl` once NCCL sums on each; wait for the recovery."""
    if nccl:
        run.until(lambda: len([*tmp_path.glob("nccl-*")]) >= SHARING, "NCCL on all workers", 120)
    run.until_step(run.committed() + 4)
    run.kill(run.members()[-1])
    run.until_told("recovered", 1)


def recovered_as_on_a_cpu(run: Run, expected: list[float]) -> None:
    """Check that a run lost no step in its recoveries, and its losses; print how long they took."""
    _, losses, _ = ended(run)
    assert losses == pytest.approx(expected, rel=1e-4)
    recovered = run.events("recovered")
    assert recovered
    assert all(one["steps_lost"] == 0 for one in recovered)
    stalls = ", ".join(f"{one['stall_s']:.2f} s" for one in recovered)
    print(f"{run.job.collective}: recovered after {stalls}; with nccl, the host sums until NCCL has formed")


@pytest.mark.parametrize(
    "parallel", [Parallel(), Parallel(pipeline=2), Parallel(pipeline=2, tensor=2)], ids=["replicas", "stages", "slices"]
)
@pytest.mark.parametrize("collective", [HOROVOD, "torch", NCCL])
def test_workers_that_share_a_gpu_recover_to_the_losses_of_a_cpu(
    tmp_path: Path, parallel: Parallel, collective: Any
) -> None:
    """Workers exchange everything through pinned memory, or by NCCL, and survive a loss as on CPUs."""
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"task": "gpu_tasks:Alike", "evaluate": None}
    nccl = collective == "nccl"
    if nccl and parallel.slices > 1:
        # Otherwise NCCL's sums could differ in a bit between the slices, and the job is refused.
        settings["reduction"] = "exact"
    expected = losses_of_a_cpu(tmp_path, **settings)
    run = sharing_workers(tmp_path, collective, nccl=nccl, parallel=parallel, **settings)
    kill_one(run, tmp_path, nccl)
    recovered_as_on_a_cpu(run, expected)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(pipeline=2)], ids=["replicas", "stages"])
@pytest.mark.parametrize("collective", ["torch", NCCL])
def test_a_byte_gpt_has_the_losses_of_a_cpu(tmp_path: Path, parallel: Parallel, collective: Any) -> None:
    """Four replicas, or two of two stages, lose a worker, and another one takes its place."""
    data = Data(path=str(tmp_path / "text"), prepare="examples.byte_gpt:prepare", batch_size=48, shards=12)
    settings: dict[str, Any] = {"task": "gpu_tasks:Bytes", "data": data, "evaluate": None}
    expected = losses_of_a_cpu(tmp_path, **settings)
    nccl = collective == "nccl"
    run = sharing_workers(tmp_path, collective, nccl=nccl, parallel=parallel, **settings)
    kill_one(run, tmp_path, nccl)
    recovered_as_on_a_cpu(run, expected)


@pytest.mark.parametrize("collective", ["torch", NCCL])
def test_a_worker_whose_gpu_finds_a_false_assertion_is_replaced(tmp_path: Path, collective: Any) -> None:
    """The error is the process's alone: the other workers use the same GPU on."""
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"task": "gpu_tasks:Alike", "evaluate": None}
    expected = losses_of_a_cpu(tmp_path, **settings)
    # Another worker has the state, even if the fault comes before all four train.
    run = sharing_workers(tmp_path, collective, 2, collective == "nccl", fault="backward:assert:100", **settings)
    lost = run.until_told("worker_lost")
    assert lost["cause"].startswith("its GPU failed: CUDA error: device-side assert triggered (")
    run.until_told("recovered")
    recovered_as_on_a_cpu(run, expected)
    assert len(run.events("worker_lost")) == 1
