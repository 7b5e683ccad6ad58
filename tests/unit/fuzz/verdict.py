"""Check a fuzzed call: it must give an answer or one of our errors within a time limit, and no traceback."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raytrain_plus.cli import main as cli

LIMIT_S = 20.0
"""Seconds of this process's own CPU time that one call may take; waiting and a busy machine do not count."""


class Hung(BaseException):
    """A call took longer than `LIMIT_S`. Not an `Exception`, so that no handler takes it for an error of the call."""


class Fault(AssertionError):
    """The code under test misbehaved; the message says how."""


@contextlib.contextmanager
def limited(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raise `Hung` in the context once it has used this many seconds of the process's CPU time."""

    def hung(number: int, frame: object) -> None:
        raise Hung(f"still computing after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, hung)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def raytrain(*words: str | Path) -> tuple[int, str, str]:
    """Run a command in this process; return exit code, stdout and stderr. Raises `Fault` for an internal traceback."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited():
        code = cli._answered([str(word) for word in words])
    said = f"raytrain {' '.join(map(repr, map(str, words)))}\n{err.getvalue()}"
    if "This is a bug in raytrain_plus" in err.getvalue():
        raise Fault(said)
    if code not in (0, 1, 2) or (code != 0 and not err.getvalue().strip() and not out.getvalue().strip()):
        raise Fault(f"exit code {code} without a word: {said}")
    return code, out.getvalue(), err.getvalue()


def tried(seeds: Sequence[int], one: Callable[[int], Any], kind: str) -> list[Any]:
    """Try every seed and return the outcomes. Raises `Fault` at the first failure, with the command that repeats it."""
    found = []
    for seed in seeds:
        try:
            found.append(one(seed))
        except (Exception, Hung) as error:
            again = f"python -m tests.unit.fuzz.again {kind} {seed}"
            raise Fault(f"{kind} {seed} ({again}): {type(error).__name__}: {error}") from error
    return found
