"""Find the files that a data path names: one file, those of its format below a folder, or the matches of a pattern."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raytrain_plus.errors import DataError

_RECURSIVE = "**"
"""The part of a pattern that matches any number of folders, also none."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files that a data path names."""

    root: Path
    """The folder that `names` are relative to: as much of the path as has no wildcards, or the folder of a file."""
    names: tuple[str, ...]
    """Paths relative to `root`, sorted, with slashes."""


def find_files(path: Path, suffixes: Sequence[str] = (".parquet",), kind: str = "Parquet") -> DataFiles:
    """Return the files that an absolute path names.

    That is the file itself; every file below a folder whose name ends in one of `suffixes`, which are those of that
    `kind`; or the files that match a pattern. Names with a leading . or _ are ignored, unless the pattern spells that
    character. Raises `DataError` if there are none, or a folder cannot be listed: a file that is overlooked would be a
    silent loss of rows.
    """
    root, pattern = split_pattern(path)
    if pattern:
        return DataFiles(root, _sorted(root, _matching_files(root, pattern)))
    if is_file(path):
        return DataFiles(path.parent, (path.name,))
    if not data_exists(path):
        raise _missing(path)
    return DataFiles(path, _sorted(path, _files_below(path, suffixes, kind)))


def names_below(folder: Path) -> list[str]:
    """Return the names of all files below a folder that are not hidden; none if it is no folder."""
    return [file.name for file in _seen_below(folder)] if _is_folder(folder) else []


def split_pattern(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Split a path before its first part with a wildcard (`*`, `?` or `[`); the second half is empty if it has none.

    A part that exists as it is spelled is taken literally, so a folder may be called `data[1]`.
    """
    at = Path(path.anchor)
    parts = path.relative_to(at).parts
    for number, part in enumerate(parts):
        if _has_wildcard(part) and not data_exists(at / part):
            return at, parts[number:]
        at /= part
    return path, ()


def data_exists(path: Path) -> bool:
    """Return whether anything is at `path`. Raises `DataError` if `path` cannot be accessed."""
    return _mode(path) is not None


def is_file(path: Path) -> bool:
    """Return whether a regular file is at `path`. Raises `DataError` if `path` cannot be accessed."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def _mode(path: Path) -> int | None:
    # `Path.exists` raises some errors and treats others as absence; which ones depends on Python's version.
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"cannot be accessed: {reason}", where=str(path)) from error


def _is_folder(path: Path) -> bool:
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _sorted(root: Path, files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(sorted({file.relative_to(root).as_posix() for file in files}))


def _missing(path: Path) -> DataError:
    parent = next(parent for parent in path.parents if data_exists(parent))
    return DataError(
        "there is no such file or folder",
        where=str(path),
        remedy=f"create it, correct the path ({parent} exists), or set data.prepare to a function that writes it",
    )


def _seen_below(folder: Path) -> list[Path]:
    return [file for file in _walk(folder) if is_file(file) and not _hidden(file.relative_to(folder))]


def _files_below(folder: Path, suffixes: Sequence[str], kind: str) -> list[Path]:
    seen = _seen_below(folder)
    files = [file for file in seen if file.name.lower().endswith(tuple(suffixes))]
    if not files:
        kinds = Counter(file.suffix or "without an extension" for file in seen)
        there = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(4)) or "nothing"
        raise DataError(
            f"contains no {kind} files; found {there}",
            where=str(folder),
            expected=f"files named {', '.join(f'*{suffix}' for suffix in suffixes)}",
        )
    return files


def _walk(base: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(base, onerror=_refuse_to_list):
        yield from (Path(folder) / name for name in names)


def _refuse_to_list(error: OSError) -> None:
    raise DataError(f"cannot be listed: {error.strerror}", where=str(error.filename)) from error


def _hidden(relative: Path) -> bool:
    return any(part.startswith((".", "_")) for part in relative.parts)


def _matching_files(root: Path, pattern: Sequence[str]) -> list[Path]:
    where = str(Path(root, *pattern))
    if ".." in pattern:
        raise DataError("'..' cannot follow a wildcard", where=where, remedy="write the path without '..'")
    if not _is_folder(root):
        raise DataError(
            f"no file matches this pattern: there is no folder {root}",
            where=where,
            remedy="create the folder, or correct the path",
        )
    matches = list(_match(root, tuple(pattern)))
    files = [path for path in matches if is_file(path)]
    if not files:
        folders = len(set(matches))
        raise DataError(
            "no file matches this pattern",
            where=where,
            remedy=f"append /*.parquet: the pattern matches {folders} folder{'s' * (folders > 1)}"
            if folders
            else f"correct the pattern ({root} exists; `**` stands for any number of folders)",
        )
    return files


def _match(folder: Path, pattern: tuple[str, ...]) -> Iterator[Path]:
    """Yield what matches below `folder`: files and folders, some more than once."""
    if not pattern:
        yield folder
        return
    part, rest = pattern[0], pattern[1:]
    if part == _RECURSIVE:
        yield from _match_any_folders(folder, rest)
    elif not _has_wildcard(part):
        if data_exists(folder / part):
            yield from _match(folder / part, rest)
    elif _is_folder(folder):
        for name in _names_in(folder):
            if _fits(name, part):
                yield from _match(folder / name, rest)


def _match_any_folders(folder: Path, rest: tuple[str, ...]) -> Iterator[Path]:
    if not _is_folder(folder):
        return
    # A trailing `**` means all files below.
    below = rest or ("*",)
    yield from _match(folder, below)
    for name in _names_in(folder):
        path = folder / name
        # Links to folders are not followed, as below a folder: they can lead in a circle.
        if _fits(name, "*") and _is_folder(path) and not path.is_symlink():
            yield from _match_any_folders(path, below)


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise DataError(f"cannot be listed: {error.strerror}", where=str(folder)) from error


def _has_wildcard(part: str) -> bool:
    return re.search(r"[*?[]", part) is not None


def _fits(name: str, part: str) -> bool:
    hidden = name.startswith((".", "_")) and name[0] != part[0]
    return not hidden and fnmatch.fnmatchcase(name, part)
