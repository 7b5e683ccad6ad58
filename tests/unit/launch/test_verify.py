"""The comparison of `verify` on runs that agree, that differ, or that did not run as planned."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raytrain_plus import Data, Job, Parallel, Workers
from raytrain_plus.errors import InputError, RunError
from raytrain_plus.launch import verify as module
from raytrain_plus.launch.verify import CULPRITS, ComparedRun, Comparison, Kills, verify
from raytrain_plus.observe.run_events import EventLog
from raytrain_plus.result import Result
from raytrain_plus.state.stored.checkpoint import commit
from raytrain_plus.state.stored.manifest import name_of
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.states import described, shares

JOB = Job(name="job", task="a:B", data=Data(path="data", batch_size=12, shards=12), steps=10, reduction="exact")
SIZES = (1, 2, 4)


@dataclass
class Fakes:
    """Simulated runs: functions that give the values of each of `SIZES` after a step."""

    model: Callable[[int, int], float] = lambda size, step: float(step)
    """The value of a weight, given (size, step)."""
    moments: Callable[[int, int], float] = lambda size, step: float(step)
    """The value of the optimizer state, given (size, step)."""
    loss: Callable[[int, int], float] = lambda size, step: 1.0 / (1 + step)
    metric: Callable[[int], float] = lambda size: 0.5
    changes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Other fields of the trial that differ for a size."""
    made: list[str] = field(default_factory=list)
    """The names of the simulated runs."""
    cuts: list[int] = field(default_factory=list)
    """The numbers of steps of the runs that searched for a difference."""

    def trial(self, job: Job, folder: Path, name: str, size: int, kills: Kills, roots: object) -> ComparedRun:
        assert job.steps is not None
        last = job.steps - 1
        self.made.append(name)
        if name.startswith("to-"):
            self.cuts.append(job.steps)
        weight, moment = (np.float64(of(size, last)) for of in (self.model, self.moments))
        state = {
            "param/a.weight": torch.zeros(2),
            "param/b.weight": torch.tensor(weight),
            "optim/a.weight/exp_avg": torch.tensor(moment),
        }
        (folder / name).mkdir()
        run = LocalFolder(folder / name)
        commit(run, described(last, 0, shares(run, state, name_of(last, 0), 2)))
        return replace(
            ComparedRun(
                workers=size,
                to_form=size,
                to_kill=kills.all,
                killed=kills.all,
                state_sha256=f"{self.model(size, last)} {self.moments(size, last)}",
                losses=tuple(self.loss(size, step) for step in range(job.steps)),
                metrics={"accuracy": self.metric(size)},
                audit_clean=True,
                seconds=0.1,
            ),
            **self.changes.get(size, {}),
        )


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Comparison]:
    def judge(fakes: Fakes, sizes: tuple[int, ...] = SIZES, kills: int = 1) -> Comparison:
        monkeypatch.setattr(module, "_trial", fakes.trial)
        monkeypatch.setattr(module, "_shortened", lambda job, steps, roots: replace(job, steps=steps))
        monkeypatch.setattr(module, "connected", lambda job, address: contextlib.nullcontext())
        return verify(JOB, sizes, kills=kills, steps=10)

    return judge


def test_runs_that_agree(judged: Callable[..., Comparison]) -> None:
    found = judged(Fakes())
    assert (found.agree, found.differs, found.steps) == (True, "", 10)
    # With one worker a kill would lose the state.
    assert [trial.to_kill for trial in found.trials] == [0, 1, 1]
    assert found.lines()[-1] == "  all runs gave the same bits and used every row once"
    assert found.to_json()["culprits"] == ()


def test_nan_equals_nan(judged: Callable[..., Comparison]) -> None:
    assert judged(Fakes(loss=lambda size, step: float("nan"), metric=lambda size: float("nan"))).agree


@pytest.mark.parametrize("first", [0, 1, 6, 9])
def test_the_first_step_and_tensor_that_differ(judged: Callable[..., Comparison], first: int) -> None:
    def model(size: int, step: int) -> float:
        return step + (size == 4 and step >= first) * 1e-7

    fakes = Fakes(model=model, loss=lambda size, step: model(size, step - 1))
    found = judged(fakes)
    assert (found.agree, found.differs) == (False, f"after step {first}, first in 'b.weight'")
    # The losses bound the search: they differ from the step after the first difference.
    assert max(fakes.cuts) <= first + 2
    said = found.lines()
    assert said[-5] == f"  the runs differ: {found.differs}"
    assert said[-3:] == [f"    - {culprit}" for culprit in CULPRITS]
    assert json.loads(json.dumps(found.to_json()))["culprits"] == list(CULPRITS)


def test_a_difference_in_the_optimizers_state_alone(judged: Callable[..., Comparison]) -> None:
    found = judged(Fakes(moments=lambda size, step: step + (size == 2 and step >= 7) * 1e-7))
    assert (found.agree, found.differs) == (False, "after step 7, first in the optimizer's 'exp_avg' of 'a.weight'")


def test_a_difference_in_an_evaluation_alone(judged: Callable[..., Comparison]) -> None:
    fakes = Fakes(metric=lambda size: 0.5 + (size == 2) * 1e-7)
    found = judged(fakes)
    assert (found.agree, found.differs) == (False, "only in the metrics of an evaluation")
    assert fakes.cuts == []


