"""A worker's handling of damaged states, preempted steps, outdated calls and changed data."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

pytest.importorskip("ray")

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.source import index
from raytrain_plus.errors import DataChanged, Interrupted, TrainingError
from raytrain_plus.state.transfer import Snapshot, digest
from raytrain_plus.state.whole import model_file
from raytrain_plus.storage.local import LocalFolder
from raytrain_plus.workers import worker as module
from raytrain_plus.workers.copier import Copier
from raytrain_plus.workers.messages import ShareOf
from raytrain_plus.workers.saver import Part, Saver
from raytrain_plus.workers.worker import Worker
from tests.unit.data.test_source import write
from tests.unit.training.test_exact_steps import SHARDS, Small, batches, sha, stepper

TENSORS = {"param/x": ("float32", (2,), np.arange(8, dtype=np.uint8))}
WHOLE = Snapshot(4, TENSORS, b"values", digest(4, TENSORS, b"values"))


def fetched(monkeypatch: pytest.MonkeyPatch, sent: Snapshot) -> Snapshot:
    monkeypatch.setattr(module.ray, "wait", lambda references, timeout: (references, []))
    monkeypatch.setattr(module.ray, "get", lambda reference: sent)
    return Worker("worker-0")._fetch(0, "a reference")


def test_a_whole_copy_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(monkeypatch, WHOLE) is WHOLE


@pytest.mark.parametrize("changes", [{"step": 5}, {"values": b"others"}, {"tensors": {}}])
def test_a_damaged_copy_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    with pytest.raises(Interrupted, match="arrived damaged"):
        fetched(monkeypatch, replace(WHOLE, **changes))


def test_torchs_message_for_too_little_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert "out of memory (RuntimeError): " in str(module._users_error(caught.value))


def test_a_task_that_exits_is_an_error_and_no_lost_worker() -> None:
    with pytest.raises(TrainingError, match="the task raised SystemExit: 3"):
        Worker("worker-0")._do(lambda: sys.exit(3))


def test_listening_for_notices_starts_after_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(module, "hear_notices", lambda: done.append("listens"))
    monkeypatch.setattr(Worker, "_prepare", lambda worker, plan, limit_s: done.append(plan) or int(plan))
    with pytest.raises(TrainingError):
        Worker("worker-0").prepare("nothing", 1)  # type: ignore[arg-type]
    assert Worker("worker-0").prepare("8", 1) == 8  # type: ignore[arg-type]
    assert done == ["nothing", "8", "listens"]


class Waits(Small):
    """Its loss waits in the middle of a step that has already changed buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()
        self.go.set()

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
        result = super().loss(model, batch)
        self.reached.set()
        assert self.go.wait(10)
        return result

    def show(self, model: nn.Module) -> str:
        raise AssertionError("the model is in use")


def test_the_state_is_provided_during_a_step_that_is_never_applied(tmp_path: Path) -> None:
    task, worker = Waits(), Worker("worker-0")
    one = worker._stepper = stepper(task)
    worker._task, worker._stage = task, module.WHOLE.stage
    worker._saver = Saver(LocalFolder(tmp_path), one.holding, None, best=False)
    worker._saver.begin(Part(ShareOf(generation=12, writer=0, writers=1), lambda written: None))
    worker._control.begin(0)

    def run(step: int) -> Any:
        return one.run(step, batches(step, range(SHARDS)), SoloWorld(), control=worker._control, wait_s=1)

    run(0)
    before, weights = sha(one), {name: value.clone() for name, value in one.module.state_dict().items()}
    task.reached.clear()
    task.go.clear()
    stepping = worker._thread.submit(run, 1)
    assert task.reached.wait(10)
    assert worker.stand_aside(7) is None, "another generation"
    outcome = worker.stand_aside(0)
    assert outcome is not None
    assert (outcome.holds, outcome.why) == (0, "interrupted")
    # Its share of a checkpoint of that generation will never come.
    assert (outcome.copied, outcome.saved_as) == (-1, 12)
    digest = hashlib.sha256()
    stage = module.WHOLE.stage
    file = model_file([worker.inventory(0, stage)], lambda _, names: lambda: worker.tensors(0, stage, names), digest)
    model = safetensors.torch.load(b"".join(bytes(piece) for piece in file))
    assert digest.hexdigest() == before
    assert all(torch.equal(model[name], weights[name]) for name in model)
    assert model.keys() <= weights.keys()
    assert worker.show(0) is None
    with pytest.raises(Interrupted, match="nor a copy"):
        worker.inventory(1, stage)
    task.go.set()
    with pytest.raises(Interrupted):
        stepping.result(10)
    one.restore_buffers()
    assert (one.held, sha(one)) == (0, before)


def test_a_state_that_is_not_finite_is_not_exported() -> None:
    worker = Worker("worker-0")
    one = worker._stepper = stepper()
    worker._stage = module.WHOLE.stage
    with torch.no_grad():
        dict(one.named)["first.weight"].view(-1)[0] = torch.nan
    with pytest.raises(TrainingError, match=r"the state after step -1 is not finite: 'param/first\.weight' holds NaN"):
        worker.inventory(-1, module.WHOLE.stage)


def test_a_state_that_is_being_changed_is_not_provided() -> None:
    worker = Worker("worker-0")
    worker._stepper = stepper()
    worker._control.begin(0)
    worker._stepper.held = None
    assert worker.stand_aside(0) is None


