"""Allow changes to a run's folder only while the claim of its controller is in it.

    mv runs/digits elsewhere    the claim moves with the folder: a writer to runs/digits finds no claim and stops

Without this check the next checkpoint would create `runs/digits` again, and a new run could not use the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from raytrain_plus.errors import FolderGone
from raytrain_plus.storage.interface import Buffer, Folder, Stat

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Claim:
    """A file that the newest controller of a run has created in the run's folder."""

    name: str
    content: bytes


class Guarded(Folder):
    """A `Folder` that calls `check` before each change, and again before a written file gets its name."""

    def __init__(self, folder: Folder, check: Callable[[], None]) -> None:
        self._folder = folder
        self._check = check
        self.where = folder.where
        self.address = folder.address
        self.exclusive = folder.exclusive

    @property
    @override
    def path(self) -> Path | None:
        return self._folder.path

    @override
    def path_of(self, name: str) -> Path | None:
        return self._folder.path_of(name)

    @override
    def write(self, name: str, data: Iterable[Buffer]) -> None:
        self._changed(lambda: self._folder.write(name, self._checked(data)))

    @override
    def create(self, name: str, data: bytes) -> bool:
        return self._changed(lambda: self._folder.create(name, data))

    @override
    def read(self, name: str) -> bytes:
        return self._folder.read(name)

    @override
    def read_into(self, name: str, start: int, into: memoryview) -> None:
        self._folder.read_into(name, start, into)

    @override
    def files(self, under: str = "") -> Mapping[str, Stat]:
        return self._folder.files(under)

    @override
    def unfinished(self, under: str = "") -> Mapping[str, Stat]:
        return self._folder.unfinished(under)

    @override
    def remove(self, name: str) -> None:
        self._changed(lambda: self._folder.remove(name))

    @override
    def move(self, to: str) -> None:
        self._changed(lambda: self._folder.move(to))

    @override
    def inside(self, name: str) -> Folder:
        return Guarded(self._folder.inside(name), self._check)

    @override
    def existing(self) -> Folder:
        return Guarded(self._folder.existing(), self._check)

    def _changed(self, change: Callable[[], T]) -> T:
        self._check()
        try:
            return change()
        except FileNotFoundError:
            # The folder may have disappeared between the check and the change.
            self._check()
            raise

    def _checked(self, data: Iterable[Buffer]) -> Iterator[Buffer]:
        yield from data
        # Producing the data may have taken a while.
        self._check()


class Claimed(Guarded):
    """A run's folder that, after `hold`, only the holder of the claim can change."""

    def __init__(self, folder: Folder, claim: Claim | None = None) -> None:
        super().__init__(folder, self._look)
        self.claim: Claim | None = None
        """None until `hold` is called."""
        if claim is not None:
            self.hold(claim)

    def hold(self, claim: Claim) -> None:
        """Make every later change raise `FolderGone` unless this claim is in the folder."""
        self._folder = self._folder.existing()
        self.claim = claim

    def _look(self) -> None:
        if self.claim is None:
            return
        try:
            if self._folder.read(self.claim.name) == self.claim.content:
                return
        except FileNotFoundError:
            pass
        raise FolderGone(f"the run's folder {self.where} was moved or removed, or now belongs to another run")
