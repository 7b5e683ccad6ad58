"""Every error this package raises on purpose, and what each asks of whoever meets it.

    RaytrainError
    +-- InputError        the user's input is wrong: stop, exit code 2, no traceback
    |   +-- JobError      the job file or a `Job(...)`; holds every problem found, not the first alone
    |   +-- DataError     the data that the job names
    |   |   +-- DataChanged     a file has changed since the run first saw it, or is damaged: a run that uses it fails
    |   +-- TaskError     the task cannot be imported, built or sent; holds the user's own traceback
    |   +-- CheckpointError     a checkpoint is another job's, or a newer version's
    |       +-- DamagedError    its bytes are not those that were written: the one before is taken
    +-- RunError          the run failed: exit code 1
    |   +-- TrainingError the task failed or diverged while it trained (an exception, a loss that is not finite)
    |   +-- WorkerLost    a worker process died
    |   +-- WaitExpired   something we waited for did not come in time; says what, and for how long
    |   +-- StorageError  a storage failed; an `OSError`, too, so that it is met as a full disk is
    |   +-- FolderGone    the run's folder was moved, removed or taken over: nothing more is written there
    +-- Interrupted       a collective was left early because the group changes

Anything else that escapes is a fault of ours and keeps its traceback.

No error repeats a credential of an address, whoever's words it quotes: each strips its texts when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raytrain_plus.credentials import without_credentials


class RaytrainError(Exception):
    """Base of all errors raised on purpose; they survive pickling between processes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(without_credentials(arg) if isinstance(arg, str) else arg for arg in args))


class InputError(RaytrainError):
    """The user's input is wrong.

    `what` says what is wrong, `where` gives the file, key or row, `expected` what would have been right and `remedy`
    what to do. All four are plain sentences or fragments; empty ones are left out.
    """

    def __init__(self, what: str, where: str = "", expected: str = "", remedy: str = "") -> None:
        super().__init__(what, where, expected, remedy)
        self.what, self.where, self.expected, self.remedy = map(without_credentials, (what, where, expected, remedy))

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        rest = [f"  {label}: {text}" for label, text in (("expected", self.expected), ("fix", self.remedy)) if text]
        return "\n".join([head, *rest])


class JobError(InputError):
    """The job is wrong in one or more places; `problems` holds them all, in the order of the file."""

    def __init__(self, problems: Sequence[InputError]) -> None:
        first = problems[0]
        super().__init__(first.what, first.where, first.expected, first.remedy)
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[JobError], tuple[tuple[InputError, ...]]]:
        return JobError, (self.problems,)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class DataError(InputError):
    """The data that the job names is missing, empty, broken, or not one table."""


class DataChanged(DataError):
    """A data file has changed since the run first saw it, or its pages are damaged.

    A run that has begun fails at once (exit code 1): reading again, by whatever worker, makes nothing better. `first`:
    which file of which dataset has changed, and what the run first saw of it; the run resumes only with that.
    """

    def __init__(
        self,
        what: str,
        where: str = "",
        expected: str = "",
        remedy: str = "",
        first: Mapping[str, str | int] | None = None,
    ) -> None:
        super().__init__(what, where, expected, remedy)
        self.first = first


class TaskError(InputError):
    """The task cannot be imported, built or sent to a worker. `user_traceback` holds the user's own frames."""

    def __init__(
        self, what: str, where: str = "", expected: str = "", remedy: str = "", user_traceback: str = ""
    ) -> None:
        super().__init__(what, where, expected, remedy)
        self.user_traceback = without_credentials(user_traceback)

    def __reduce__(self) -> tuple[type[TaskError], tuple[str, str, str, str, str]]:
        return TaskError, (self.what, self.where, self.expected, self.remedy, self.user_traceback)

    def __str__(self) -> str:
        trace = self.user_traceback.rstrip()
        return f"{trace}\n{super().__str__()}" if trace else super().__str__()


class CheckpointError(InputError):
    """A checkpoint cannot be used by this job, or by this version."""


class DamagedError(CheckpointError):
    """A checkpoint's bytes are not those that were written, or are not there."""


class RunError(RaytrainError):
    """The run failed; the message says at which step and why."""


class TrainingError(RunError):
    """The task failed while it trained. `user_traceback` holds the user's own frames, if there are any."""

    def __init__(self, what: str, user_traceback: str = "") -> None:
        super().__init__(what, user_traceback)
        self.what, self.user_traceback = map(without_credentials, (what, user_traceback))

    def __str__(self) -> str:
        trace = self.user_traceback.rstrip()
        return f"{trace}\n{self.what}" if trace else self.what


class WorkerLost(RunError):
    """A worker process died; the message names it and the cause."""


class WaitExpired(RunError):
    """A wait reached its limit; the message says what for and how long."""


class StorageError(OSError, RunError):
    """A storage failed, for good or for now; the message says what could not be done."""

    def __init__(self, *args: object) -> None:
        # `OSError` comes first, and takes its arguments to itself.
        super().__init__(*(without_credentials(arg) if isinstance(arg, str) else arg for arg in args))


class FolderGone(RunError):
    """The run's folder was moved or removed, or belongs to another run: nothing may be written there any more."""


class Interrupted(RaytrainError):
    """A collective was left before it completed, because the group is being changed or a peer is gone."""
