"""What a real run says of its experts, with slices, replicas and stages: events, a remark, status and TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_plus import Parallel, Workers
from raytrain_plus.runs.status import status
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data
from tests.support.events import payloads

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

STEPS = 30


@pytest.mark.parametrize(
    ("parallel", "workers"),
    [(Parallel(experts=2), 4), pytest.param(Parallel(pipeline=2), 2)],
    ids=["two replicas of two slices", "two stages"],
)
def test_a_run_says_how_its_steps_use_experts(tmp_path: Path, parallel: Parallel, workers: int) -> None:
    write_data(tmp_path / "data", rows=517)
    size = Workers(min=workers, max=workers, cpus=0.25)
    run = Run(job(tmp_path, task="routed_tasks:Routed", steps=STEPS, parallel=parallel, workers=size))
    assert run.finish().status == "finished"
    stages = [["front"], ["back"]] if parallel.pipeline == 2 else [["front", "back"]]
    for layers in stages:
        told = [event for event in run.events("experts") if list(event["layers"]) == layers]
        steps = [event["step"] for event in told]
        assert steps[:10] == list(range(10))
        assert (steps, steps[-1]) == (sorted(set(steps)), STEPS - 1)
        for event in told:
            for name, use in event["layers"].items():
                assert sum(use["load"]) == 48 * (2 if name == "front" else 1)
                assert (use["dropped"] > 0.5) == (name == "back")
                assert use["max_vio"] == pytest.approx(max(use["load"]) * 4 / sum(use["load"]) - 1)
    assert {name for event in run.events("experts") for name in event["layers"]} == {"front", "back"}
    [text] = [event["text"] for event in run.events("noted") if "choices of experts" in event["text"]]
    assert text.startswith("'back' drops more than half")
    assert "more than half of the choices of experts: with capacity=0.1" in text
    [line] = [line for line in status(LocalFolder(run.folder)).lines() if "experts" in line]
    assert line.startswith("  experts: MaxVio ")
    assert line.endswith(" % dropped at most")
    files = (run.folder / "tensorboard").iterdir()
    tags = {value.tag for file in files for one in payloads(file.read_bytes()) for value in one.summary.value}
    wanted = [f"{layer}/{name}" for layer in ("front", "back") for name in ("max_vio", "dropped", "entropy", "load/3")]
    assert tags >= {f"experts/{name}" for name in wanted}
