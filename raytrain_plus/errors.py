"""Define every error that this package raises on purpose, and what each one means.

    RaytrainError
    +-- InputError        the user's input is wrong: stop, exit code 2, no traceback
    |   +-- JobError      the job file or a `Job(...)`; holds every problem found, not only the first
    |   +-- DataError     the data that the job names
    |   |   +-- DataChanged     a file changed since the run first saw it, or is damaged: a run using it fails
    |   +-- TaskError     the task cannot be imported, built or sent; holds the user's own traceback
    |   +-- CheckpointError     a checkpoint belongs to another job or a newer version
    |       +-- DamagedError    its bytes differ from those written: the previous one is used
    +-- RunError          the run failed: exit code 1
    |   +-- TrainingError the task failed or diverged while it trained (an exception, a loss that is not finite)
    |   +-- WorkerLost    a worker process died
    |   +-- StaleController     a controller called a worker that a newer controller has taken over
    |   +-- WaitExpired   a wait timed out; says what for, and how long
    |   +-- StorageError  a storage failed; also an `OSError`, so it is handled as a full disk is
    |   +-- StepsLost     workers train, but the record of steps is lost: resume the run from its folder
    |   +-- FolderGone    the run's folder was moved, removed or taken over: nothing more is written
    +-- Interrupted       a collective was left early because the group is changing

Any other exception that escapes is a bug in this package and keeps its traceback.

No error contains a credential of an address: each error strips its texts when it is created.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raytrain_plus.credentials import without_credentials


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


LISTED = 3
"""Maximum number of names in a message."""


def listed(names: Iterable[str]) -> str:
    """Return the first of these names as text."""
    every = list(names)
    return ", ".join(every[:LISTED]) + ", ..." * (len(every) > LISTED)


def _told(text: str) -> str:
    """Return text without credentials, and with the bytes of a file's name that are not UTF-8 as `\\xe9`."""
    try:
        name = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        name = text.encode(errors="backslashreplace")
    return without_credentials(name.decode(errors="backslashreplace"))


class RaytrainError(Exception):
    """Base of all errors raised on purpose; they can be pickled between processes."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(_told(arg) if isinstance(arg, str) else arg for arg in args))


class InputError(RaytrainError):
    """The user's input is wrong.

    `what` says what is wrong, `where` the file, key or row, `expected` what would be right, and `remedy` what to do.
    All four are plain sentences or fragments; empty ones are left out.
    """

    def __init__(self, what: str, where: str = "", expected: str = "", remedy: str = "") -> None:
        super().__init__(what, where, expected, remedy)
        self.what, self.where, self.expected, self.remedy = map(_told, (what, where, expected, remedy))

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        rest = [f"  {label}: {text}" for label, text in (("expected", self.expected), ("fix", self.remedy)) if text]
        return "\n".join([head, *rest])


class JobError(InputError):
    """The job has one or more mistakes; `problems` holds all of them, in the order of the file."""

    def __init__(self, problems: Sequence[InputError]) -> None:
        first = problems[0]
        super().__init__(first.what, first.where, first.expected, first.remedy)
        self.problems = tuple(problems)

    def __reduce__(self) -> tuple[type[JobError], tuple[tuple[InputError, ...]]]:
        return JobError, (self.problems,)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class DataError(InputError):
    """The job's data is missing, empty, broken, or not a single table."""


class DataChanged(DataError):
    """A data file has changed since the run first saw it, or its pages are damaged.

    A running job fails at once (exit code 1), because reading again, on any worker, does not help. `first` says which
    file of which dataset has changed, and its state when the run first saw it; the run resumes only with that state.
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
    """A checkpoint's bytes are missing, or differ from those that were written."""


class RunError(RaytrainError):
    """The run failed; the message says at which step and why."""


class TrainingError(RunError):
    """The task failed during training. `user_traceback` holds the user's own frames, if any."""

    def __init__(self, what: str, user_traceback: str = "") -> None:
        super().__init__(what, user_traceback)
        self.what, self.user_traceback = map(without_credentials, (what, user_traceback))

    def __str__(self) -> str:
        trace = self.user_traceback.rstrip()
        return f"{trace}\n{self.what}" if trace else self.what


class WorkerLost(RunError):
    """A worker process died; the message names it and the cause."""


class StaleController(RunError):
    """A controller called a worker of which a newer controller has taken charge; the call had no effect."""


class DeviceBroken(RunError):
    """A worker's device has failed, so that its process is of no use any more. `fault` says how.

    `device` names a GPU; it is empty if the worker has none.
    """

    def __init__(self, device: str, fault: str) -> None:
        super().__init__(device, fault)
        self.device, self.fault = device, fault

    def __str__(self) -> str:
        return f"its GPU failed: {self.fault} ({self.device})" if self.device else f"its device failed: {self.fault}"


class WaitExpired(RunError):
    """A wait timed out; the message says what for and how long."""


class StorageError(OSError, RunError):
    """A storage failed, permanently or for now; the message says what could not be done."""

    def __init__(self, *args: object) -> None:
        # `OSError` is the first base, and stores the arguments itself.
        super().__init__(*(without_credentials(arg) if isinstance(arg, str) else arg for arg in args))


class StepsLost(RunError):
    """No living worker has the record of a committed step that the run's folder lacks."""


class FolderGone(RunError):
    """The run's folder was moved or removed, or belongs to another run: nothing more may be written there."""


class Interrupted(RaytrainError):
    """A collective was left before it completed, because the group is being changed or a peer is gone."""