def test_a_difference_in_a_loss_alone(judged: Callable[..., Comparison]) -> None:
    found = judged(Fakes(loss=lambda size, step: step + (size == 2 and step == 3) * 1e-7))
    assert (found.agree, found.differs) == (False, "only in the loss of step 3")


def test_a_difference_that_does_not_repeat(judged: Callable[..., Comparison]) -> None:
    class Once(Fakes):
        def trial(self, job: Job, folder: Path, name: str, size: int, kills: Kills, roots: object) -> ComparedRun:
            made = super().trial(job, folder, name, size, kills, roots)
            return replace(made, state_sha256="another") if name == "1-0" else made

    found = judged(Once())
    assert (found.agree, found.differs) == (False, "not every time: when run again, the states agree after every step")


def test_a_failed_search_reports_how_far_it_came(judged: Callable[..., Comparison]) -> None:
    class Failing(Fakes):
        def trial(self, job: Job, folder: Path, name: str, size: int, kills: Kills, roots: object) -> ComparedRun:
            if name.startswith("to-"):
                raise RunError("no room")
            return super().trial(job, folder, name, size, kills, roots)

    found = judged(Failing(model=lambda size, step: step + size))
    assert found.differs == "at step 9 or before; the search for the first difference failed: no room"


def test_a_run_that_ended_before_its_kills_is_repeated(judged: Callable[..., Comparison]) -> None:
    class Late(Fakes):
        def trial(self, job: Job, folder: Path, name: str, size: int, kills: Kills, roots: object) -> ComparedRun:
            made = super().trial(job, folder, name, size, kills, roots)
            return replace(made, killed=0) if name == "1-0" else made

    fakes = Late()
    assert judged(fakes).agree
    assert fakes.made == ["0-0", "1-0", "1-1", "2-0"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"killed": 0}, "4 workers, 0 of 1 killed"),
        ({"workers": 3}, "3 of 4 workers, 1 killed"),
        ({"audit_clean": False}, "AUDIT NOT CLEAN"),
    ],
)
def test_runs_that_did_not_go_as_planned_do_not_agree(
    judged: Callable[..., Comparison], change: dict[str, Any], said: str
) -> None:
    fakes = Fakes(changes={4: change})
    found = judged(fakes)
    assert len(fakes.made) == (5 if "killed" in change else 3)
    assert (found.agree, found.differs) == (False, "")
    assert any(said in line for line in found.lines())
    assert "all runs gave the same bits" not in found.lines()[-1]


@pytest.mark.parametrize(("kills", "to_form"), [(0, 5), (1, 4)])
def test_a_size_that_makes_no_step_faster_is_smaller_with_kills(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kills: int, to_form: int
) -> None:
    # Twelve shards give at most three per worker on five workers, as on four.
    def made(job: Job, **settings: object) -> Result:
        assert (job.workers.min, job.workers.max) == (1 if kills else 5, 5)
        path = tmp_path / job.name
        path.mkdir()
        log = EventLog(LocalFolder(path))
        place = {"replica": 0, "stage": 0, "params": 1, "shards": [0]}
        members = [{"worker": f"w{number}", **place} for number in range(to_form)]
        for count in (1, to_form, 2):
            view = {"members": members[:count], "spares": [], "collective": "horovod", "moved_bytes": 0}
            log.write("view_formed", generation=count, fields=view)
        log.close()
        return Result(name=job.name, status="finished", exit_code=0, path=path, steps=0, samples=0, state_sha256="a")

    monkeypatch.setattr(module, "run", made)
    monkeypatch.setattr(module, "audit", lambda path: SimpleNamespace(clean=True))
    trial = module._trial(JOB, tmp_path, "0", 5, Kills(kills), ())
    assert (trial.workers, trial.to_form, trial.as_asked) == (to_form, to_form, not kills)


@pytest.mark.parametrize(("size", "partition"), [(1, None), (2, ("in", "out"))])
def test_a_given_partition_is_used_by_trials_with_its_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, partition: tuple[str, ...] | None
) -> None:
    given: list[Parallel] = []

    def made(job: Job, **settings: object) -> Result:
        given.append(job.parallel)
        raise RunError("seen")

    monkeypatch.setattr(module, "run", made)
    staged = replace(JOB, workers=Workers(min=2), parallel=Parallel(pipeline=2, partition=("in", "out")))
    with pytest.raises(RunError, match="seen"):
        module._trial(staged, tmp_path, "0", size, Kills(), ())
    assert [(one.pipeline, one.partition) for one in given] == [(size, partition)]


def test_a_single_run_is_refused(judged: Callable[..., Comparison]) -> None:
    with pytest.raises(InputError, match="nothing to compare") as caught:
        judged(Fakes(), sizes=(4,))
    assert "--workers 1,2" in str(caught.value)


def test_impossible_sizes_are_refused(judged: Callable[..., Comparison]) -> None:
    with pytest.raises(InputError, match="13 workers cannot train this job"):
        judged(Fakes(), sizes=(1, 13))
