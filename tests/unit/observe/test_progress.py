"""The three views, with hand-written events and a manual clock."""

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from raytrain_plus.observe.views.page import LINES
from raytrain_plus.observe.views.progress import (
    LIVE_S,
    PLAIN_S,
    NotebookView,
    PlainView,
    ProgressView,
    SummaryView,
    TerminalView,
    view_for,
)
from raytrain_plus.result import Result
from tests.unit.observe.feed import evaluated, event, step, view

RESULT = Result(name="gpt", status="finished", exit_code=0, path=Path("runs/gpt"), steps=9, samples=432)


class Clock:
    """A clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=24, _environ={"TERM": "xterm"})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_plain_view_prints_a_line_every_few_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    plain = PlainView(stream, clock)
    plain.start("gpt", 9)
    plain.event(view(6, 6))
    for number in range(3):
        plain.event(step(number))
    clock.now = PLAIN_S
    plain.event(step(3))
    plain.event(step(4))
    assert stream.getvalue().splitlines() == [
        "gpt: 9 steps; starting workers",
        "2 workers ready, 6 shards each; 1,000 parameters; collective: horovod",
        "step 1/9  loss 1.2500  2 workers",
        "step 4/9  loss 1.2500  96 samples/s  2 workers  0:02 left",
    ]


def test_the_plain_view_prints_incidents_at_once_and_ends_with_the_summary() -> None:
    stream = io.StringIO()
    plain = PlainView(stream, Clock())
    plain.start("gpt", 9)
    plain.event(evaluated(-1, loss=5.5))
    plain.event(event("worker_lost", worker="worker-1", pid=7, node="n", cause="[red]killed"))
    plain.event(evaluated(8, loss=1.5))
    plain.close()
    plain.finish(RESULT)
    lines = stream.getvalue().splitlines()
    assert lines[1:3] == ["held out, untrained: loss 5.5000", "worker-1 (pid 7) was lost: [red]killed"]
    assert "  held out loss  5.5000 untrained -> 1.5000 trained" in lines
    assert lines[-1].startswith("  next ")


def test_a_reader_that_leaves_ends_neither_the_run_nor_the_process() -> None:
    program = (
        "import sys\n"
        "from raytrain_plus.observe.views.progress import PlainView\n"
        "plain = PlainView(sys.stdout)\n"
        "sys.stdin.read()\n"
        "plain.start('gpt', 9)\n"
        "plain.start('gpt', 9)\n"
        "print('others write there, too')\n"
        "print('still there', file=sys.stderr)\n"
    )
    reader, writer = os.pipe()
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=writer, stderr=pipe, text=True)
    os.close(writer)
    os.close(reader)
    _, error = child.communicate("", timeout=60)
    assert (child.returncode, error) == (0, "still there\n")


def feed(there: ProgressView) -> None:
    there.start("gpt", 9)
    there.event(view(6, 6))
    there.event(event("worker_lost", worker="worker-9", pid=7, node="n", cause="[red]killed :boom: " + "x" * 80))
    for number in range(9):
        there.event(step(number))
    there.event(evaluated(8, loss=1.5))


def test_output_to_a_full_disk_is_lost_but_not_the_run(tmp_path: Path) -> None:
    """`raytrain run > log.txt` on a full disk must not end the run; it once did, with a traceback of its report."""
    with (tmp_path / "log.txt").open("w") as stream:
        said = PlainView(stream)
        said.start("first", 10)
        kept, full = os.dup(stream.fileno()), os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, stream.fileno())
        said.start("lost", 10)
        os.dup2(kept, stream.fileno())
        os.close(kept)
        os.close(full)
        said.start("last", 10)
    assert [line.partition(":")[0] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first", "last"]


def test_the_terminal_view_redraws_no_faster_than_it_can_be_read() -> None:
    console, clock = terminal(), Clock()
    live = TerminalView(console, clock)
    live.start("gpt", 1000)
    live.event(view(6, 6))
    before = len(written(console))
    for number in range(50):
        live.event(step(number))
    assert len(written(console)) == before
    clock.now = LIVE_S
    live.event(step(50))
    assert "step 51 of 1,000" in written(console)[before:]
    live.close()


def test_the_terminal_view_prints_text_without_markup_or_wrapping() -> None:
    console = terminal()
    live = TerminalView(console, Clock())
    feed(live)
    live.finish(RESULT)
    assert f"was lost: [red]killed :boom: {'x' * 80}\n" in written(console)
    assert "  next     pip install tensorboard && tensorboard --logdir" in written(console)


@pytest.mark.parametrize("width", [20, 40, 60, 70, 80, 200])
def test_no_line_of_the_live_view_wraps(width: int) -> None:
    console = terminal(width)
    live = TerminalView(console, Clock())
    feed(live)
    lines = console.render_lines(live._picture(), console.options)
    live.close()
    shown = ["".join(segment.text for segment in line).rstrip() for line in lines]
    assert len(shown) == 4
    assert max(map(len, shown)) <= width - 4, "room for the ^C that a terminal echoes"
    assert "step 9 of 9" in shown[0]
    assert ("━" in shown[0]) == (width >= 60)
    assert shown[3] == "[w0][w1]"


def test_the_quiet_view_prints_only_the_summary() -> None:
    stream = io.StringIO()
    quiet = view_for(stream, quiet=True)
    feed(quiet)
    quiet.close()
    assert stream.getvalue() == ""
    quiet.finish(RESULT)
    assert stream.getvalue().startswith("gpt finished: 9 steps")
    assert "held out loss  1.5000 after step 9" in stream.getvalue()


def test_every_view_prints_the_error_of_a_failed_run_above_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next step says to fix the error above."""
    console, drawn = terminal(), list[str]()
    told = {view: io.StringIO() for view in ("plain", "quiet")}
    views = {
        "plain": PlainView(told["plain"], Clock()),
        "quiet": SummaryView(told["quiet"]),
        "terminal": TerminalView(console, Clock()),
        "notebook": NotebookView(lambda text, html: drawn.append(text), Clock()),
        "ended": NotebookView(lambda text, html: drawn.append(text), Clock()),
    }
    failed = replace(RESULT, status="failed", exit_code=1, error="loss is nan\n  at step 3")
    for name, one in views.items():
        # Standard error is where the error goes; in a terminal both are one.
        monkeypatch.setattr(sys, "stderr", told.get(name, console.file))
        if name != "ended":
            one.start("gpt", 9)
        one.finish(failed)
        text = told[name].getvalue() if name in told else written(console) if name == "terminal" else drawn[-1]
        places = [text.index(words) for words in ("loss is nan", "at step 3", "gpt failed", "fix the error above")]
        assert places == sorted(places), name


