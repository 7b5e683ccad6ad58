"""Define what a run's journal asks of those that listen to the run, and run them in the controller's process.

`listeners_actor` runs them in another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from raytrain_plus.observe.trackers.listened import Listened
from raytrain_plus.observe.trackers.listening import Listening

END_S = 10.0
"""Maximum seconds for the listeners to hear of the rest when the run ends, including their start in a short run."""
ALIVE_S = 1.0
"""Seconds between two calls of `meanwhile` then."""

Evaluations = Mapping[int, Mapping[str, float]]
"""Metrics of the evaluations that count, by step."""


def late(left: Sequence[str], waited_s: float) -> str:
    """Return the report of the listeners that have not heard of the whole run after this wait at its end."""
    return f"not done within {waited_s:.0f} s of the run's end, and may lack some of it: {', '.join(left)}"


class Listeners(Protocol):
    """The listeners of a run, as its journal sees them."""

    def begin(self, behind: int, evaluated: Callable[[], Evaluations]) -> None:
        """Start them. `behind`: where the log of this controller begins, see `trackers.bookmark`."""

    def news(self) -> Sequence[str]:
        """Return what is to be reported since the last call, as sentences."""

    def finish(self, status: str, meanwhile: Callable[[], None]) -> None:
        """Wait until they have heard of the whole log, but not too long, and end them: the run has this status.

        `meanwhile` is called about every second.
        """

    def abandon(self) -> None:
        """End them at once: the run belongs to another controller."""


class LocalListeners:
    """The `Listeners` of a run, in this process. Called by the controller's loop; `abandon` also by other threads."""

    def __init__(self, listened: Listened) -> None:
        """Prepare the listeners."""
        self._listened = listened
        self._listening: Listening | None = None
        """None before the run has begun, and when it has ended."""
        self._texts: list[str] = []

    def begin(self, behind: int, evaluated: Callable[[], Evaluations]) -> None:
        """See `Listeners`."""
        self._listening = Listening(self._listened, behind, evaluated(), stop=_unasked)

    def news(self) -> Sequence[str]:
        """See `Listeners`."""
        if (listening := self._listening) is not None:
            self._hear(listening, 0.0)
        texts, self._texts = self._texts, []
        return texts

    def finish(self, status: str, meanwhile: Callable[[], None]) -> None:
        """See `Listeners`."""
        if (listening := self._listening) is None:
            return
        listening.end(status)
        deadline = time.monotonic() + END_S
        while (left := self._hear(listening, ALIVE_S)) and time.monotonic() < deadline:
            meanwhile()
        if left:
            self._texts.append(late(left, END_S))
        self.abandon()

    def abandon(self) -> None:
        """See `Listeners`."""
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.stop(0.0)

    def _hear(self, listening: Listening, timeout_s: float) -> Sequence[str]:
        """Take the news; wait up to `timeout_s` for some. Return who has not heard of the whole run yet."""
        reports, left = listening.news(timeout_s)
        self._texts += [text for _, text in reports]
        return left


def _unasked() -> None:
    """Stand for the run's `stop`: only callbacks ask for that, and they have a process of their own."""
    raise AssertionError("TensorBoard stops no run")
