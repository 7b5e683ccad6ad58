"""Workers die around the end of a run and around its evaluations: the checkpoints are whole, the best state is kept."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from raytrain_plus import Checkpoint, EarlyStop, Evaluate, Job, Parallel, Result, Workers
from raytrain_plus.audit.audit import audit
from raytrain_plus.runs.export import Which, weights_of
from raytrain_plus.runs.history import load_history
from raytrain_plus.runs.status import status
from raytrain_plus.state.stored.manifest import best_of
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

BEST, END = 30, 50
"""The distance is 5 after 30 and after 40 steps, and larger after 50."""


def early(tmp_path: Path, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "task": "tasks:Peaks",
        "reduction": "exact",
        "workers": Workers(min=2),
        "evaluate": Evaluate(path=str(write_data(tmp_path / "data")), every_steps=10),
        "early_stop": EarlyStop(metric="distance", patience=2),
        "checkpoint": Checkpoint(keep=1),
        "args": {"pad_s": 0.01},
    }
    return job(tmp_path, **{**settings, **changes})


STAGES = {"parallel": Parallel(pipeline=2, microbatches=1), "workers": Workers(min=2)}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Result:
    """Return a run that ended early, undisturbed."""
    one = Run(early(tmp_path_factory.mktemp("calm"), workers=Workers(min=1)))
    return one.finish()


def model(result: Result) -> bytes:
    return (Path(result.path) / "model.safetensors").read_bytes()


def check(result: Result, calm: Result) -> None:
    """Check that a run ended as the undisturbed one, with whole checkpoints and a folder that says what is true."""
    assert (result.status, result.error, result.steps) == ("finished", None, END)
    assert (result.state_sha256, result.model_step) == (calm.state_sha256, BEST - 1)
    assert model(result) == model(calm)
    assert result.stopped_early == calm.stopped_early
    run = LocalFolder(Path(result.path))
    found = [one for one in load_history(run).found if not one.why.startswith(("void", "not finished"))]
    whole = weights_of(LocalFolder(Path(calm.path)), Which())[0].tensors.keys()
    for one in found:
        assert one.manifest is not None, one.why
        assert one.manifest.tensors.keys() == whole
    best = best_of([one.manifest for one in found if one.manifest is not None])
    assert best is not None
    assert best.step == BEST - 1
    told = status(run)
    assert (told.state, told.incomplete_from) == ("finished", None)
    assert audit(result.path).clean, audit(result.path).faults


def test_a_stage_that_dies_while_the_last_state_is_saved_leaves_no_checkpoint_without_it(
    tmp_path: Path, calm: Result
) -> None:
    one = Run(early(tmp_path, **STAGES))
    one.until_told("saving")
    one.kill(one.members()[1])
    check(one.finish(), calm)


@pytest.mark.slow
def test_a_worker_that_dies_in_the_best_evaluation_takes_nothing_with_it(tmp_path: Path, calm: Result) -> None:
    one = Run(early(tmp_path, task="tasks:DiesEvaluating", args={"at": BEST, "pad_s": 0.01}))
    result = one.finish()
    assert result.recoveries == 1
    check(result, calm)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_kills_around_evaluations_and_the_end_change_nothing(tmp_path: Path, calm: Result, seed: int) -> None:
    draw = Random(seed)
    one = Run(early(tmp_path, **draw.choice((STAGES, {"workers": Workers(min=1, max=2)}))))
    kind, count = draw.choice((("evaluated", 3), ("evaluated", 4), ("saving", 1), ("checkpoint_saved", 3)))
    one.until_told(kind, count)
    time.sleep(draw.choice((0.0, 0.0, 0.01, 0.05)))
    try:
        os.kill(draw.choice(one.members())["pid"], signal.SIGKILL)
    except ProcessLookupError:
        assert one.finish().status == "finished"
    check(one.finish(), calm)
