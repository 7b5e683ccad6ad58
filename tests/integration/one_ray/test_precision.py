"""`precision` on a real cluster: the same bits on any number of workers, through deaths and overflows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Data, Ema, Evaluate, Job, Parallel, Workers, attach
from tests.integration.elastic import Run, ended, job
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


def exact(tmp_path: Path, name: str, **changes: Any) -> Job:
    data = Data(path=str(tmp_path / "data"), batch_size=36, shards=12, cache_mb=0)
    held_out = Evaluate(path=str(tmp_path / "data"), every_steps=15)
    settings = {"data": data, "steps": 30, "reduction": "exact", "evaluate": held_out, "task": "tasks:Steep"}
    return job(tmp_path, name=name, **{**settings, **changes})


@pytest.mark.slow
def test_a_death_while_a_step_that_overflowed_is_computed_again_changes_no_bit(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), precision="fp16")))
    run = Run(
        exact(tmp_path, "killed", workers=Workers(min=2, max=3), precision="fp16", args={"fault": "steep:kill:2"})
    )
    assert ended(run) == expected
    assert [file.read_text() for file in tmp_path.glob("reached-*")] == ["steep\n"]
    assert len(run.events("recovered")) >= 1
    other = ended(Run(exact(tmp_path, "fp32", workers=Workers(min=1))))
    assert other[0] != expected[0]
    assert expected[1] == pytest.approx(other[1], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16-params", "fp16"])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_same_bits_on_any_number_of_workers_and_stages(tmp_path: Path, precision: Any, stages: int) -> None:
    write_data(tmp_path / "data", rows=517)
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), precision=precision)))
    workers, parallel = Workers(min=stages, max=4), Parallel(pipeline=stages)
    run = Run(
        exact(
            tmp_path,
            "killed",
            workers=workers,
            parallel=parallel,
            precision=precision,
            args={"fault": "applied:kill:9"},
        )
    )
    assert ended(run) == expected
    assert len(run.events("recovered")) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16-params"])
def test_a_run_that_was_stopped_resumes_with_the_same_bits(tmp_path: Path, precision: Any) -> None:
    write_data(tmp_path / "data", rows=517)
    expected = ended(Run(exact(tmp_path, "whole", workers=Workers(min=2), precision=precision)))
    run = Run(exact(tmp_path, "stopped", workers=Workers(min=2), precision=precision, args={"pad_s": 0.03}))
    run.until_step(10)
    attach(run.folder).stop()
    assert run.finish().status == "stopped"
    again = Run(replace(run.job, workers=Workers(min=1)), fresh=False)
    assert ended(again)[0] == expected[0]


@pytest.mark.slow
def test_compiled_layers_are_not_compiled_again_after_a_loss_and_a_rescale(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"task": "tasks:Counts", "compile": True, "recompute": "full"}
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    one = {"fault": "", "folder": str(tmp_path / "one")}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), args=one, **settings)))
    args = {"fault": "applied:kill:9", "folder": str(tmp_path / "three"), "pad_s": 0.02}
    run = Run(exact(tmp_path, "killed", workers=Workers(min=2, max=3), args=args, **settings))
    assert ended(run) == expected
    [recovered] = run.events("recovered")
    assert recovered["stall_s"] < 3
    counts = [[int(line) for line in file.read_text().split()] for file in (tmp_path / "three").glob("graphs-*")]
    assert len(counts) >= 3
    # The warm-up makes everything before a worker joins; no loss, evaluation or change of the group adds to it.
    shards = 12
    assert [found for found in counts if len(set(found[2 * shards :])) > 1] == []


@pytest.mark.slow
def test_averages_survive_losses_stages_and_resumes(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    settings: dict[str, Any] = {"ema": Ema(decay=0.9), "args": {"pad_s": 0.02}}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), **settings)))
    killed = {**settings, "args": {"fault": "applied:kill:9"}}
    stages = exact(tmp_path, "stages", workers=Workers(min=2, max=3), parallel=Parallel(pipeline=2), **killed)
    run = Run(stages)
    assert ended(run) == expected
    files = [(tmp_path / "runs" / name / "model.safetensors").read_bytes() for name in ("one", "stages")]
    assert files[0] == files[1]
    stopped = Run(exact(tmp_path, "stopped", workers=Workers(min=2), **settings))
    stopped.until_step(10)
    attach(stopped.folder).stop()
    assert stopped.finish().status == "stopped"
    assert ended(Run(stopped.job, fresh=False))[0] == expected[0]
    plain = ended(Run(exact(tmp_path, "plain", workers=Workers(min=1))))
    assert plain[1] == expected[1], "the training does not depend on them"
    assert plain[2] != expected[2], "evaluations use them"
