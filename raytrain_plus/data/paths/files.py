"""Find the files that a data path names: one file, those of its format below a folder, or the matches of a pattern."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from raytrain_plus.data.paths.file_tree import Tree, check_apart, check_no_circle, is_hidden, tree_of
from raytrain_plus.errors import DataError
from raytrain_plus.storage.place import Place, RemotePath, is_utf8

_RECURSIVE = "**"
"""The part of a pattern that matches any number of folders, also none."""


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The files that a data path names."""

    root: Place
    """The folder that `names` are relative to: as much of the path as has no wildcards, or the folder of a file."""
    names: tuple[str, ...]
    """Paths relative to `root`, sorted, with slashes."""
    places: tuple[Place, ...]
    """The same files, below `root`; remote ones with what a listing has said about them."""


def find_files(path: Place, suffixes: Sequence[str] = (".parquet",), kind: str = "Parquet") -> DataFiles:
    """Return the files that an absolute path, or a remote one, names.

    That is the file itself; every file below a folder whose name ends in one of `suffixes`, which are those of that
    `kind`; or the files that match a pattern. Names with a leading . or _ are ignored, unless the pattern spells that
    character. Links are followed. Raises `DataError` if there are none, or a folder cannot be listed, or a link leads
    to nothing: a file that is overlooked would be a silent loss of rows. Also for a file that is reached by two ways.
    """
    tree = tree_of(path)
    root, pattern = _split_pattern(tree, path)
    if pattern:
        return _found(tree, root, _matching_files(tree, root, pattern))
    if tree.kind(path) == "file":
        return _found(tree, path.parent, [path])
    if tree.kind(path) is None:
        raise _missing(tree, path)
    return _found(tree, path, _files_below(tree, path, suffixes, kind))


def names_below(folder: Place) -> list[str]:
    """Return the names of all files below a folder that are not hidden; none if it is no folder."""
    tree = tree_of(folder)
    return [file.name for file in tree.walk(folder)] if tree.kind(folder) == "folder" else []


def split_pattern(path: Place) -> tuple[Place, tuple[str, ...]]:
    """Split a path before its first part with a wildcard (`*`, `?` or `[`); the second half is empty if it has none.

    A part that exists as it is spelled is taken literally, so a folder may be called `data[1]`.
    """
    return _split_pattern(tree_of(path), path)


def _split_pattern(tree: Tree, path: Place) -> tuple[Place, tuple[str, ...]]:
    at = path.parents[-1] if path.parents else path
    parts = path.relative_to(at).parts  # type: ignore[arg-type]
    for number, part in enumerate(parts):
        if _has_wildcard(part) and tree.kind(at / part) is None:
            return at, parts[number:]
        at /= part
    return path, ()


def data_exists(path: Place) -> bool:
    """Return whether anything is at `path`. Raises `DataError` if `path` cannot be accessed."""
    return tree_of(path).kind(path) is not None


def is_file(path: Place) -> bool:
    """Return whether a regular file is at `path`. Raises `DataError` if `path` cannot be accessed."""
    return tree_of(path).kind(path) == "file"


def _found(tree: Tree, root: Place, files: Sequence[Place]) -> DataFiles:
    names = sorted({_below(file, root).as_posix() for file in files})
    if isinstance(root, Path):
        for file in files:
            if not is_utf8(file):
                raise DataError("the name is not UTF-8 text", where=str(file), remedy="rename the file or folder")
        check_apart(root, [root / name for name in names])
    return DataFiles(root, tuple(names), tuple(tree.found(root / name) for name in names))


def _below(path: Place, root: Place) -> PurePath:
    return path.relative_to(root)  # type: ignore[arg-type]


def _missing(tree: Tree, path: Place) -> DataError:
    parent = next((parent for parent in path.parents if tree.kind(parent) is not None), None)
    if not isinstance(path, RemotePath):
        how = f"create it, correct the path ({parent} exists), or set data.prepare to a function that writes it"
    else:
        how = f"correct the address ({f'{parent} exists' if parent else f'{path.store} does not exist'})"
    return DataError("there is no such file or folder", where=str(path), remedy=how)


def _files_below(tree: Tree, folder: Place, suffixes: Sequence[str], kind: str) -> list[Place]:
    seen = list(tree.walk(folder))
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


def _matching_files(tree: Tree, root: Place, pattern: Sequence[str]) -> list[Place]:
    where = str(root.joinpath(*pattern))
    if ".." in pattern:
        raise DataError("'..' cannot follow a wildcard", where=where, remedy="write the path without '..'")
    if tree.kind(root) != "folder":
        raise DataError(
            f"no file matches this pattern: there is no folder {root}",
            where=where,
            remedy="create the folder, or correct the path",
        )
    matches = list(_match(tree, root, tuple(pattern)))
    files = [path for path in matches if tree.kind(path) == "file"]
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


def _match(tree: Tree, folder: Place, pattern: tuple[str, ...]) -> Iterator[Place]:
    """Yield what matches below `folder`: files and folders, some more than once."""
    if not pattern:
        yield folder
        return
    part, rest = pattern[0], pattern[1:]
    if part == _RECURSIVE:
        yield from _match_any_folders(tree, folder, rest)
    elif not _has_wildcard(part):
        if tree.kind(folder / part) is not None:
            yield from _match(tree, folder / part, rest)
    elif tree.kind(folder) == "folder":
        for name in tree.names(folder):
            if _fits(name, part):
                yield from _match(tree, folder / name, rest)


def _match_any_folders(tree: Tree, folder: Place, rest: tuple[str, ...]) -> Iterator[Place]:
    if tree.kind(folder) != "folder":
        return
    # A trailing `**` means all files below.
    below = rest or ("*",)
    yield from _match(tree, folder, below)
    for name in tree.names(folder):
        path = folder / name
        if _fits(name, "*") and tree.kind(path) == "folder":
            if isinstance(path, Path):
                check_no_circle(path, path.parents[-1])
            yield from _match_any_folders(tree, path, below)


def _has_wildcard(part: str) -> bool:
    return re.search(r"[*?[]", part) is not None


def _fits(name: str, part: str) -> bool:
    hidden = is_hidden(name) and name[0] != part[0]
    return not hidden and fnmatch.fnmatchcase(name, part)
