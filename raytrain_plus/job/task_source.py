"""Digest the source of a job's task, module by module, so that an edited task is noticed.

The modules are found by name in the folders of the user's code, as Python finds them; nothing is imported. Python,
this package and installed packages do not count. A class of a notebook has no file: its digest covers its code and the
values that the code refers to.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import is_librarys

_OURS = __name__.partition(".")[0]
_NOTEBOOK = f"__main__ in Python {sys.version_info.major}.{sys.version_info.minor}"
"""The key of a notebook's code. Compiled code differs between versions of Python, so it is compared within one only."""


def source_digests(job: Job, roots: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of each of the user's modules that the job's task and functions come from, by module name.

    `roots`: the folders to import from. A module that cannot be found or read is left out.
    """
    held_out = None if job.evaluate is None else job.evaluate.dataset
    mixed = [source.get("dataset") for source in job.data.mix or ()]
    functions = (job.data.transform, job.data.collate, job.data.dataset, *mixed, held_out)
    names = [spec.partition(":")[0] for spec in functions if spec is not None and ":" in spec]
    if isinstance(job.task, str):
        return module_digests([job.task.partition(":")[0], *names], roots)
    if job.task.__module__ == "__main__" and _loaded_file("__main__") is None:
        code = _Code(job.task.__module__)
        code.visit(job.task)
        loaded = {name: str(_loaded_file(name) or "") for name in sorted(code.modules)}
        names += [name for name, file in loaded.items() if file and not is_librarys(file)]
        return {_NOTEBOOK: _sha256("\n".join(code.parts).encode()), **module_digests(names, roots)}
    return module_digests([job.task.__module__, *names], roots)


def changed_modules(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names, for people, of the modules whose digests differ; a module that only one side has is ignored.

    A module that is imported no longer, or only now, shows in the module that imports it.
    """
    differing = sorted(name for name in then.keys() & now.keys() if then[name] != now[name])
    return ["the code of the notebook" if name == _NOTEBOOK else name for name in differing]


def whole_digest(modules: Mapping[str, str]) -> str | None:
    """Return one SHA-256 of the digests of all modules, wherever these lie; None if there are none."""
    return _sha256("".join(sorted(modules.values())).encode()) if modules else None


def module_digests(names: Iterable[str], roots: Sequence[Path]) -> dict[str, str]:
    """Return the SHA-256 of these modules of the user's, and of those of the user's that they import, by name."""
    found: dict[str, str] = {}
    for start in names:
        file = _loaded_file(start) or _file_of(start, [*roots, *map(Path, sys.path)])
        if file is None or start.partition(".")[0] == _OURS:
            continue
        if is_librarys(str(file)):
            found |= _read(start, file)[0]
            continue
        levels = start.count(".") + (file.name == "__init__.py")
        # Its package's folder; a module that was loaded under another name may have none.
        search = [*roots, *file.parents[levels : levels + 1]]
        pending = {start: file}
        while pending:
            name, file = pending.popitem()
            digests, imported = _read(name, file)
            found |= digests
            for other in imported:
                where = None if other in found or other.partition(".")[0] == _OURS else _file_of(other, search)
                if where is not None and not is_librarys(str(where)):
                    pending[other] = where
    return found


def _read(name: str, file: Path) -> tuple[dict[str, str], set[str]]:
    """Return a module's digest by its name, and the modules that it may import."""
    try:
        content = file.read_bytes()
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError):
        return {}, set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    imported = {parent for one in (name, *_imports(tree, package)) for parent in _with_parents(one)}
    return {name: _sha256(content)}, imported - {name}


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                try:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                except ImportError:
                    continue
            # A name may be a module of the package, or anything in it.
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _with_parents(name: str) -> Iterator[str]:
    """Yield a module's name and those of the packages that it lies in.

    >>> list(_with_parents("a.b.c"))
    ['a', 'a.b', 'a.b.c']
    """
    parts = name.split(".")
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _file_of(name: str, search: Iterable[Path]) -> Path | None:
    """Return the file of a module in the first folder that has it."""
    path = Path(*name.split("."))
    candidates = (root / file for root in search for file in (path / "__init__.py", path.with_suffix(".py")))
    return next((file for file in candidates if file.is_file()), None)


def _loaded_file(name: str) -> Path | None:
    """Return the file of a module that is imported in this process."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).absolute() if file and Path(file).is_file() else None


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class _Code:
    """Collects, as text that is equal in every process, what a class of a module without a file consists of."""

    def __init__(self, module: str) -> None:
        self.parts: list[str] = []
        self.modules: set[str] = set()
        """The other modules that the class refers to."""
        self._module = module
        self._seen: set[int] = set()

    def visit(self, value: Any) -> None:
        """Add a value, and what it refers to."""
        if isinstance(value, (str, bytes, int, float, complex, type(None), type(...))):
            self.parts.append(repr(value))
            return
        if isinstance(value, ModuleType):
            self.modules.add(value.__name__)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, Mapping):
            self._all(one for item in value.items() for one in item)
        elif isinstance(value, (list, tuple)):
            self._all(value)
        elif isinstance(value, (set, frozenset)):
            self.parts += sorted(map(repr, value))
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(value.__func__)
        elif isinstance(value, property):
            self._all((value.fget, value.fset))
        elif isinstance(value, functools.partial):
            self._all((value.func, value.args, value.keywords))
        elif isinstance(value, CodeType):
            self._all((value.co_code, value.co_names, value.co_varnames, value.co_consts))
        else:
            self._defined(value)

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.visit(value)

    def _defined(self, value: Any) -> None:
        """Add a class, a function or an object, if its code is the module's own."""
        value = inspect.unwrap(value) if isinstance(value, FunctionType) else value
        defined = value if isinstance(value, (type, FunctionType)) else type(value)
        self.parts.append(f"{defined.__module__}.{defined.__qualname__}")
        if defined.__module__ != self._module:
            self.modules.add(str(defined.__module__))
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
            self._all((value.__code__, value.__defaults__, value.__kwdefaults__, cells))
            self._all(value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)
        elif isinstance(value, type):
            self._all(value.__bases__)
            own = {
                name: one
                for name, one in vars(value).items()
                if isinstance(one, FunctionType) or not name.startswith("__")
            }
            own.pop("_abc_impl", None)
            self.visit(own)
        else:
            self._all((defined, getattr(value, "__dict__", None)))


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(code: CodeType) -> list[str]:
    """Return the names that a function and the functions inside it look up, in order."""
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one)]
    return list(dict.fromkeys([*code.co_names, *inner]))
