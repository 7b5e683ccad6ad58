"""Views that follow a run: a live line in a terminal, a cell in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from raytrain_plus.observe.events import Event
from raytrain_plus.observe.standing import Standing, told
from raytrain_plus.observe.summary import summary
from raytrain_plus.result import Result

PLAIN_S = 5.0
"""Seconds between two plain lines."""
LIVE_S = 0.2
"""Seconds between two redraws."""


class View(Protocol):
    """Somebody who watches a run."""

    def start(self, name: str, steps: int) -> None:
        """A run of so many steps begins."""

    def event(self, event: Event) -> None:
        """Something happened; events come in order."""

    def finish(self, result: Result) -> None:
        """The run has ended, or had ended before."""

    def close(self) -> None:
        """Nothing more comes, whatever happened."""


class PlainView:
    """One line every few seconds, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._standing = Standing(total=0)
        self._next = 0.0

    def start(self, name: str, steps: int) -> None:
        self._standing = Standing(total=steps)
        self._say(f"{name}: {steps} steps")

    def event(self, event: Event) -> None:
        self._standing.add(event)
        line = told(event)
        if line:
            self._say(line)
        elif event["kind"] == "step_committed" and time.monotonic() >= self._next:
            self._next = time.monotonic() + PLAIN_S
            self._say(self._standing.line())

    def finish(self, result: Result) -> None:
        for line in summary(result, self._standing):
            self._say(line)
        if result.error:
            print(result.error, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._stream.flush()

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class TerminalView:
    """A bar and a line that are redrawn in place; what deserves a line of its own scrolls above them."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._standing = Standing(total=0)
        self._live: Live | None = None
        self._drawn = 0.0

    def start(self, name: str, steps: int) -> None:
        self._standing = Standing(total=steps)
        self._console.print(f"[bold]{name}[/bold]: {steps} steps; starting workers")
        self._live = Live(self._picture(), console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def event(self, event: Event) -> None:
        self._standing.add(event)
        line = told(event)
        if line:
            self._console.print(line, markup=False)
        if self._live is not None and (line or time.monotonic() - self._drawn > LIVE_S):
            self._drawn = time.monotonic()
            self._live.update(self._picture(), refresh=True)

    def finish(self, result: Result) -> None:
        self.close()
        for line in summary(result, self._standing):
            self._console.print(line, markup=False, soft_wrap=True)
        if result.error:
            print(result.error, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _picture(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(total=max(1, self._standing.total), completed=self._standing.step, width=20),
            self._standing.line(),
        )
        return grid


class NotebookView:
    """One output of a cell, updated in place."""

    def __init__(self) -> None:
        from IPython.display import display

        self._standing = Standing(total=0)
        self._lines: list[str] = []
        self._drawn = 0.0
        self._handle: Any = display({"text/plain": "starting"}, raw=True, display_id=True)

    def start(self, name: str, steps: int) -> None:
        self._standing = Standing(total=steps)
        self._lines = [f"{name}: {steps} steps"]
        self._draw([*self._lines, "starting workers"])

    def event(self, event: Event) -> None:
        self._standing.add(event)
        line = told(event)
        if line:
            self._lines.append(line)
        if line or time.monotonic() - self._drawn > LIVE_S:
            self._draw([*self._lines, self._standing.line()])

    def finish(self, result: Result) -> None:
        self._lines += [*summary(result, self._standing), *(result.error or "").splitlines()]
        self._draw(self._lines)

    def close(self) -> None:
        """The last picture stays."""

    def _draw(self, lines: list[str]) -> None:
        self._drawn = time.monotonic()
        self._handle.update({"text/plain": "\n".join(lines)}, raw=True)


def view_for(stream: TextIO) -> View:
    """The view that fits where this runs: a notebook's cell, a terminal, or anything else."""
    if "IPython" in sys.modules:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell":
            return NotebookView()
    return TerminalView(stream) if stream.isatty() else PlainView(stream)
