"""`parallel.sharded: optimizer` with stages, on a real cluster: the bits of one worker, whoever dies and resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Checkpoint, Ema, Parallel, Workers, attach
from tests.integration.elastic import Run, ended
from tests.integration.tasks import write_data
from tests.support.elastic_runs import exact

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

STAGED = Parallel(sharded="optimizer", pipeline=2)
APPLIED = "applied:kill:35"
"""Kills a worker between the change of its rows and their sending; it has made 24 steps to see how they are divided."""
MASTERS = {"precision": "bf16-params", "ema": Ema(decay=0.9)}
"""Masters and averages are divided with the rest."""


@pytest.mark.slow
def test_a_death_after_a_step_is_applied_changes_no_bit(tmp_path: Path) -> None:
    """Two replicas of two stages become one; what the dead worker changed and did not send, its partner has."""
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"steps": 20, "evaluate": None}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), parallel=Parallel(), **settings)))
    workers = Workers(min=2, max=4, cpus=0.5)
    run = Run(exact(tmp_path, "killed", workers=workers, parallel=STAGED, args={"fault": APPLIED}, **settings))
    assert ended(run) == expected
    assert len(run.events("recovered")) >= 1
    assert run.events("resumed") == []
    first = run.events("view_formed")[0]["members"]
    assert {stage: len({one["optimizer_bytes"] for one in first if one["stage"] == stage}) for stage in (0, 1)} == {
        0: 1,
        1: 1,
    }


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("settings", "holders"), [({}, 2), (MASTERS, 1), ({"precision": "fp16", "offload": "optimizer"}, 2)]
)
def test_many_deaths_and_resumes_change_no_bit(tmp_path: Path, settings: dict[str, Any], holders: int) -> None:
    write_data(tmp_path / "data", rows=517)
    settings = {"steps": 100, "args": {"pad_s": 0.01}, **settings}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), parallel=Parallel(), **settings)))
    workers, parallel = Workers(min=2, max=4, cpus=0.5), replace(STAGED, holders=holders)
    saving = {"checkpoint": Checkpoint(every_steps=10)}
    run = Run(exact(tmp_path, "killed", workers=workers, parallel=parallel, **saving, **settings))
    run.until_size(4)
    for number in range(3):
        run.until_step(run.committed() + 8)
        run.kill(run.members()[number % len(run.members())])
        run.until_told("recovered", number + 1)
    run.until_step(run.committed() + 5)
    attach(run.folder).stop()
    assert run.finish().status == "stopped"
    for size in (1, 4):
        again = replace(run.job, name=f"again-{size}", workers=Workers(min=size, max=4, cpus=0.5 if size == 4 else 3))
        shutil.copytree(run.folder, run.folder.parent / again.name)
        assert ended(Run(again, fresh=False))[0] == expected[0]


@pytest.mark.slow
def test_a_single_replica_s_stages_come_from_copies_after_a_death(tmp_path: Path) -> None:
    """There is room for one replica only. After a death one worker holds the whole model, until another comes."""
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"steps": 120, "args": {"pad_s": 0.01}, **MASTERS}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), parallel=Parallel(), **settings)))
    run = Run(exact(tmp_path, "alone", workers=Workers(min=1, max=4, cpus=2), parallel=STAGED, **settings))
    for number in range(2):
        run.until_size(2)
        run.until_step(run.committed() + 10)
        run.kill(run.members()[number])
        run.until_told("recovered", number + 1)
    assert ended(run) == expected
    assert {resumed["checkpoint"] for resumed in run.events("resumed")} <= {None}, "copies in memory, no checkpoints"
    assert {len(view["members"]) for view in run.events("view_formed")} == {1, 2}
