"""Import the code that a job names as `module:name` (task, `data.prepare`, `data.transform`); attribute failures.

Errors in the user's code become `TaskError`s that show the user's own frames.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import io
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from typing import Any, TextIO

import torch

from raytrain_plus.errors import RaytrainError, TaskError
from raytrain_plus.job.secret_refs import resolved
from raytrain_plus.job.settings import Job
from raytrain_plus.session.session_task import SessionTask, session_task
from raytrain_plus.storage.place import is_utf8
from raytrain_plus.task import RunFacts, Task


def _folder(file: str | None) -> str:
    # With the separator, so that a folder `raytrain_plus_mine` beside this package does not match.
    return os.path.join(os.path.dirname(file or ""), "")


_OURS = _folder(os.path.dirname(__file__))
_BENEATH_TASKS = (_OURS, _folder(torch.__file__), _folder(importlib.__file__), "<frozen ")
"""Code that calls a task or is called by it, and is never a task itself: this package, torch, the import system."""
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


@dataclass(frozen=True, slots=True)
class UserCode:
    """The imported code of a job that a run calls."""

    task: type[Task]
    transform: Callable[..., Any] | None
    """The function of `data.transform`."""


def load_user_code(job: Job, roots: Sequence[Path]) -> UserCode:
    """Import the job's task, transform and collate function, searching `roots` first. Raises `TaskError`."""
    for root in roots:
        # Ray sends the working directory's name as text.
        if not is_utf8(root):
            raise TaskError("the name of the folder is not UTF-8 text", where=str(root), remedy="rename it")
    transform, collate = job.data.transform, job.data.collate
    if collate is not None and ":" in collate:
        load_function(collate, roots)
    task = load_task(job.task, roots)
    if issubclass(task, SessionTask):
        _check_whole(job, task.__name__)
    return UserCode(task, None if transform is None else load_function(transform, roots))


def _check_whole(job: Job, name: str) -> None:
    """Raise `TaskError` if the job divides the model of a training function.

    Its workers would wait for one another inside the function, where an interrupt cannot be raised.
    """
    parallel = job.parallel
    settings = ("pipeline", "tensor", *(["sharded"] if parallel.sharded == "full" else []))
    for setting in settings if parallel.by_layer else ():
        if getattr(parallel, setting) != 1:
            raise TaskError(
                f"the function {name} has a loop of its own, which needs the whole model on each worker",
                where=f"parallel.{setting}: {getattr(parallel, setting)}",
                expected="sharded: optimizer, which divides the optimizer's state, or none of it",
                remedy="write a Task, whose layers can be divided",
            )


def load_task(task: str | type, roots: Sequence[Path]) -> type[Task]:
    """Return the class named by `module:Class`, searching `roots` first, or a given class. Raises `TaskError`.

    A function becomes the task that gives its loop the batches: see `raytrain_plus.session`.
    """
    value = _load(task, roots, "task") if isinstance(task, str) else task
    if inspect.isfunction(value):
        return session_task(value)
    if not (isinstance(value, type) and issubclass(value, Task)):
        name = task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"
        raise TaskError(
            f"{name} is {_spell(value)}",
            where="task",
            expected="a class derived from raytrain_plus.Task, or a function of a session",
        )
    return value


def load_function(spec: str, roots: Sequence[Path]) -> Callable[..., Any]:
    """Return the function named by `module:function`. Raises `TaskError`."""
    value = _load(spec, roots, "data")
    if not callable(value):
        raise TaskError(f"{spec} is {_spell(value)}", where="data", expected="a function")
    return value  # type: ignore[no-any-return]


def run_facts(job: Job, total_steps: int, rows: int = 0) -> RunFacts:
    """Return what the job's task is told of its run, which has that many steps; `rows`: see `RunFacts`."""
    return RunFacts(total_steps=total_steps, batch_size=job.data.batch_size, rows=rows)


def build_task(cls: type[Task], args: Mapping[str, Any], run: RunFacts | None = None) -> Task:
    """Return an instance of the task, with `${env:NAME}` in its arguments resolved from this process's environment.

    `run`: becomes the task's `run`; None if it is not built for a run. Raises `TaskError` with the user's own frames if
    the constructor raises, if it does not take an argument, or if the class has a `run` of its own, and `InputError` if
    a variable is not set.
    """
    known = resolved(args, os.environ)
    _check_taken(cls, known)
    if inspect.getattr_static(cls, "run") is not vars(Task)["run"]:
        raise TaskError(
            f"{cls.__name__} has an attribute 'run' of its own, and Task.run holds the facts of the run",
            where=f"task: {cls.__module__}:{cls.__qualname__}",
            remedy="give it another name",
        )

    def report(error: BaseException) -> TaskError:
        given = ", ".join(args) or "none"
        return TaskError(
            f"{cls.__name__}(...) raised {type(error).__name__}: {error}",
            where=f"task: {cls.__module__}:{cls.__qualname__}",
            remedy=f"check the job's args (given: {given})" if isinstance(error, TypeError) else "",
            # Without frames, as for a missing argument, it is only the same text again.
            user_traceback=trim_traceback(error) if users_frames(error) else "",
        )

    with reporting(report):
        task = cls(**known)
    if run is not None:
        # Whatever the class does when an attribute is set: a frozen dataclass refuses it.
        object.__setattr__(task, "run", run)
    return task


