"""Look around in a tree of files, on this machine or in remote storage: what is at a path, in a folder, below it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from typing_extensions import override

from raytrain_plus.errors import DataError, first_line
from raytrain_plus.storage.place import Place, RemotePath, StoreEntry

Kind = Literal["file", "folder", "other"]


class Tree(Protocol):
    """Raises `DataError` if a path cannot be accessed, or a folder cannot be listed."""

    def kind(self, path: Place) -> Kind | None:
        """Return what is at a path; None if nothing is."""

    def names(self, folder: Place) -> list[str]:
        """Return the names in a folder."""

    def walk(self, folder: Place, *, hidden: bool = False) -> Iterator[Place]:
        """Yield the files below a folder, also those behind links; `hidden`: also names with a leading . or _."""

    def found(self, file: Place) -> Place:
        """Return a file with what this tree knows of it."""


def tree_of(path: Place) -> Tree:
    """Return the tree that a path belongs to."""
    return RemoteTree() if isinstance(path, RemotePath) else LocalTree()


class LocalTree(Tree):
    """See `Tree`."""

    @override
    def kind(self, path: Place) -> Kind | None:
        assert isinstance(path, Path)
        # `Path.exists` raises some errors and treats others as absence; which ones depends on Python's version.
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                raise DataError(
                    f"is a link to nothing: there is no {os.readlink(path)}",
                    where=str(path),
                    remedy="remove the link, or put back what it leads to",
                ) from None
            return None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(f"cannot be accessed: {reason}", where=str(path)) from error
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"

    @override
    def names(self, folder: Place) -> list[str]:
        assert isinstance(folder, Path)
        try:
            return os.listdir(folder)
        except OSError as error:
            raise DataError(f"cannot be listed: {error.strerror}", where=str(folder)) from error

    @override
    def walk(self, folder: Place, *, hidden: bool = False) -> Iterator[Place]:
        assert isinstance(folder, Path)
        for inside, below, names in os.walk(str(folder), onerror=_refuse_to_list, followlinks=True):
            below[:] = [name for name in below if hidden or not is_hidden(name)]
            for name in below:
                check_no_circle(Path(inside, name), folder)
            for name in names:
                if (hidden or not is_hidden(name)) and self.kind(file := Path(inside, name)) == "file":
                    yield file

    @override
    def found(self, file: Place) -> Place:
        return file


class RemoteTree(Tree):
    """See `Tree`. Remembers what listings say: asking for each file on its own would be a round trip each."""

    def __init__(self) -> None:
        self._known: dict[RemotePath, StoreEntry | None] = {}

    @override
    def kind(self, path: Place) -> Kind | None:
        entry = self._entry(path)
        return None if entry is None else "file" if entry.is_file else "folder"

    @override
    def names(self, folder: Place) -> list[str]:
        return [one.name for one in self._listed(folder, recursive=False)]

    @override
    def walk(self, folder: Place, *, hidden: bool = False) -> Iterator[Place]:
        for one in self._listed(folder, recursive=True):
            below = one.relative_to(folder).parts
            if one.entry and one.entry.is_file and (hidden or not any(map(is_hidden, below))):
                yield one

    @override
    def found(self, file: Place) -> Place:
        assert isinstance(file, RemotePath)
        return RemotePath(file.store, file.parts, file.settings, self._entry(file))

    def _entry(self, path: Place) -> StoreEntry | None:
        assert isinstance(path, RemotePath)
        if path not in self._known:
            try:
                self._known[path] = path.look()
            except OSError as error:
                raise DataError(f"cannot be accessed: {first_line(error)}", where=str(path)) from error
        return self._known[path]

    def _listed(self, folder: Place, *, recursive: bool) -> list[RemotePath]:
        assert isinstance(folder, RemotePath)
        try:
            found = folder.listed(recursive=recursive)
        except OSError as error:
            raise DataError(f"cannot be listed: {first_line(error)}", where=str(folder)) from error
        self._known |= {one: one.entry for one in found}
        return found


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is not to be seen unless somebody spells its name."""
    return name.startswith((".", "_"))


def check_no_circle(folder: Path, top: Path) -> None:
    """Raise `DataError` if a folder below `top` is a link to one of those that it is in."""
    if folder.is_symlink():
        for above in [one for one in folder.parents if one == top or top in one.parents]:
            if above.samefile(folder):
                raise DataError(
                    f"leads in a circle: it is a link to {above}", where=str(folder), remedy="remove the link"
                )


def check_apart(root: Path, files: Sequence[Path]) -> None:
    """Raise `DataError` if two of these files, below `root`, are one by a link: its rows would count twice.

    Two links to a file outside are two: stores that name files by their content keep equal ones once.
    """
    inside = root.resolve()
    folders = {folder: folder.resolve() for folder in {file.parent for file in files}}
    found: dict[Path, Path] = {}
    for file in files:
        _note(found, folders[file.parent] / file.name, file)
    for file in files:
        at = folders[file.parent] / file.name
        while at.is_symlink():
            to = at.parent / at.readlink()
            at = to.parent.resolve() / to.name
            # A file of the data, or one inside that is none, as a hidden one: then two links to it are one file.
            if at in found or inside in at.parents:
                _note(found, at, file)


def _note(found: dict[Path, Path], at: Path, file: Path) -> None:
    """Note that a file is at a place. Raises `DataError` if another is already."""
    if (other := found.setdefault(at, file)) is not file:
        raise DataError(
            f"is the same file as {other}, by a link, so its rows would count twice",
            where=str(file),
            remedy="remove the link",
        )


def links_below(root: Path, files: Iterable[Path]) -> list[str]:
    """Return the links to folders below `root` through which these files are reached, by their names below it."""
    folders = {one for file in files for one in file.parents if root in one.parents}
    return sorted(one.relative_to(root).as_posix() for one in folders if one.is_symlink())


def _refuse_to_list(error: OSError) -> None:
    raise DataError(f"cannot be listed: {error.strerror}", where=str(error.filename)) from error
