"""A place where a run's files lie: a folder on a file system, or a prefix on an object store.

What is written is whole and durable when the call returns, or not there; what is created is there once, whoever else
tries. The rest of the platform knows no other way to keep anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote

from raytrain_plus.address import refuse_credentials
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


SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""What the address of a folder can begin with."""


def open_folder(where: str | Path) -> Folder:
    """Return the folder at a path or an address, such as `s3://bucket/runs`; it need not exist.

    Raises `InputError` if the kind of address is unknown, or if the address contains a credential.
    """
    text = str(where)
    refuse_credentials(text)
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


def is_address(where: str | Path) -> bool:
    """Whether it is an address, and no path."""
    return "://" in str(where)


def within(where: str | Path, name: str) -> str:
    """The path or address of what has this name in a folder.

    >>> within("s3://bucket/runs/?region=eu-west-1", "digits")
    's3://bucket/runs/digits?region=eu-west-1'
    """
    if not is_address(where):
        return str(Path(where, name))
    scheme, place, settings = _parted(str(where))
    return f"{scheme}://{place}/{quote(check_name(name))}{settings}"


def split(where: str | Path) -> tuple[str, str]:
    """The folder in which a folder lies, as a path or address, and its name there; what `within` puts together.

    >>> split("s3://bucket/runs/digits?region=eu-west-1")
    ('s3://bucket/runs?region=eu-west-1', 'digits')
    """
    if not is_address(where):
        path = Path(os.path.abspath(where))
        return str(path.parent), path.name
    scheme, place, settings = _parted(str(where))
    above, _, name = place.rpartition("/")
    return f"{scheme}://{above or '/'}{settings}", unquote(name)


def _parted(address: str) -> tuple[str, str, str]:
    """Scheme, place and settings; the last with the mark that they begin with."""
    scheme, _, rest = address.partition("://")
    place, settings = re.findall("([^?#]*)(.*)", rest, re.DOTALL)[0]
    return scheme, place.rstrip("/"), settings