def test_the_terminal_view_restores_the_cursor_after_an_error() -> None:
    console = terminal()
    live = TerminalView(console, Clock())
    live.start("gpt", 9)
    assert "\x1b[?25l" in written(console)
    live.close()
    live.close()
    assert written(console).rindex("\x1b[?25h") > written(console).rindex("\x1b[?25l")


def test_the_notebook_view_keeps_one_text_and_replaces_it() -> None:
    drawn: list[str] = []
    pages: list[str] = []
    clock = Clock()
    notebook = NotebookView(lambda text, html: (drawn.append(text), pages.append(html)), clock)
    notebook.start("gpt", 9)
    notebook.event(evaluated(-1, loss=5.5))
    count = len(drawn)
    notebook.event(view(6))
    notebook.event(step(0))
    assert len(drawn) == count + 1
    clock.now = LIVE_S
    notebook.event(step(1))
    assert drawn[-1].splitlines() == [
        "gpt: 9 steps",
        "held out, untrained: loss 5.5000",
        "1 worker ready, 6 shards each; 1,000 parameters; collective: horovod",
        "step 2/9  loss 1.2500  96 samples/s  1 worker  0:04 left",
    ]
    notebook.close()
    notebook.finish(RESULT)
    assert "step 2/9" not in drawn[-1]
    assert drawn[-1].splitlines()[-1].startswith("  next ")
    page = ElementTree.fromstring(pages[-1])
    assert "".join(page.findtext("pre") or "") == drawn[-1]
    assert page.find("{http://www.w3.org/2000/svg}svg") is not None


def test_the_notebook_view_stays_small_and_escapes_text() -> None:
    drawn: list[str] = []
    pages: list[str] = []
    notebook = NotebookView(lambda text, html: (drawn.append(text), pages.append(html)), Clock())
    notebook.start("gpt", 9)
    for number in range(LINES + 3):
        notebook.event(event("worker_lost", worker=f"worker-{number}", pid=7, node="n", cause="</pre><b>"))
    lines = drawn[-1].splitlines()
    assert lines[:3] == ["gpt: 9 steps", "(3 lines before these)", "worker-3 (pid 7) was lost: </pre><b>"]
    assert len(lines) == LINES + 3
    assert ElementTree.fromstring(pages[-1]).findtext("pre") == drawn[-1]


def test_a_run_that_had_already_ended_is_shown_as_lines() -> None:
    drawn: list[tuple[str, str]] = []
    NotebookView(lambda text, html: drawn.append((text, html)), Clock()).finish(RESULT)
    assert drawn[0][0].startswith("gpt finished: 9 steps")
    assert ElementTree.fromstring(drawn[0][1]).text == drawn[0][0]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "kind"),
    [(io.StringIO(), "xterm", PlainView), (Screen(), "xterm", TerminalView), (Screen(), "dumb", PlainView)],
    ids=["pipe", "terminal", "dumb terminal"],
)
def test_the_environment_selects_the_view(
    stream: TextIO, term: str, kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(view_for(stream), kind)
