"""A new learning rate at a resume: the run says that it keeps its own, or takes the new one, also on new workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_plus import Checkpoint, Data, Job, Workers, run
from raytrain_plus.audit.audit import audit
from raytrain_plus.launch.runner import resume
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


@pytest.mark.slow
def test_a_new_rate_is_said_or_taken(tmp_path: Path) -> None:
    data = Data(path=str(write_data(tmp_path / "data")), batch_size=48, shards=8)
    first = Job(
        name="run",
        task="tasks:Rated",
        seed=5,
        data=data,
        steps=4,
        workers=Workers(min=2),
        storage=str(tmp_path / "runs"),
        checkpoint=Checkpoint(every_steps=2),
        args={"lr": 0.1},
    )
    assert run(first, quiet=True, roots=[TASKS]).status == "finished"
    folder = tmp_path / "runs" / "run"
    resume(folder, ["args.lr=0.003", "steps=8"], quiet=True, roots=[TASKS])
    notes = [event["text"] for event in read_events(LocalFolder(folder)) if event["kind"] == "noted"]
    assert [one for one in notes if "the optimizer keeps from the checkpoint lr 0.1, not 0.003" in one]
    result = resume(folder, ["steps=12"], quiet=True, roots=[TASKS], fresh_rates=True)
    assert (result.status, result.steps) == ("finished", 12), result.error
    events = list(read_events(LocalFolder(folder)))
    assert [event.get("fresh_rates") for event in events if event["kind"] == "resumed"] == [None, True]
    rates = [event["lr"] for event in events if event["kind"] == "step_committed"]
    assert rates == pytest.approx([0.1 * 0.9**step for step in range(8)] + [0.003 * 0.9**step for step in range(8, 12)])
    assert audit(folder).clean
