"""`parallel.sharded` on a real cluster: the bits of an unsharded run, whoever dies, joins and resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Checkpoint, Ema, Parallel, Workers, attach
from raytrain_plus.job.setting_types import Sharded
from tests.integration.elastic import Run, ended
from tests.integration.tasks import write_data
from tests.support.elastic_runs import FULL, SHARDED, exact

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

both = pytest.mark.parametrize("sharded", ["optimizer", "full"])
APPLIED = "applied:kill:21"
"""Kills a worker between the change of its rows and their sending; it has made 12 steps to see how they are divided."""


@pytest.mark.parametrize("parallel", [pytest.param(SHARDED, marks=pytest.mark.slow), FULL], ids=str)
def test_a_death_after_a_step_is_applied_changes_no_bit(tmp_path: Path, parallel: Parallel) -> None:
    write_data(tmp_path / "data", rows=517)
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), parallel=Parallel())))
    # A fault comes once in a folder.
    (folder := tmp_path / "fault").mkdir()
    args, workers = {"fault": APPLIED, "folder": str(folder)}, Workers(min=2, max=3)
    run = Run(exact(tmp_path, "killed", workers=workers, parallel=parallel, args=args))
    assert ended(run) == expected
    assert len(run.events("recovered")) >= 1
    assert run.events("resumed") == [], "the second holders have everything"


@pytest.mark.slow
@both
def test_a_loss_moves_nothing_and_its_rows_soon_have_two_holders_again(tmp_path: Path, sharded: Sharded) -> None:
    write_data(tmp_path / "data", rows=517)
    parallel, workers = Parallel(sharded=sharded), Workers(min=2, max=3)
    run = Run(exact(tmp_path, "killed", workers=workers, parallel=parallel, steps=40, args={"pad_s": 0.02}))
    members = run.until_size(3)
    run.until_step(5)
    run.kill(members[1])
    assert ended(run)[0] is not None
    assert run.events("resumed") == []
    first, second, third, *_ = run.events("view_formed")
    held = {member["worker"]: member["optimizer_bytes"] for member in first["members"]}
    left = {member["worker"]: member["optimizer_bytes"] for member in second["members"]}
    assert second["moved_bytes"] == 0
    assert left == {name: held[name] for name in left}
    assert sum(member["optimizer_bytes"] for member in third["members"]) == sum(held.values())
    assert third["moved_bytes"] >= sum(held.values()) - sum(left.values())


@pytest.mark.slow
@pytest.mark.timeout(480)
@both
def test_a_rescaled_run_that_is_stopped_resumes_at_any_size_with_the_same_bits(
    tmp_path: Path, sharded: Sharded
) -> None:
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"steps": 200, "args": {"pad_s": 0.02}}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), parallel=Parallel(), **settings)))
    settings["parallel"] = Parallel(sharded=sharded)
    run = Run(exact(tmp_path, "stopped", workers=Workers(min=3), **settings))
    run.until_step(5)
    handle = attach(run.folder)
    handle.rescale(max=4)
    run.until_size(4)
    run.until_step(run.committed() + 5)
    handle.stop()
    assert run.finish().status == "stopped"
    for size in (5, 2, 1):
        again = replace(run.job, name=f"again-{size}", workers=Workers(min=size, max=max(2, size), cpus=0.5))
        shutil.copytree(run.folder, run.folder.parent / again.name)
        assert ended(Run(again, fresh=False))[0] == expected[0]


@pytest.mark.slow
@both
def test_if_all_holders_of_rows_are_lost_the_newest_checkpoint_is_used(tmp_path: Path, sharded: Sharded) -> None:
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"steps": 200, "args": {"pad_s": 0.02}}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), parallel=Parallel(), **settings)))
    settings["parallel"] = Parallel(sharded=sharded)
    run = Run(exact(tmp_path, "lost", workers=Workers(min=2, max=4), checkpoint=Checkpoint(every_steps=10), **settings))
    members = run.until_size(4)
    run.until_step(run.until_told("checkpoint_saved", 2)["step"] + 4)
    for member in members[1:]:
        run.kill(member)
    resumed = run.until_told("resumed")
    assert resumed["step"] % 10 == 9, "the newest checkpoint"
    assert ended(run)[0] == expected[0]


@pytest.mark.slow
@both
@pytest.mark.parametrize("settings", [{"precision": "bf16-params", "ema": Ema(decay=0.9)}, {"precision": "fp16"}])
def test_many_deaths_rescales_and_a_resume_change_no_bit(
    tmp_path: Path, settings: dict[str, Any], sharded: Sharded
) -> None:
    """Also with masters and averages, which are divided with the rest."""
    write_data(tmp_path / "data", rows=517)
    settings = {"steps": 300, "args": {"pad_s": 0.02}, **settings}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), parallel=Parallel(), **settings)))
    run = Run(exact(tmp_path, "killed", workers=Workers(min=2, max=4), parallel=Parallel(sharded=sharded), **settings))
    run.until_size(4)
    for number in range(3):
        run.until_step(run.committed() + 8)
        run.kill(run.members()[number])
        run.until_told("recovered", number + 1)
        run.until_size(4)
    handle = attach(run.folder)
    handle.rescale(max=3)
    run.until_size(3)
    run.until_step(run.committed() + 5)
    handle.stop()
    assert run.finish().status == "stopped"
    assert run.events("resumed") == [], "no step was lost"
    again = Run(replace(run.job, workers=Workers(min=1), parallel=Parallel()), fresh=False)
    assert ended(again)[0] == expected[0]
    file = (tmp_path / "runs" / "killed" / "model.safetensors").read_bytes()
    assert file == (tmp_path / "runs" / "one" / "model.safetensors").read_bytes()
