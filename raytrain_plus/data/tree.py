"""Look around in a tree of files, on this machine or in remote storage: what is at a path, in a folder, below it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol

from raytrain_plus.errors import DataError, first_line
from raytrain_plus.storage.place import Entry, Place, RemotePath

Kind = Literal["file", "folder", "other"]


class Tree(Protocol):
    """Raises `DataError` if a path cannot be accessed, or a folder cannot be listed."""

    def kind(self, path: Place) -> Kind | None:
        """Return what is at a path; None if nothing is."""

    def names(self, folder: Place) -> list[str]:
        """Return the names in a folder."""

    def walk(self, folder: Place) -> Iterator[Place]:
        """Yield the files below a folder, hidden ones too."""

    def found(self, file: Place) -> Place:
        """Return a file with what this tree knows of it."""


def tree_of(path: Place) -> Tree:
    """Return the tree that a path belongs to."""
    return RemoteTree() if isinstance(path, RemotePath) else LocalTree()


class LocalTree:
    """See `Tree`."""

    def kind(self, path: Place) -> Kind | None:
        """See `Tree`."""
        assert isinstance(path, Path)
        # `Path.exists` raises some errors and treats others as absence; which ones depends on Python's version.
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DataError(f"cannot be accessed: {reason}", where=str(path)) from error
        return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"

    def names(self, folder: Place) -> list[str]:
        """See `Tree`."""
        assert isinstance(folder, Path)
        try:
            return os.listdir(folder)
        except OSError as error:
            raise DataError(f"cannot be listed: {error.strerror}", where=str(folder)) from error

    def walk(self, folder: Place) -> Iterator[Place]:
        """See `Tree`."""
        for inside, _, names in os.walk(str(folder), onerror=_refuse_to_list):
            yield from (file for name in names if self.kind(file := Path(inside, name)) == "file")

    def found(self, file: Place) -> Place:
        """See `Tree`."""
        return file


class RemoteTree:
    """See `Tree`. Remembers what listings say: asking for each file on its own would be a round trip each."""

    def __init__(self) -> None:
        self._known: dict[RemotePath, Entry | None] = {}

    def kind(self, path: Place) -> Kind | None:
        """See `Tree`."""
        entry = self._entry(path)
        return None if entry is None else "file" if entry.is_file else "folder"

    def names(self, folder: Place) -> list[str]:
        """See `Tree`."""
        return [one.name for one in self._listed(folder, recursive=False)]

    def walk(self, folder: Place) -> Iterator[Place]:
        """See `Tree`."""
        yield from (one for one in self._listed(folder, recursive=True) if one.entry and one.entry.is_file)

    def found(self, file: Place) -> Place:
        """See `Tree`."""
        assert isinstance(file, RemotePath)
        return RemotePath(file.store, file.parts, file.settings, self._entry(file))

    def _entry(self, path: Place) -> Entry | None:
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


def _refuse_to_list(error: OSError) -> None:
    raise DataError(f"cannot be listed: {error.strerror}", where=str(error.filename)) from error
