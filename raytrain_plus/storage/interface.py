"""A place where a run's files lie: a folder on a file system, or a prefix on an object store.

What is written is whole and durable when the call returns, or not there; what is created is there once, whoever else
tries. The rest of the platform knows no other way to keep anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview | Any
"""Something with memory: bytes, or an array of them."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What is known of a file without reading it."""

    bytes: int
    time: float
    """Of its last change, in Unix seconds."""


class Folder(Protocol):
    """Files by name; names are relative paths with slashes.

    Failures of the storage are raised as `OSError`; a name or a link that leads out of the folder as `InputError`.
    """

    where: str
    """Its path or address, as it may be shown."""
    address: str
    """What `open_folder` takes to open it again."""
    exclusive: bool
    """Whether `create` is certain, as the kind of storage promises it: of two that create a name at once, one fails."""

    @property
    def path(self) -> Path | None:
        """Where it lies on a file system of this machine, whose files can grow; None where it does not."""

    def path_of(self, name: str) -> Path | None:
        """Where a file lies on a file system of this machine, there or not; None where it lies on none."""

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        """Writes a file out of its pieces, in place of an earlier one."""

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file that is not there yet; whether it was not."""

    def read(self, name: str) -> bytes:
        """A whole file. Raises `FileNotFoundError` where it is not there."""

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fills `into` with a file's bytes from `start` on. Raises `OSError` where the file is shorter."""

    def files(self, under: str = "") -> Mapping[str, Stat]:
        """What lies under a folder of this one, however deep; nothing where there is no such folder."""

    def unfinished(self, under: str = "") -> Mapping[str, Stat]:
        """The same for files that were begun and are none yet: those of a writer that was killed stay."""

    def remove(self, name: str) -> None:
        """Removes a file, or everything under a folder; what is not there is no error."""

    def move(self, to: str) -> None:
        """Gives the folder another name beside the one that it has. Raises `FileExistsError` where that is taken."""

    def inside(self, name: str) -> Folder:
        """A folder of this one; it need not be there."""

    def existing(self) -> Folder:
        """The same folder, which was made before: on a file system, a write raises `FileNotFoundError` if it is gone.

        Object stores have no folders to make.
        """