@contextmanager
def prints_hidden() -> Iterator[None]:
    """Hide what the task prints in this context, which runs code that runs elsewhere, too; show it if it raises.

    No other thread may do so at the same time.
    """
    kept = _Hidden()
    try:
        with redirect_stdout(kept):
            yield
    except BaseException:
        sys.stderr.write(kept.getvalue())
        raise
    finally:
        kept.real = sys.stdout


class _Hidden(io.StringIO):
    """What is written is kept, until `real` is there: a logging handler that the task made keeps this stream."""

    real: TextIO | None = None

    def write(self, text: str) -> int:
        return super().write(text) if self.real is None else self.real.write(text)

    def flush(self) -> None:
        if self.real is not None:
            self.real.flush()


@contextmanager
def reporting(report: Callable[[BaseException], Exception | None]) -> Iterator[None]:
    """Turn whatever the task's code raises into the error that `report` returns; None leaves it as it is.

    Exceptions that usually end a process, such as `KeyboardInterrupt` and `SystemExit`, are errors of the task like any
    other, unless a signal raised them.
    """
    try:
        yield
    except BaseException as error:
        reported = None if is_signal(error) else report(error)
        if reported is None:
            raise
        raise reported from None


def _check_taken(cls: type[Task], args: Mapping[str, Any]) -> None:
    """Raise `TaskError` if the constructor does not take one of the job's arguments."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    taken = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unknown = [name for name in args if name not in taken]
    if unknown:
        near = difflib.get_close_matches(unknown[0], taken, 1)
        suggestion = f"did you mean '{near[0]}'?" if near else "remove it"
        raise TaskError(
            f"{cls.__name__}(...) takes no argument {' and no '.join(map(repr, unknown))}",
            where=f"args.{unknown[0]}",
            expected=f"one of {', '.join(taken)}" if taken else "no args",
            remedy=suggestion,
        )


@contextmanager
def as_task_error(what: str, where: str) -> Iterator[None]:
    """Turn exceptions of the task's code into a `TaskError` that says `what` failed and shows the user's frames."""

    def report(error: BaseException) -> TaskError | None:
        if isinstance(error, RaytrainError):
            return None
        return TaskError(f"{what}: {type(error).__name__}: {error}", where=where, user_traceback=trim_traceback(error))

    with reporting(report):
        yield


def trim_traceback(error: BaseException) -> str:
    """Return the traceback of `error` with the user's own frames only, without this package and libraries.

    If only libraries have frames, the task was installed as one of them, and their frames are kept.
    """
    frames = users_frames(error)
    lines = [line.rstrip() for line in traceback.format_list(frames)]
    if lines:
        whose = "without raytrain_plus and torch" if is_librarys(frames[-1].filename) else "your code only"
        lines.insert(0, f"Traceback ({whose}):")
    if isinstance(error, SyntaxError):
        lines = [f'  File "{error.filename}", line {error.lineno}', f"    {(error.text or '').strip()}"]
    return "\n".join([*lines, f"{type(error).__name__}: {error}"])


def users_frames(error: BaseException) -> list[FrameSummary]:
    """Return the user's frames at which `error` was raised, innermost last; see `trim_traceback`."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_BENEATH_TASKS)
    ]
    return [frame for frame in frames if not is_librarys(frame.filename)] or frames


def fault_of(error: BaseException) -> str:
    """Return the type and place of an error, as text that is the same whenever the error recurs."""
    frames = users_frames(error) or list(traceback.extract_tb(error.__traceback__))
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed."""
    # What torch's CPU allocator raises has no type of its own.
    no_memory = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return no_memory or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def is_signal(error: BaseException) -> bool:
    """Return whether a signal raised this `KeyboardInterrupt` or `SystemExit`, and not the task's code.

    Python handles signals on the main thread, as Ray does when it cancels a call. Workers run the task on another.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, SystemExit) and bool(frames) and frames[-1].filename.startswith(_OURS)


def is_librarys(filename: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    installed = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    return bool(installed) or filename.startswith((*_STANDARD, "<"))


def _load(spec: str, roots: Sequence[Path], what: str) -> Any:
    module_name, _, name = spec.partition(":")
    # First in the search path, and left there, as for the folder of a script.
    sys.path[:0] = [text for root in roots if (text := str(root.absolute())) not in sys.path]
    importlib.invalidate_caches()
    with reporting(lambda error: _not_imported(error, module_name, f"{what}: {spec}", roots)):
        module = importlib.import_module(module_name)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            near = difflib.get_close_matches(part, [n for n in dir(value) if not n.startswith("_")], 1)
            raise TaskError(
                f"module '{module_name}' has no '{part}'",
                where=f"{what}: {spec}",
                remedy=f"did you mean '{near[0]}'?" if near else "",
            )
        value = getattr(value, part)
    return value


def _not_imported(error: BaseException, module: str, where: str, roots: Sequence[Path]) -> TaskError:
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and (module == missing or module.startswith(missing + ".")):
        searched = ", ".join(dict.fromkeys(map(str, roots)))
        return TaskError(
            f"module '{missing}' not found",
            where=where,
            expected=f"module:name, importable from {searched}",
            remedy="run from the folder that contains it, or correct the name",
        )
    relative = isinstance(error, ImportError) and "relative import" in str(error)
    remedy = "import by absolute names, or name the module with its package, such as package.module:Name"
    return TaskError(
        f"importing '{module}' raised {type(error).__name__}: {error}",
        where=where,
        remedy=remedy if relative else "",
        user_traceback=trim_traceback(error),
    )


def _spell(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