def test_calls_for_a_generation_that_is_over_are_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker("worker-0")
    worker._stepper = stepper()
    worker._control.begin(3)
    worker.pause(2)
    worker.save(2)
    worker.interrupt(2, frozenset(), frozenset())
    worker.take(2, ("a reference that nobody looks at",))
    assert worker.stand_aside(2) is None
    control = worker._control
    assert [control.pausing(), control.saving(), control.interrupted()] == [False] * 3
    assert not worker._copies
    refused = [record.message for record in caplog.records]
    assert len(refused) == 5
    assert refused[0] == "worker-0 refused a pause request for generation 2; it is in generation 3"
    worker.pause(3)
    assert (control.pausing(), len(caplog.records)) == (True, 5)


class Finishes(Worker):
    """Reaches the end of the run at once; a file is overwritten after the last read, if one is named."""

    overwritten: Path | None = None

    def _feed_of(self, assignment: Any, stack: Any) -> Any: ...

    def _take_place(self, assignment: Any) -> None: ...

    def _join(self, assignment: Any, stack: Any) -> Any:
        return SoloWorld(), 0.0

    def _train(self, *arguments: Any) -> str:
        if self.overwritten is not None:
            os.utime(self.overwritten, (1, 1))
        return "finished"


@pytest.mark.parametrize("name", [None, "data", "held_out"])
def test_all_files_are_checked_again_before_a_run_is_finished(tmp_path: Path, name: str | None) -> None:
    for folder in ("data", "held_out"):
        write(tmp_path / folder / "a.parquet", 4)
    worker = Finishes("worker-0")
    worker.overwritten = None if name is None else tmp_path / name / "a.parquet"
    worker._plan = SimpleNamespace(index=index(tmp_path / "data"), held_out=index(tmp_path / "held_out"))  # type: ignore[assignment]
    worker._stepper = one = stepper()
    worker._stage = module.WHOLE.stage
    worker._saver = Saver(LocalFolder(tmp_path), one.holding, None, best=False)
    worker._copier = Copier("worker-0", one.holding, 1)
    worker._control.begin(0)
    assignment = SimpleNamespace(
        generation=0,
        share=ShareOf(generation=0, writer=0, writers=1),
        layers=module.WHOLE,
        copies=False,
        buddy=None,
        ring=SimpleNamespace(timeout_s=1),
    )
    controller = SimpleNamespace(
        **{call: SimpleNamespace(remote=lambda *arguments: None) for call in ("report", "joined")}
    )
    outcome = worker._serve(controller, assignment)  # type: ignore[arg-type]
    if name is None:
        assert (outcome.why, outcome.error) == ("finished", None)
        return
    # Final: it is not retried, as if a worker had been lost.
    assert (outcome.why, outcome.final, outcome.state_sha256) == ("failed", True, None)
    assert isinstance(outcome.error, DataChanged)
    assert str(outcome.error).startswith(f"{worker.overwritten} on ")
    assert "its modification time changed: 20" in outcome.fault


def test_changed_data_is_final_for_a_worker_that_ends_the_run_by_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data" / "a.parquet", 4)
    worker = module.Worker("worker-0")
    elastic = SimpleNamespace(hang_timeout_s=1)
    plan = SimpleNamespace(index=index(tmp_path / "data"), held_out=None, steps=0, job=SimpleNamespace(elastic=elastic))
    worker._plan = plan  # type: ignore[assignment]
    worker._stepper = one = stepper()
    worker._stage = module.WHOLE.stage
    worker._saver = Saver(LocalFolder(tmp_path), one.holding, None, best=False)
    worker._copier = Copier("worker-0", one.holding, 1)
    monkeypatch.setattr(one, "finish", lambda squares: None)
    assert (worker.finish(0, {}).why, worker.finish(0, {}).final) == ("interrupted", False)
    write(tmp_path / "data" / "a.parquet", 9)
    outcome = worker.finish(0, {})
    assert (outcome.why, outcome.final) == ("failed", True)
    assert isinstance(outcome.error, DataChanged)


def test_a_worker_compares_the_data_with_an_earlier_workers_view_of_it(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 4)
    # The driver's node wrote its own, at another time.
    driver, here = index(tmp_path), str(tmp_path)
    os.utime(tmp_path / "a.parquet", (1, 1))
    job = SimpleNamespace(data=SimpleNamespace(prepare=None))
    first = module._same_data(SimpleNamespace(job=job, sights={}), [], driver)  # type: ignore[arg-type]
    assert first.file_sights != driver.file_sights
    later = SimpleNamespace(job=job, sights={here: first.file_sights})
    assert module._same_data(later, [], driver).file_sights == first.file_sights  # type: ignore[arg-type]
    assert module._sights(SimpleNamespace(index=first, held_out=None)) == later.sights  # type: ignore[arg-type]
    os.utime(tmp_path / "a.parquet", (2, 2))
    with pytest.raises(DataChanged, match=r"its modification time changed: 1970-01-01 00:00:01\.000000 UTC -> 1970"):
        module._same_data(later, [], driver)  # type: ignore[arg-type]
    # It is reported as a change, whatever else is wrong with it.
    (tmp_path / "a.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataChanged, match="its size changed"):
        module._same_data(later, [], driver)  # type: ignore[arg-type]
