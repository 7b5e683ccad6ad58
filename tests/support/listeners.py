"""Listeners of runs: in this process, on threads, or only written down."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytrain_plus.observe.trackers.listened import Listened
from raytrain_plus.observe.trackers.listening import Listening


def listened(run: Path, **changes: Any) -> Listened:
    """Return the listeners of the run in this folder: TensorBoard alone, without changes."""
    settings = {"claim": None, "job_yaml": "name: digits\n", "trackers": (), "task": None, "roots": (".",)}
    return Listened(folder=str(run), **{**settings, **changes})


def until(what: Callable[[], Any]) -> None:
    """Wait until something is the case, but not for ever."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def finished(listening: Listening, status: str = "finished") -> list[str]:
    """End these listeners, and return all that they had to say."""
    listening.end(status)
    said: list[str] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        reports, left = listening.news(1.0)
        said += [text for _, text in reports]
        if not left:
            return said
    raise AssertionError(f"they do not end: {left}")


class FakeListeners:
    """`Listeners` that write down what they are told, and say what a test puts into `texts`."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.texts: list[str] = []

    def begin(self, behind: int, evaluated: Callable[[], Mapping[int, Mapping[str, float]]]) -> None:
        self.told.append(("begin", behind, evaluated()))

    def news(self) -> Sequence[str]:
        texts, self.texts = self.texts, []
        return texts

    def finish(self, status: str, meanwhile: Callable[[], None]) -> None:
        self.told.append(("finish", status))
        meanwhile()

    def abandon(self) -> None:
        self.told.append(("abandon",))
