"""Render a run for a notebook: its chart and the loads of its experts, with lines below, or the lines alone. Pure."""

from __future__ import annotations

from collections import deque
from html import escape

from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.run_progress import RunProgress, plural
from raytrain_plus.observe.views.chart import Chart
from raytrain_plus.observe.views.load_map import LoadMap
from raytrain_plus.observe.views.summary import summary
from raytrain_plus.result import Result

LINES = 40
"""The number of newest lines that are shown: the notebook's cell is redrawn for each step."""


class Page:
    """The rendering of one run."""

    def __init__(self, name: str, steps: int) -> None:
        self._head = f"{name}: {plural(steps, 'step')}"
        self._progress = RunProgress(total=steps)
        self._chart = Chart(name, steps)
        self._loads = LoadMap(steps)
        self._lines: deque[str] = deque(maxlen=LINES)
        self._count = 0
        self._end: list[str] | None = None

    def add(self, event: RunEvent) -> bool:
        """Add one event; return whether it added a line."""
        self._chart.add(event)
        self._loads.add(event)
        line = self._progress.add(event)
        if line:
            self._lines.append(line)
            self._count += 1
        return bool(line)

    def finish(self, result: Result) -> None:
        """Show the error of a failed run, and the summary: the run has ended."""
        self._end = [*(result.error or "").splitlines(), *summary(result, self._progress)]

    def text(self) -> str:
        """Return the run as lines of text."""
        more = self._count - len(self._lines)
        earlier = [f"({plural(more, 'line')} before these)"] if more else []
        last = [self._progress.line()] if self._end is None else self._end
        return "\n".join([self._head, *earlier, *self._lines, *last])

    def html(self) -> str:
        """Return the run as HTML: pictures and the lines, which remain visible in frontends that block images."""
        return f"<div>{self._chart.svg()}{self._loads.svg()}<pre>{escape(self.text())}</pre></div>"
