"""Following a run by its folder: all events in order, until its end or until its controller is gone."""

from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest

from raytrain_plus import Data, Job
from raytrain_plus.errors import RunError
from raytrain_plus.observe.run_events import EventLog, RunEvent
from raytrain_plus.observe.views.progress import PlainView
from raytrain_plus.result import Result
from raytrain_plus.runs import follow
from raytrain_plus.runs.folder import LEASE_S, Lease
from raytrain_plus.runs.follow import print_events, watch
from raytrain_plus.storage.folders.local import LocalFolder

MEMBERS = [{"worker": "worker-0", "pid": 7, "node": "n", "replica": 0, "stage": 0, "params": 3, "shards": [0, 1]}]


@pytest.fixture
def going_on(tmp_path: Path) -> LocalFolder:
    """A run that has made two of four steps, and whose controller lives."""
    run = LocalFolder(tmp_path / "run")
    job = Job(name="run", task="a:B", data=Data(path="d", batch_size=8, shards=2), epochs=2)
    run.write("job.yaml", [job.to_yaml().encode()])
    run.write("dataset.json", [b'{"rows": 16}'])
    Lease(run, "here:1").renew()
    log = EventLog(run, clock=lambda: 0.0)
    fields = {"members": MEMBERS, "spares": [], "collective": "solo", "moved_bytes": 0}
    log.write("view_formed", generation=0, fields=fields)
    for step in range(2):
        write_step(log, step)
    log.close()
    return run


def write_step(log: EventLog, step: int) -> None:
    fields = {"step": step, "epoch": 0, "samples": 8, "loss": 0.5, "grad_norm": 0.3, "seconds": 0.1}
    log.write("step_committed", generation=0, time=10.0 * step, fields=fields)


def end(run: LocalFolder) -> Result:
    log = EventLog(run, clock=lambda: 0.0)
    for step in range(2, 4):
        write_step(log, step)
    fields = {"status": "finished", "error": None, "steps": 4, "samples": 32, "state_sha256": None}
    log.write("run_finished", generation=0, time=31.0, fields=fields)
    log.close()
    result = Result(name="run", status="finished", exit_code=0, path=run.path, steps=4, samples=32)
    result.save(run)
    return result


class Seen(PlainView):
    def __init__(self) -> None:
        self.text = io.StringIO()
        super().__init__(self.text)
        self.events: list[RunEvent] = []

    def event(self, event: RunEvent) -> None:
        self.events.append(event)
        super().event(event)


def test_past_and_new_events_are_shown_once_and_in_order(
    going_on: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, looks = Seen(), 0
    ended: list[Result] = []

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            ended.append(end(going_on))

    monkeypatch.setattr(follow.time, "sleep", sleep)
    assert watch(going_on, view) == ended[0]
    assert [event["step"] for event in view.events if event["kind"] == "step_committed"] == [0, 1, 2, 3]
    said = view.text.getvalue()
    assert said.startswith("run: 4 steps; ")
    assert "run finished: 4 steps" in said


def test_a_timeout_reports_that_the_run_is_still_running(going_on: LocalFolder) -> None:
    with pytest.raises(TimeoutError, match=r"run is still running after 0\.1 s"):
        watch(going_on, None, timeout_s=0.1)


def test_a_run_without_a_controller_is_not_waited_for(going_on: LocalFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LEASE_S", 0.3)
    going_on.remove("lease.json")
    with pytest.raises(RunError, match=r"run: the controller has not renewed .*; resume with: raytrain"):
        watch(going_on, None)


def test_a_living_controller_that_cannot_write_does_not_count_as_dead(
    going_on: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example on a full disk. A user who is told to resume would take the run over."""
    monkeypatch.setattr(follow, "LEASE_S", 0.1)
    with pytest.raises(TimeoutError, match="run is still running"):
        watch(going_on, None, timeout_s=0.5)


def test_the_death_of_a_controller_on_this_machine_is_reported_once_nobody_replaces_it(going_on: LocalFolder) -> None:
    lease = json.loads(going_on.read("lease.json"))
    going_on.write("lease.json", [json.dumps({**lease, "born": "1", "time": time.time() - LEASE_S + 0.5}).encode()])
    with pytest.raises(TimeoutError):
        watch(going_on, None, timeout_s=0.1)
    with pytest.raises(RunError, match=r"the controller died; its workers may wait [45]\d s more for another one, and"):
        watch(going_on, None)
    going_on.write("lease.json", [json.dumps({**lease, "born": "1", "time": time.time() - 61}).encode()])
    with pytest.raises(RunError, match="the controller died; no checkpoint is complete"):
        watch(going_on, None)


def test_past_events_are_printed_with_their_time(going_on: LocalFolder) -> None:
    text = io.StringIO()
    print_events(going_on, text, follow=False)
    lines = text.getvalue().splitlines()
    assert [line[21:].split("  ")[0] for line in lines] == [
        "1 worker ready, 2 shards each; 3 parameters; collective: solo",
        "step 1/4",
        "step 2/4",
    ]
    assert lines[1][:19] == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))


def test_new_events_are_printed_until_the_end(going_on: LocalFolder) -> None:
    text = io.StringIO()

    def later() -> None:
        time.sleep(0.3)
        end(going_on)
        going_on.remove("lease.json")

    thread = threading.Thread(target=later)
    thread.start()
    print_events(going_on, text, follow=True)
    thread.join()
    assert [line[21:].split("  ")[0] for line in text.getvalue().splitlines()[-2:]] == ["step 4/4", "finished: 4 steps"]


def test_the_end_is_printed_with_the_last_step_and_the_error(going_on: LocalFolder) -> None:
    log = EventLog(going_on, clock=lambda: 0.0)
    write_step(log, 2)
    fields = {"step": 3, "epoch": 0, "samples": 8, "loss": 0.5, "grad_norm": 0.3, "seconds": 0.1}
    log.write("step_committed", generation=0, time=20.5, fields=fields)
    text = io.StringIO()
    print_events(going_on, text, follow=False)
    assert text.getvalue().splitlines()[-1][21:].startswith("step 4/4"), "even directly after the line before"
    fields = {"status": "failed", "error": "it broke\nhere", "steps": 4, "samples": 32, "state_sha256": None}
    log.write("run_finished", generation=0, time=20.6, fields=fields)
    log.close()
    text = io.StringIO()
    print_events(going_on, text, follow=False)
    told = [line[21:].split("  ")[0] for line in text.getvalue().splitlines()[-5:-2]]
    assert told == ["step 3/4", "step 4/4", "failed: 4 steps"]
    assert text.getvalue().endswith("it broke\nhere\n")
