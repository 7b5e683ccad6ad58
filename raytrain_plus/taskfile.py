"""Finding what a job names as `module:name`: a task, `data.prepare`, `data.transform`; and whose fault it is if not."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytrain_plus.errors import TaskError
from raytrain_plus.task import Task

_PACKAGE = str(Path(__file__).parent)


def load_task(spec: str, roots: Sequence[Path]) -> type[Task]:
    """The class that `module:Class` names, looked up from `roots` first. Raises `TaskError`."""
    value = _load(spec, roots, "task")
    if not (isinstance(value, type) and issubclass(value, Task)):
        raise TaskError(f"{spec} is {_spell(value)}", where="task", expected="a class derived from raytrain_plus.Task")
    return value


def load_function(spec: str, roots: Sequence[Path]) -> Callable[..., Any]:
    """The function that `module:function` names. Raises `TaskError`."""
    value = _load(spec, roots, "data")
    if not callable(value):
        raise TaskError(f"{spec} is {_spell(value)}", where="data", expected="a function")
    return value  # type: ignore[no-any-return]


def build_task(cls: type[Task], args: Mapping[str, Any]) -> Task:
    """An instance of the task. Raises `TaskError` with the user's own frames where the constructor does."""
    try:
        return cls(**args)
    except Exception as error:
        given = ", ".join(args) or "none"
        raise TaskError(
            f"{cls.__name__}(...) raised {type(error).__name__}: {error}",
            where=f"task: {cls.__module__}:{cls.__qualname__}",
            remedy=f"check the job's args (given: {given})" if isinstance(error, TypeError) else "",
            user_traceback=trim_traceback(error),
        ) from None


def trim_traceback(error: BaseException) -> str:
    """The traceback of `error` with the user's own frames alone, without this package's and those of libraries."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    lines = (
        ["Traceback (your code only):", *(line.rstrip() for line in traceback.format_list(frames))] if frames else []
    )
    if isinstance(error, SyntaxError):
        lines = [f'  File "{error.filename}", line {error.lineno}', f"    {(error.text or '').strip()}"]
    return "\n".join([*lines, f"{type(error).__name__}: {error}"])


def fault_of(error: BaseException) -> str:
    """What an error is and where it was raised: the same words whenever it comes again."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if _is_users(frame.filename)] or frames
    place = f" at {users[-1].filename}:{users[-1].lineno}" if users else ""
    return f"{type(error).__name__}{place}"


def _is_users(filename: str) -> bool:
    library = "site-packages" in filename or "dist-packages" in filename or filename.startswith((sys.base_prefix, "<"))
    return not library and not filename.startswith(_PACKAGE)


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
    except Exception as error:
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


def _raised(error: Exception, module: str, what: str, spec: str) -> TaskError:
    return TaskError(
        f"importing '{module}' raised {type(error).__name__}: {error}",
        where=f"{what}: {spec}",
        user_traceback=trim_traceback(error),
    )


def _spell(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
