"""A place where a run's files lie: a folder on a file system, or a prefix on an object store.

What is written is whole and durable when the call returns, or not there; what is created is there once, whoever else
tries. The rest of the platform knows no other way to keep anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from raytrain_plus.errors import InputError

Buffer = bytes | bytearray | memoryview | Any
"""Something with memory: bytes, or an array of them."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What is known of a file without reading it."""

    bytes: int
    time: float
    """Of its last change, in Unix seconds."""


class Folder(Protocol):
    """Files by name; names are relative paths with slashes. Failures of the storage are raised as `OSError`."""

    where: str
    """Its path or address."""
    exclusive: bool
    """Whether `create` is certain: of two that create the same name at the same moment, one fails."""

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

    def remove(self, name: str) -> None:
        """Removes a file, or everything under a folder; what is not there is no error."""

    def move(self, to: str) -> None:
        """Gives the folder another name beside the one that it has."""

    def inside(self, name: str) -> Folder:
        """A folder of this one; it need not be there."""


def open_folder(where: str | Path) -> Folder:
    """The folder at a path or an address, such as `s3://bucket/runs`; it need not be there.

    Raises `InputError` where nothing of that kind is known.
    """
    text = str(where)
    if "://" not in text:
        from raytrain_plus.storage.local import LocalFolder

        return LocalFolder(Path(text).absolute())
    from raytrain_plus.storage.remote import open_remote

    return open_remote(text)


def check_name(name: str) -> str:
    """`name`, where it stays inside its folder. Raises `InputError` for others."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{name!r} is no name of a file inside a run's folder", where="name")
    return name
