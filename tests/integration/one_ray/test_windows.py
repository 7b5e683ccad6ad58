"""A language model trains on the windows of a stream: alike on one and on three workers, also resumed; audited."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raytrain_plus import Data, Evaluate, Job, Workers, run
from raytrain_plus.audit.audit import audit
from raytrain_plus.launch.runner import resume
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]


def told(folder: Path) -> tuple[list[float], dict[int, float]]:
    """Return the losses of the steps, and those of the evaluations by their step."""
    events = list(read_events(LocalFolder(folder)))
    losses = [event["loss"] for event in events if event["kind"] == "step_committed"]
    return losses, {event["step"]: event["metrics"]["loss"] for event in events if event["kind"] == "evaluated"}


def test_windows_train_alike_on_any_number_of_workers(tmp_path: Path) -> None:
    # Each token follows from the one before.
    tokens = np.cumsum(np.random.default_rng(0).integers(1, 3, 3_000)) % 20
    tokens[:2_500].astype(np.uint16).tofile(tmp_path / "train.bin")
    np.save(tmp_path / "val.npy", tokens[2_500:].astype(np.uint16))
    mean = Job(
        name="one",
        task="tasks:NextToken",
        seed=5,
        data=Data(path=str(tmp_path / "train.bin"), format="uint16", windows=16, batch_size=48, shards=6),
        evaluate=Evaluate(path=str(tmp_path / "val.npy"), every_steps=20, batches=3),
        steps=60,
        reduction="exact",
        storage=str(tmp_path / "runs"),
    )
    one = run(mean, quiet=True, roots=[TASKS])
    assert one.status == "finished", one.error
    three = run(replace(mean, name="three", steps=30, workers=Workers(min=3)), quiet=True, roots=[TASKS])
    assert three.status == "finished", three.error
    longer = resume(three.path, ["steps=60", "workers.min=1"], quiet=True, roots=[TASKS])
    assert longer.status == "finished", longer.error
    alone, evaluated = told(Path(one.path))
    again, evaluated_again = told(Path(three.path))
    assert again == alone
    assert evaluated_again.items() >= evaluated.items()
    assert alone[-1] < 1.0 < alone[0]
    assert evaluated[59] < 1.0 < evaluated[-1]
    # 2,484 windows: one epoch, and a part of the second.
    for result in (one, three):
        found = audit(result.path)
        assert found.clean, found.faults
        assert [epoch.once for epoch in found.epochs] == [2_484, 60 * 48 - 2_484]
