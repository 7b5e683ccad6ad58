"""What a driver does with the workers of a run whose controller is gone, or that a second signal ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from raytrain_plus.errors import RunError
from raytrain_plus.launch import driver as module
from raytrain_plus.launch.driver import Signals, drive
from tests.unit.controller.fakes import job_of, order_of


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is done to the controller and the workers of a run that begins."""
    made: list[str] = []
    begun = SimpleNamespace(
        actor=None, closing=None, clear=lambda: made.append("clear"), leave=lambda: made.append("leave")
    )
    monkeypatch.setattr(module, "begin", lambda order, began, detached: begun)
    monkeypatch.setattr(module.ray, "kill", lambda actor: made.append("kill"))
    return made


@pytest.mark.parametrize(
    ("detached", "error", "expected"),
    [
        (False, RayActorError(), ["leave", "kill"]),
        (False, module._Gone("its process has ended"), ["kill", "leave", "kill"]),
        (True, RayActorError(), ["leave"]),
        (True, module._Gone("its process has ended"), []),
    ],
)
def test_workers_write_what_they_have_when_their_controller_is_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    done: list[str],
    detached: bool,
    error: Exception,
    expected: list[str],
) -> None:
    def gone(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "_follow", gone)
    with pytest.raises(RunError, match="the controller died: "):
        drive(order_of(job_of(), tmp_path / "run"), 0.0, None, Signals(), detached=detached)
    assert done == expected
    assert ("the workers write the state that they have" in capsys.readouterr().err) == ("leave" in expected)


def test_a_second_signal_leaves_the_workers_no_time_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: list[str]
) -> None:
    signals = Signals()

    def follow(*_: Any) -> None:
        signals._count = 2
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_follow", follow)
    with pytest.raises(KeyboardInterrupt):
        drive(order_of(job_of(), tmp_path / "run"), 0.0, None, signals)
    assert done == ["clear", "kill"]
