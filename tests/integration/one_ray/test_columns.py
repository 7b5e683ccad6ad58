"""Text with fractions, and folders that are columns, train on real workers and resume as the same data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from raytrain_plus import Data, Evaluate, Job, Workers
from raytrain_plus.launch.runner import resume
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, ended

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


def write(file: Path, rows: int) -> Path:
    draw = np.random.default_rng(rows)
    file.parent.mkdir(parents=True)
    with file.open("w") as lines:
        for _ in range(rows):
            y = int(draw.integers(0, 3))
            x = (draw.normal(size=6) + y).round(3).tolist()
            lines.write(json.dumps({"x": x, "y": y, "note": "not a number"}) + "\n")
    return file


def test_fractions_of_text_train_a_float32_model(tmp_path: Path) -> None:
    train, held_out = write(tmp_path / "train" / "0.jsonl", 300), write(tmp_path / "held_out" / "0.jsonl", 40)
    data = Data(path=str(train), batch_size=48, shards=8, columns=["x", "y"], collate="pad")
    job = Job(
        name="run",
        task="tasks:Net",
        seed=5,
        data=data,
        evaluate=Evaluate(path=str(held_out), every_steps=3),
        steps=6,
        workers=Workers(min=2),
        storage=str(tmp_path / "runs"),
    )
    _, losses, metrics = ended(Run(job))
    assert len(losses) == 6
    assert metrics["loss"] > 0
    longer = resume(tmp_path / "runs" / "run", ["steps=8"], quiet=True, roots=[TASKS])
    assert (longer.status, longer.steps) == ("finished", 8), longer.error
