"""A loop of a user's own has every promise of a task: the same bits, through deaths, at any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Data, Evaluate, Job, Parallel, Workers
from raytrain_plus.launch.handle import attach
from raytrain_plus.launch.verify import verify
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, ended, job
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

STEPS = 200


def looped(tmp_path: Path, name: str, task: Any = "loops:main", **changes: Any) -> Job:
    path = str(write_data(tmp_path / "data", rows=517))
    settings: dict[str, Any] = {
        "task": task,
        "steps": STEPS,
        "reduction": "exact",
        "data": Data(path=path, batch_size=48, shards=6),
        "evaluate": Evaluate(path=path, every_steps=100),
        **changes,
    }
    return job(tmp_path, name=name, **settings)


def begun(tmp_path: Path, pid: int) -> int:
    return len((tmp_path / f"begun-{pid}").read_text().splitlines())


def test_a_loop_gives_the_bits_of_its_task_from_1_to_3_workers_to_2_after_a_death(tmp_path: Path) -> None:
    one = Workers(min=1)
    expected = ended(Run(looped(tmp_path, "task", "loops:Same", workers=one)))
    assert ended(Run(looped(tmp_path, "alone", workers=one))) == expected
    run = Run(looped(tmp_path, "shaken", workers=Workers(min=1, max=1), args={"pad_s": 0.02}))
    [first] = run.until_size(1)
    run.until_step(5)
    before = begun(tmp_path, first["pid"])
    handle = attach(run.folder)
    handle.rescale(max=3)
    members = run.until_size(3)
    run.until_step(run.committed() + 3)
    handle.rescale(max=2)
    run.until_size(2)
    run.until_step(run.committed() + 3)
    run.kill(run.members()[1])
    assert ended(run) == expected
    assert members[0]["pid"] == first["pid"] == run.members()[0]["pid"]
    assert begun(tmp_path, first["pid"]) == before
    assert run.events("recovered")


def test_a_loop_is_verified_with_deaths_and_a_sharded_optimizer(tmp_path: Path) -> None:
    wanted = looped(
        tmp_path,
        "verified",
        workers=Workers(min=2),
        parallel=Parallel(sharded="optimizer"),
        evaluate=None,
        args={"pad_s": 0.01},
    )
    found = verify(wanted, [2, 3], kills=1, steps=20, roots=[TASKS])
    assert found.agree, found.lines()


def test_what_a_loop_remembers_is_the_same_everywhere(tmp_path: Path) -> None:
    task = "loops:remembering"
    expected = ended(Run(looped(tmp_path, "one", task, workers=Workers(min=1))))
    run = Run(looped(tmp_path, "killed", task, workers=Workers(min=2, max=3), args={"pad_s": 0.02}))
    run.until_size(3)
    run.until_step(5)
    run.kill(run.members()[1])
    run.until_told("recovered")
    assert ended(run) == expected


@pytest.mark.slow
def test_a_loop_that_stops_itself_continues_with_what_it_remembers(tmp_path: Path) -> None:
    task = "loops:remembering"
    expected = ended(Run(looped(tmp_path, "one", task, workers=Workers(min=1))))
    (tmp_path / "stop").touch()
    stopped = Run(looped(tmp_path, "stopped", task, workers=Workers(min=2), args={"pad_s": 0.02}))
    result = stopped.finish()
    assert result.status == "stopped"
    assert 21 <= result.steps < STEPS
    resumed = Run(stopped.job, fresh=False)
    assert ended(resumed) == expected
