"""Define `Folder`, the interface to a run's files: a folder on a file system, or a prefix on an object store.

When `write` returns, the file is whole and durable; if it fails, the file is unchanged. Of several concurrent `create`
calls of one name, only one succeeds. The rest of the platform keeps files through this interface only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview | Any
"""An object with the buffer protocol: bytes, or an array."""


@dataclass(frozen=True, slots=True)
class Stat:
    """Size and time of a file, known without reading it."""

    bytes: int
    time: float
    """Time of the last change, in Unix seconds."""


class Folder(Protocol):
    """A folder of files; names are relative paths with slashes.

    Raises `OSError` if the storage fails, `InputError` for a name or a link that points outside the folder.
    """

    where: str
    """Its path or address, in a form that may be shown."""
    address: str
    """The path or address with which `open_folder` opens it again."""
    exclusive: bool
    """Whether this kind of storage promises that of two concurrent `create` calls of a name one fails."""

    @property
    def path(self) -> Path | None:
        """Return its path on a file system of this machine, whose files can grow; None if it has none."""

    def path_of(self, name: str) -> Path | None:
        """Return the path of a file, existing or not, on a file system of this machine; None if it has none."""

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        """Write a file from its pieces; replaces an existing one."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that does not exist yet. Return False if it exists, and leave it unchanged."""

    def read(self, name: str) -> bytes:
        """Return the bytes of a file. Raises `FileNotFoundError` if it does not exist."""

    def read_into(self, name: str, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `start`. Raises `OSError` if the file is too short."""

    def files(self, under: str = "") -> Mapping[str, Stat]:
        """Return all files under a subfolder, recursively; an empty mapping if it does not exist."""

    def unfinished(self, under: str = "") -> Mapping[str, Stat]:
        """Return the unfinished files under a subfolder, which a killed writer leaves behind."""

    def remove(self, name: str) -> None:
        """Remove a file, or everything under a folder; a missing one is not an error."""

    def move(self, to: str) -> None:
        """Rename the folder inside its parent. Raises `FileExistsError` if the name is taken."""

    def inside(self, name: str) -> Folder:
        """Return a subfolder; it need not exist."""

    def existing(self) -> Folder:
        """Return the same folder, but one that writes do not create: they raise `FileNotFoundError` if it is gone.

        This has no effect on object stores, which have no folders to create.
        """
