"""No controller comes back: the workers stop at one boundary, write what they leave, and end; a later start goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from raytrain_plus import Data, Elastic, Evaluate, Job, Parallel, Result, RunError, Workers, start
from raytrain_plus.audit.audit import audit
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.runs.folder import LEFT
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.workers.states.leftover import leftovers
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, job
from tests.integration.one_ray.remains import nothing_is_left, places
from tests.integration.tasks import write_data
from tests.support.commands import until

pytestmark = [pytest.mark.timeout(480), pytest.mark.usefixtures("cluster")]

STEPS = 150
LAYOUTS: dict[str, dict[str, Any]] = {
    "two workers": {"workers": Workers(min=2)},
    "stages": {"workers": Workers(min=2), "parallel": Parallel(pipeline=2, microbatches=2)},
    "sharded": {"workers": Workers(min=2), "parallel": Parallel(sharded="optimizer")},
}


def exact(tmp_path: Path, layout: str, **changes: Any) -> Job:
    data = write_data(tmp_path / "data")
    args = {"pad_s": 0.003, **changes}
    settings: dict[str, Any] = {
        "reduction": "exact",
        "steps": STEPS,
        # Processes start slowly on a machine that does much else.
        "elastic": Elastic(wait_s=120),
        "data": Data(path=str(tmp_path / "data"), batch_size=48, shards=4),
        "evaluate": Evaluate(path=str(data), every_steps=25),
        "args": args,
    }
    return job(tmp_path, **{**settings, **LAYOUTS[layout]})


def events(folder: LocalFolder, kind: str) -> list[Any]:
    return [event for event in read_events(folder) if event["kind"] == kind]


def begun(one: Job) -> LocalFolder:
    """Start a detached run, and return its folder once it has made some steps."""
    start(one, roots=[TASKS])
    folder = LocalFolder(Path(one.storage) / one.name)
    until(lambda: len(events(folder, "step_committed")) > 30, "30 steps", 120)
    return folder


def end_controller() -> None:
    """End the run's controller so that Ray does not start it again."""
    [name] = [
        one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == "raytrain_plus"
    ]
    ray.kill(ray.get_actor(name, namespace="raytrain_plus"))


def check(one: Job, result: Result, whole: Result, last: int) -> None:
    """Check that the run ended as the undisturbed one, and that each step was made once: `last` was the last one left.

    Nothing is left of what the workers have left.
    """
    folder = LocalFolder(Path(one.storage) / one.name)
    assert (result.status, result.state_sha256, result.metrics) == ("finished", whole.state_sha256, whole.metrics)
    assert [event["step"] for event in events(folder, "step_committed")] == list(range(STEPS))
    assert [(event["step"], event["voided_to"]) for event in events(folder, "resumed")] == [(last, last)]
    evaluated = [event["step"] for event in events(folder, "evaluated")]
    assert evaluated == sorted(set(evaluated))
    found = audit(result.path)
    assert found.clean, found.faults
    assert not folder.files(LEFT)


def last_of(folder: LocalFolder) -> int:
    """Return the step after which both workers have written their states."""
    left = leftovers(folder)
    assert sorted(left) == ["worker-0", "worker-1"]
    [last] = {part.written and part.written.step for part in left.values()}
    assert last is not None
    return last


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Callable[[str], Result]:
    """Return how an undisturbed run of a layout ends."""
    return cache(lambda layout: Run(exact(tmp_path_factory.mktemp("whole"), layout, pad_s=0.0)).finish())


@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=[] if one == "two workers" else pytest.mark.slow) for one in LAYOUTS]
)
def test_a_detached_run_goes_on_where_its_workers_stopped(
    tmp_path: Path, layout: str, whole: Callable[[str], Result]
) -> None:
    one = exact(tmp_path, layout)
    folder = begun(one)
    told = events(folder, "step_committed")[-1]["step"]
    end_controller()
    until(lambda: len(folder.files(LEFT)) == 2, "both workers write what they leave", 90)
    nothing_is_left(60)
    last = last_of(folder)
    assert last >= told
    check(one, Run(one, fresh=False).finish(), whole(layout), last)


@pytest.mark.slow
def test_the_driver_lets_the_workers_write_what_they_leave(tmp_path: Path, whole: Callable[[str], Result]) -> None:
    one = exact(tmp_path, "two workers")
    run = Run(one)
    run.until_step(30)
    end_controller()
    with pytest.raises(RunError, match="its workers have written the state that they had; resume with: raytrain"):
        run.finish()
    nothing_is_left(60)
    last = last_of(LocalFolder(run.folder))
    check(one, Run(one, fresh=False).finish(), whole("two workers"), last)


def controllers() -> list[psutil.Process]:
    """Return the processes of controllers, also those that have just started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[0].startswith("ray::Controller"):
                found.append(process)
    return found


@pytest.mark.slow
def test_a_controller_that_comes_too_late_goes_on_by_itself(tmp_path: Path, whole: Callable[[str], Result]) -> None:
    one = replace(exact(tmp_path, "two workers", pad_s=0.2), elastic=Elastic(wait_s=30))
    folder = begun(one)
    stopped: set[int] = set()

    def left() -> bool:
        # A new one starts when workers end the one that sleeps.
        for process in controllers():
            if process.pid not in stopped:
                stopped.add(process.pid)
                process.suspend()
        return len(folder.files(LEFT)) == 2 and not places()

    until(left, "both workers write what they leave, and end", 150)
    last = last_of(folder)
    for process in controllers():
        process.resume()
    until(lambda: Result.load(folder) is not None, "the run ends", 200)
    result = Result.load(folder)
    assert result is not None
    check(one, result, whole("two workers"), last)
    nothing_is_left(60)
