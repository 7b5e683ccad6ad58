"""Finding what a job names as `module:name`: a task, `data.prepare`, `data.transform`; and whose fault it is if not."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch

from raytrain_plus.errors import RaytrainError, TaskError
from raytrain_plus.job.secret_refs import resolved
from raytrain_plus.task import Task


def _folder(file: str | None) -> str:
    # With the separator: `raytrain_plus_mine` beside us is not ours.
    return os.path.join(os.path.dirname(file or ""), "")


_OURS = _folder(os.path.dirname(__file__))
_BENEATH_TASKS = (_OURS, _folder(torch.__file__), _folder(importlib.__file__), "<frozen ")
"""What calls a task, or is called by it, and never is one: this package, torch, the import system."""
_STANDARD = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))


def load_task(task: str | type, roots: Sequence[Path]) -> type[Task]:
    """The class that `module:Class` names, looked up from `roots` first; or one given as it is. Raises `TaskError`."""
    value = _load(task, roots, "task") if isinstance(task, str) else task
    if not (isinstance(value, type) and issubclass(value, Task)):
        name = task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"
        raise TaskError(f"{name} is {_spell(value)}", where="task", expected="a class derived from raytrain_plus.Task")
    return value


def load_function(spec: str, roots: Sequence[Path]) -> Callable[..., Any]:
    """The function that `module:function` names. Raises `TaskError`."""
    value = _load(spec, roots, "data")
    if not callable(value):
        raise TaskError(f"{spec} is {_spell(value)}", where="data", expected="a function")
    return value  # type: ignore[no-any-return]


def build_task(cls: type[Task], args: Mapping[str, Any]) -> Task:
    """An instance of the task; `${env:NAME}` in its arguments is what this process's environment holds.

    Raises `TaskError` with the user's own frames where the constructor does, and `InputError` for a variable that is
    not set.
    """
    known = resolved(args, os.environ)
    try:
        return cls(**known)
    except (Exception, SystemExit) as error:
        if is_signal(error):
            raise
        given = ", ".join(args) or "none"
        raise TaskError(
            f"{cls.__name__}(...) raised {type(error).__name__}: {error}",
            where=f"task: {cls.__module__}:{cls.__qualname__}",
            remedy=f"check the job's args (given: {given})" if isinstance(error, TypeError) else "",
            user_traceback=trim_traceback(error),
        ) from None


@contextmanager
def told_as_task_error(what: str, where: str) -> Iterator[None]:
    """What the task's code raises while it is open becomes a `TaskError` that says `what` went wrong, in its frames."""
    try:
        yield
    except RaytrainError:
        raise
    except Exception as error:
        raise TaskError(
            f"{what}: {type(error).__name__}: {error}", where=where, user_traceback=trim_traceback(error)
        ) from None


def trim_traceback(error: BaseException) -> str:
    """The traceback of `error` with the user's own frames alone, without this package's and those of libraries.

    Where only libraries have frames, a task that was installed is one of them: theirs are kept then.
    """
    frames = users_frames(error)
    lines = [line.rstrip() for line in traceback.format_list(frames)]
    if lines:
        whose = "without raytrain_plus and torch" if _is_librarys(frames[-1].filename) else "your code only"
        lines.insert(0, f"Traceback ({whose}):")
    if isinstance(error, SyntaxError):
        lines = [f'  File "{error.filename}", line {error.lineno}', f"    {(error.text or '').strip()}"]
    return "\n".join([*lines, f"{type(error).__name__}: {error}"])


def users_frames(error: BaseException) -> list[FrameSummary]:
    """Where the user's code was when `error` was raised, the innermost place last; see `trim_traceback`."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_BENEATH_TASKS)
    ]
    return [frame for frame in frames if not _is_librarys(frame.filename)] or frames


def fault_of(error: BaseException) -> str:
    """What an error is and where it was raised: the same words whenever it comes again."""
    frames = users_frames(error) or list(traceback.extract_tb(error.__traceback__))
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def is_signal(error: BaseException) -> bool:
    """Whether this is a signal's `SystemExit`, which our own handlers raise in whatever runs, and no call of a task's
    to `sys.exit`."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, SystemExit) and bool(frames) and frames[-1].filename.startswith(_OURS)


def _is_librarys(filename: str) -> bool:
    installed = {"site-packages", "dist-packages"} & set(Path(filename).parts)
    return bool(installed) or filename.startswith((*_STANDARD, "<"))


def _load(spec: str, roots: Sequence[Path], what: str) -> Any:
    module_name, _, name = spec.partition(":")
    # In front of the search path, and left there, as running a script does with its folder.
    sys.path[:0] = [text for root in roots if (text := str(root.absolute())) not in sys.path]
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            searched = ", ".join(str(root) for root in roots)
            raise TaskError(
                f"there is no module '{error.name}'",
                where=f"{what}: {spec}",
                expected=f"module:name, importable from {searched}",
                remedy="run from the folder that holds it, or correct the name",
            ) from None
        raise _raised(error, module_name, what, spec) from None
    except (Exception, SystemExit) as error:
        if is_signal(error):
            raise
        raise _raised(error, module_name, what, spec) from None
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


def _raised(error: BaseException, module: str, what: str, spec: str) -> TaskError:
    return TaskError(
        f"importing '{module}' raised {type(error).__name__}: {error}",
        where=f"{what}: {spec}",
        user_traceback=trim_traceback(error),
    )


def _spell(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
