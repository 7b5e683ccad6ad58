"""A tracker's process: a library that fails or hangs loses metrics and is reported once."""

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from raytrain_plus.observe.trackers import tracking as module
from raytrain_plus.observe.trackers.event_metrics import MetricValue
from raytrain_plus.observe.trackers.tracking import Queue, deliver, in_short, read


def losses(*steps: int) -> list[MetricValue]:
    return [MetricValue("train/loss", 1.0, step, 0.0) for step in steps]


class Failing:
    """A tracker that fails a given number of times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.got: list[int] = []
        self.ended: list[str] = []

    def add(self, metrics: Sequence[MetricValue]) -> None:
        if self.times:
            self.times -= 1
            raise ConnectionError("https://me:secret@host is away\nbecause")
        self.got += [metric.step for metric in metrics]

    def end(self, status: str) -> None:
        self.ended.append(status)


def delivered(tracker: Failing, act: Callable[[Queue], None]) -> tuple[Queue, list[Mapping[str, str]]]:
    """Return the queue and the messages sent while `act` filled it, up to its end."""
    queue = Queue()
    told: list[Mapping[str, str]] = []
    thread = threading.Thread(target=deliver, args=(queue, lambda: ("its run", tracker), told.append))
    thread.start()
    act(queue)
    thread.join(20)
    assert not thread.is_alive()
    return queue, told


def test_failed_metrics_are_retried_and_arrive_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.001)
    monkeypatch.setattr(module, "AGAIN_S", 0.001)
    monkeypatch.setattr(module, "MOST", 2)
    tracker = Failing(3)

    def act(queue: Queue) -> None:
        queue.put(losses(0, 1, 2))
        deadline = time.monotonic() + 10
        while tracker.got != [0, 1, 2] and time.monotonic() < deadline:
            time.sleep(0.001)
        queue.put(losses(3))
        queue.end("stopped")

    queue, told = delivered(tracker, act)
    assert (tracker.got, tracker.ended, queue.missing) == ([0, 1, 2, 3], ["stopped"], 0)
    assert told == [
        {"run": "its run"},
        {"warning": "it does not accept metrics; retrying: ConnectionError: https://***@host is away"},
    ]


def test_after_the_end_there_is_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(queue: Queue) -> None:
        queue.put(losses(0, 1))
        queue.end("finished")

    tracker = Failing(9)
    queue, _ = delivered(tracker, act)
    assert (queue.missing, tracker.times, tracker.ended) == (2, 8, [])


def test_the_oldest_of_too_many_metrics_are_dropped() -> None:
    queue = Queue(kept=5)
    queue.put(losses(*range(4)))
    queue.put(losses(*range(4, 8)))
    assert ([metric.step for metric in queue.first()], queue.missing) == ([3, 4, 5, 6, 7], 3 + 5)
    queue.done()
    assert (queue.first(), queue.missing) == ([], 3)


def test_an_input_that_ends_without_an_end_is_a_failed_run() -> None:
    queue = Queue()
    read(io.BytesIO(b'[["train/loss", NaN, 3, 0.5]]\n{"end": "fini'), queue)
    assert (queue.status, queue.first()[0].step) == ("failed", 3)
    queue = Queue()
    read(io.BytesIO(b'{"end": "finished", "dropped": 4}\n'), queue)
    assert (queue.status, queue.missing) == ("finished", 4)


def test_messages_contain_no_secrets() -> None:
    error = ValueError("401 for hunter2 at https://me:pw@host/x?a=b@c\nmore")
    assert (
        in_short(error, {"WANDB_API_KEY": "hunter2", "WANDB_MODE": "401"})
        == "ValueError: 401 for *** at https://***@host/x?a=b@c"
    )


def test_a_hanging_library_is_abandoned_in_time(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("import time\n\nSettings = dict\n\ndef init(**settings):\n    time.sleep(100)\n")
    search = os.pathsep.join([str(tmp_path), *sys.path])
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from raytrain_plus.observe.trackers.tracking import main; main(end_s=0.5)", "wandb"],
        input='{"run": null, "title": "x", "settings": {}}\n[["train/loss", 1.0, 0, 0.0]]\n',
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"warning": "1 metric values were not delivered; the run's events contain them"}
    assert time.monotonic() - began >= 0.5
