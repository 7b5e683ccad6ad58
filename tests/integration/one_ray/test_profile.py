"""Profiled steps of real workers: traces, a table that adds up, and a run that is the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Job, Parallel, Profile, Workers, run
from raytrain_plus.observe.step_profile import CONVENTION, PHASES
from raytrain_plus.observe.views.summary import summary
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

FIRST, END = 10, 20


def exact(tmp_path: Path, **changes: Any) -> Job:
    settings: dict[str, Any] = {"steps": 30, "workers": Workers(min=2), "reduction": "exact"}
    write_data(tmp_path / "data")
    return job(tmp_path, **{**settings, **changes})


def phases(folder: Path | str, trace: str) -> set[str]:
    """Return the names of our ranges in a trace."""
    events = json.loads((Path(folder) / trace).read_text())["traceEvents"]
    return {event["name"] for event in events if str(event.get("name", "")).startswith("raytrain_plus.")}


def test_two_workers_are_profiled_and_the_model_is_the_same(tmp_path: Path) -> None:
    plain = run(exact(tmp_path, name="plain"), quiet=True, roots=[TASKS])
    one = Run(exact(tmp_path, name="profiled", profile=Profile(steps=[FIRST, END], workers=2)))
    done = one.finish()
    assert (done.status, done.state_sha256) == ("finished", plain.state_sha256)
    assert plain.profile is None
    found = json.loads((Path(done.path) / "profile" / "summary.json").read_text())
    assert found == done.profile
    assert found["operations"] == CONVENTION
    assert [row["seat"] for row in found["workers"]] == [0, 1]
    for row in found["workers"]:
        assert row["steps"] == [*range(FIRST, END)]
        named = {phase: row[f"{phase}_ms"] for phase in PHASES}
        assert sum(named.values()) == pytest.approx(row["step_ms"], rel=0.001)
        assert min(named[phase] for phase in ("forward", "backward", "exposed", "optimizer")) > 0
        assert 0 < row["hidden_ms"] < row["step_ms"]
        # Of four shards, each of six rows: two products of 6 x 16 and 16 x 3, of which only the second needs the
        # gradient of its input.
        assert row["operations"] == 4 * 6 * 2 * (2 * 6 * 16 + 3 * 16 * 3)
        assert row["no_mfu"] == "the peak of a CPU in fp32 is not known"
        ranges = phases(done.path, row["trace"])
        assert {f"raytrain_plus.{phase}" for phase in ("forward", "backward", "exposed", "optimizer", "data")} <= ranges
        assert f"raytrain_plus.step {END - 1}" in ranges
        assert f"raytrain_plus.step {END}" not in ranges
    assert any("no MFU: the peak of a CPU in fp32 is not known" in line for line in summary(done, None))


@pytest.mark.slow
def test_a_worker_that_is_killed_while_steps_are_profiled_changes_nothing(tmp_path: Path) -> None:
    calm = run(exact(tmp_path, name="calm", steps=60), quiet=True, roots=[TASKS])
    profile = Profile(steps=[FIRST, 50], workers=2)
    one = Run(exact(tmp_path, name="killed", steps=60, profile=profile, args={"pad_s": 0.01}))
    one.until_step(25)
    one.kill(one.members()[1])
    done = one.finish()
    assert (done.status, done.recoveries, done.state_sha256) == ("finished", 1, calm.state_sha256)
    assert done.profile is not None
    kept = next(row for row in done.profile["workers"] if row["worker"] == "worker-0")
    assert kept["steps"] == [*range(FIRST, 50)]
    # The trace up to the loss, and one from then on.
    traces = sorted((Path(done.path) / "profile").glob("worker-0-from-*.json"))
    assert len(traces) == 2
    assert all(phases(done.path, f"profile/{trace.name}") for trace in traces)


@pytest.mark.slow
def test_stages_have_traces_of_their_own(tmp_path: Path) -> None:
    settings = {"parallel": Parallel(pipeline=2, microbatches=2), "profile": Profile(steps=[5, 10], workers=2)}
    done = run(exact(tmp_path, steps=12, **settings), quiet=True, roots=[TASKS])
    assert done.profile is not None
    first, last = done.profile["workers"]
    # All eight shards of six rows; of each layer, the stage that holds it.
    assert first["operations"] + last["operations"] == 8 * 6 * 2 * (2 * 6 * 16 + 3 * 16 * 3)
    for row in (first, last):
        assert row["stages_ms"] > 0
        assert row["step_ms"] == pytest.approx(sum(row[f"{phase}_ms"] for phase in PHASES), rel=0.01)
        assert {"raytrain_plus.forward", "raytrain_plus.backward", "raytrain_plus.stages"} <= phases(
            done.path, row["trace"]
        )
