"""Show a run's progress: a live line in a terminal, a cell's output in a notebook, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from html import escape
from typing import Protocol, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.run_progress import RunProgress, plural
from raytrain_plus.observe.views.live_lines import EMPTY, live_lines
from raytrain_plus.observe.views.page import Page
from raytrain_plus.observe.views.summary import summary
from raytrain_plus.result import Result

PLAIN_S = 5.0
"""Seconds between two plain lines."""
LIVE_S = 0.2
"""Seconds between two redraws."""
BAR = range(8, 41)
"""Possible widths of the bar in characters; it is left out if there is no room for the shortest."""

Clock = Callable[[], float]


class ProgressView(Protocol):
    """A display of a run's progress."""

    def start(self, name: str, steps: int) -> None:
        """Show that a run of `steps` steps begins."""

    def event(self, event: RunEvent) -> None:
        """Show an event; events come in order."""

    def finish(self, result: Result) -> None:
        """Show the result: the run has ended, or had already ended."""

    def close(self) -> None:
        """End the display, whether or not the run has ended."""


class PlainView:
    """One line every few seconds, for logs and pipes."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._progress = RunProgress(total=0)
        self._due = -float("inf")

    def start(self, name: str, steps: int) -> None:
        self._progress = RunProgress(total=steps)
        self._say(f"{name}: {plural(steps, 'step')}; starting workers")

    def event(self, event: RunEvent) -> None:
        line = self._progress.add(event)
        if line:
            self._say(line)
        elif event["kind"] == "step_committed" and self._clock() >= self._due:
            self._due = self._clock() + PLAIN_S
            self._say(self._progress.line())

    def finish(self, result: Result) -> None:
        _say_error(result)
        self._say("\n".join(summary(result, self._progress)))

    def close(self) -> None:
        """Do nothing: every line has been flushed already."""

    def _say(self, text: str) -> None:
        say(text, self._stream)


class SummaryView:
    """Nothing until the end; then the error of a failed run, and the summary."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress = RunProgress(total=0)

    def start(self, name: str, steps: int) -> None:
        self._progress = RunProgress(total=steps)

    def event(self, event: RunEvent) -> None:
        self._progress.add(event)

    def finish(self, result: Result) -> None:
        _say_error(result)
        say("\n".join(summary(result, self._progress)), self._stream)

    def close(self) -> None:
        """Do nothing: nothing is displayed before the end."""


class TerminalView:
    """A bar and a few lines that are redrawn in place; lines for incidents scroll above them."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._progress = RunProgress(total=0)
        self._live: Live | None = None
        self._drawn = 0.0

    def start(self, name: str, steps: int) -> None:
        self._progress = RunProgress(total=steps)
        self._say(f"{name}: {plural(steps, 'step')}")
        self._live = Live(self._picture(), console=self._console, auto_refresh=False, transient=True)
        self._live.start(refresh=True)

    def event(self, event: RunEvent) -> None:
        line = self._progress.add(event)
        if line:
            self._say(line)
        if self._live is not None and (line or self._clock() - self._drawn >= LIVE_S):
            self._drawn = self._clock()
            self._live.update(self._picture(), refresh=True)

    def finish(self, result: Result) -> None:
        self.close()
        _say_error(result)
        for line in summary(result, self._progress):
            self._say(line)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, line: str) -> None:
        # Let the terminal wrap instead of rich, so that paths and commands can be copied in one piece.
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _picture(self) -> Group:
        # Some columns stay free for the ^C that a terminal echoes: if it wrapped, the lines would move.
        width = max(1, self._console.width - 4)
        first, *rest = live_lines(self._progress, width)
        room = width - cell_len(first) - 1
        texts = [Text(line, no_wrap=True, overflow="crop") for line in [first, *rest]]
        for text in texts[1:]:
            text.highlight_words([f"[{EMPTY}]"], "red")
        if room < BAR.start:
            return Group(*texts)
        bar = ProgressBar(
            total=max(1, self._progress.total), completed=self._progress.step, width=min(room, BAR.stop - 1)
        )
        grid = Table.grid(padding=(0, 1))
        grid.add_row(bar, texts[0])
        return Group(grid, *texts[1:])


class NotebookView:
    """One output of a cell, updated in place: the chart with lines below it, or lines alone."""

    def __init__(self, draw: Callable[[str, str], None], clock: Clock = time.monotonic) -> None:
        """Begin an empty view; `draw(text, html)` replaces the output by text and its HTML equivalent."""
        self._draw = draw
        self._clock = clock
        self._page: Page | None = None
        self._drawn = 0.0

    def start(self, name: str, steps: int) -> None:
        self._page = Page(name, steps)
        self._show(self._page)

    def event(self, event: RunEvent) -> None:
        assert self._page is not None
        if self._page.add(event) or self._clock() - self._drawn >= LIVE_S:
            self._show(self._page)

    def finish(self, result: Result) -> None:
        if self._page is None:
            # The run had already ended, so no event was shown.
            text = "\n".join([*(result.error or "").splitlines(), *summary(result, None)])
            self._draw(text, f"<pre>{escape(text)}</pre>")
            return
        self._page.finish(result)
        self._show(self._page)

    def close(self) -> None:
        """Draw all events a last time."""
        if self._page is not None:
            self._show(self._page)

    def _show(self, page: Page) -> None:
        self._drawn = self._clock()
        self._draw(page.text(), page.html())


def _say_error(result: Result) -> None:
    """Print the error of a failed run, before the summary: its last line says to fix the error above."""
    if result.error:
        say(result.error, sys.stderr)


def say(text: str, stream: TextIO) -> None:
    """Print a line. If the stream fails, the line is lost: the run matters more than its report."""
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # The reader (for example `head`) has exited: discard this and all later output.
        _forget(stream)
    except OSError:
        # For example a full disk: later lines may succeed.
        kept = os.dup(stream.fileno())
        try:
            _forget(stream)
            stream.flush()
            os.dup2(kept, stream.fileno())
        finally:
            os.close(kept)


def _forget(stream: TextIO) -> None:
    """Redirect the buffered and later output of `stream` to the null device."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def view_for(stream: TextIO, *, quiet: bool = False) -> ProgressView:
    """Return the view for the current environment: a notebook's cell, a terminal, or any other output.

    If `quiet`, it shows only the error of a failed run and the summary.
    """
    if quiet:
        return SummaryView(stream)
    draw = _cell()
    if draw is not None:
        return NotebookView(draw)
    console = Console(file=stream)
    # Ask the stream rather than rich: FORCE_COLOR makes rich treat a pipe as a terminal.
    if stream.isatty() and not console.is_dumb_terminal:
        return TerminalView(console)
    return PlainView(stream)


def _cell() -> Callable[[str, str], None] | None:
    """Create an output in the notebook's cell and return the function that replaces it; None outside a notebook."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    # A kernel's shell has its kernel; IPython in a terminal has none.
    if getattr(get_ipython(), "kernel", None) is None:
        return None
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text, html: handle.update({"text/plain": text, "text/html": html}, raw=True)
