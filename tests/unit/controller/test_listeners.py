"""Listeners in the controller's process: only TensorBoard's, waited for at the end for a while, silent if overtaken."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from raytrain_plus.controller.record import listeners as module
from raytrain_plus.controller.record.listeners import LocalListeners
from raytrain_plus.controller.record.listeners_actor import RayListeners, listeners_on
from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.trackers.listened import CalledTask
from raytrain_plus.observe.trackers.tensorboard import TensorBoard
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.events import committed, shown, tell
from tests.support.listeners import listened, until


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Have TensorBoard's listener hang: the first event is set once it does, the second one lets it continue."""
    hangs, go = threading.Event(), threading.Event()

    def hang(self: TensorBoard, events: Sequence[RunEvent]) -> None:
        hangs.set()
        go.wait(60)

    monkeypatch.setattr(TensorBoard, "hear", hang)
    yield hangs, go
    go.set()


def begun(run: Path) -> LocalListeners:
    made = LocalListeners(listened(run))
    made.begin(0, dict)
    return made


def test_only_trackers_and_callbacks_need_a_process(tmp_path: Path) -> None:
    called = CalledTask(
        task="x:X", pickled_task=None, roots=(), args={}, total_steps=3, batch_size=8, rows=0, checkpoints=str(tmp_path)
    )
    assert isinstance(listeners_on(listened(tmp_path), "ab", None), LocalListeners)
    assert isinstance(listeners_on(listened(tmp_path, trackers=("mlflow",)), "ab", None), RayListeners)
    assert isinstance(listeners_on(listened(tmp_path, task=called), "ab", None), RayListeners)


def test_the_end_of_a_run_is_in_the_files_of_tensorboard(tmp_path: Path) -> None:
    one = begun(tmp_path)
    tell(LocalFolder(tmp_path), committed(0, 0, 1, 2))
    one.finish("finished", lambda: None)
    assert [step for step, _ in shown(tmp_path / "tensorboard", "train/loss")] == [0, 1, 2]
    assert one.news() == []


def test_a_listener_that_fails_is_reported_in_the_run_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: TensorBoard, events: Sequence[RunEvent]) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(TensorBoard, "hear", fail)
    tell(LocalFolder(tmp_path), committed(0, 0))
    one = begun(tmp_path)
    said: list[str] = []
    until(lambda: said.extend(one.news()) or said)
    assert said == ["TensorBoard does not accept events; retrying: OSError: disk full"]
    one.finish("finished", lambda: None)
    assert one.news() == ["TensorBoard lacks the end of the run, which the run's events contain"]


def test_the_end_waits_a_while_for_a_listener_that_hangs_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: tuple[threading.Event, threading.Event]
) -> None:
    monkeypatch.setattr(module, "END_S", 0.2)
    monkeypatch.setattr(module, "ALIVE_S", 0.05)
    tell(LocalFolder(tmp_path), committed(0, 0))
    one = begun(tmp_path)
    assert hanging[0].wait(20)
    told: list[float] = []
    one.finish("finished", lambda: told.append(time.monotonic()))
    assert len(told) > 1
    assert one.news() == ["not done within 0 s of the run's end, and may lack some of it: TensorBoard"]


def test_an_overtaken_controller_waits_for_none_and_has_them_hear_no_more(
    tmp_path: Path, hanging: tuple[threading.Event, threading.Event]
) -> None:
    tell(LocalFolder(tmp_path), committed(0, 0))
    one = begun(tmp_path)
    assert hanging[0].wait(20)
    one.abandon()
    told: list[str] = []
    one.finish("failed", lambda: told.append("waits"))
    assert (one.news(), told) == ([], [])
    hanging[1].set()
    until(lambda: "TensorBoard" not in [thread.name for thread in threading.enumerate()])
