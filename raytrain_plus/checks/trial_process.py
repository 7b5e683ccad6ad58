"""Try a job's task before it runs: make the missing data, then see `trial.task_trial`; in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from raytrain_plus.data.dataset import both_data
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.prepare import LOCK_S, prepare_data
from raytrain_plus.data.reading.transform_block import with_draws
from raytrain_plus.errors import RaytrainError, RunError, TaskError, WaitExpired
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import load_user_code

if TYPE_CHECKING:
    from raytrain_plus.trial.task_trial import Trial

TRIAL_S = 300.0
"""Maximum seconds of a trial, once the data is there."""
TIDY_S = 5.0
"""Maximum seconds in which a trial that is ended may remove its temporary files."""


class Trying(Protocol):
    """A trial under way."""

    def data(self) -> None:
        """Wait until the data that the job prepares is there. Raises what `prepare` raised."""

    def result(self) -> Trial:
        """Return what the trial found. Raises `TaskError` for a mistake in the task, `InputError` for others."""


class Tried(Protocol):
    """What is done in a process of its own: the data is prepared, and then the task looked at."""

    def __init__(self, job: Job, roots: Sequence[Path]) -> None: ...

    def data(self) -> None:
        """Prepare the data."""

    def result(self) -> Any:
        """Return what was found."""


class TryingHere(Trying):
    """A trial in this process."""

    def __init__(self, job: Job, roots: Sequence[Path]) -> None:
        self._job = job
        self._search = [Path.cwd(), *roots]

    @override
    def data(self) -> None:
        prepare_data(self._job, self._search)

    @override
    def result(self) -> Trial:
        # Loaded here, because it loads torch.
        from raytrain_plus.trial.task_trial import try_on_cpu

        job = self._job
        code = load_user_code(job, self._search)
        seen, tested = both_data(job, self._search)
        rows = with_draws(rows_of(job, seen, code.transform))
        held_out = None if tested is None else held_out_rows_of(job, tested, code.transform)
        return try_on_cpu(job, code.task, rows, held_out and replace(held_out, draws=rows.draws))


class _TryingApart(Trying):
    """A trial in another process."""

    def __init__(self, job: Job, process: Any, answers: Connection) -> None:
        self._where = f"task: {job.task}"
        self._process = process
        self._answers = answers
        self._prepared = False

    @override
    def data(self) -> None:
        if not self._prepared:
            self._take(LOCK_S, "data.prepare to write the data")
            self._prepared = True

    @override
    def result(self) -> Any:
        self.data()
        return self._take(TRIAL_S, "the trial of the task")

    def _take(self, limit_s: float, what: str) -> Any:
        try:
            if not self._answers.poll(limit_s):
                raise WaitExpired(f"waited {limit_s:g} s for {what}; try without it: --no-run")
            answer = self._answers.recv()
        except EOFError:
            self._process.join(1.0)
            raise TaskError(_death(self._process.exitcode), where=self._where) from None
        if isinstance(answer, BaseException):
            raise answer
        return answer


@contextmanager
def trying_apart(job: Job, roots: Sequence[Path], kind: type[Tried] = TryingHere) -> Iterator[Trying]:
    """Start a trial in a process of its own, which ends with the context.

    What the task prints goes to stderr. `kind`: what is done there, whose result is that of the trial.
    """
    context = get_context("spawn")
    answers, ours = context.Pipe(duplex=False)
    # Not a daemon, because those may have no processes of their own, such as a pool that prepares data.
    process = context.Process(target=_try, args=(ours, job, [str(root) for root in roots], kind), daemon=False)
    process.start()
    ours.close()
    try:
        yield _TryingApart(job, process, answers)
    finally:
        _end(process)
        answers.close()


def _end(process: Any) -> None:
    """End a trial and all processes that it has started; it may remove its temporary files first."""
    process.terminate()
    process.join(TIDY_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(TIDY_S)


def _try(answers: Connection, job: Job, roots: Sequence[str], kind: type[Tried]) -> None:
    """Make a trial and send what it found, or its error."""
    # In a session of its own: a terminal's Ctrl-C is for the process that waits for this one.
    os.setsid()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # stdout belongs to the report.
    sys.stdout.flush()
    os.dup2(2, 1)
    here = kind(job, [Path(root) for root in roots])
    try:
        here.data()
        answers.send(None)
        answers.send(here.result())
    except SystemExit:
        # Ended by the process that waits for this one.
        raise
    except BaseException as error:
        answers.send(_sendable(error))
    # It may be ended while the interpreter shuts down, where an exception would be printed.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _sendable(error: BaseException) -> BaseException:
    if isinstance(error, RaytrainError):
        return error
    return RunError("the trial of the task failed unexpectedly:\n" + "".join(traceback.format_exception(error)))


def _death(code: int | None) -> str:
    """Return why a process with that exit code gave no answer, in words."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = ", probably because memory ran out" if code == -signal.SIGKILL else ""
        return f"the process that tried the task was ended by {name}{hint}"
    return f"the process that tried the task ended with exit code {code}"
