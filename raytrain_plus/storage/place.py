"""Name files on this machine and in remote storage alike, and read the remote ones.

    s3://bucket/rows/part-*.parquet?region=eu-west-1        store s3://bucket, settings ?region=eu-west-1

A `?` begins the settings of an address only if a name and `=` follow; any other `?` is a wildcard. Percent-escapes are
decoded. A `RemotePath` holds no connection and can be pickled: each process opens a store when it first reads from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import unquote

import pyarrow as pa

from raytrain_plus.errors import InputError, StorageError, first_line
from raytrain_plus.storage.address import SCHEMES, is_address, refuse_credentials
from raytrain_plus.storage.retry import retry

if TYPE_CHECKING:
    from pyarrow import fs

T = TypeVar("T")
Item = TypeVar("Item")

REQUESTS = 16
"""Requests to a store at the same time: each is a round trip."""
_SETTINGS = re.compile(r"\?(?=[A-Za-z_]\w*=)")
_REFUSED = re.compile(r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|HTTP status 40[13]", re.I)
_PERMANENT = re.compile(r"NO_SUCH_|HTTP status 40[04]|CRC checksum|thrift|end of stream", re.I)
"""Parts of pyarrow's messages for what a second attempt does not change; it has no error types for them."""


class StoreEntry(NamedTuple):
    """The description of a name in a store."""

    is_file: bool
    """False for a folder."""
    size: int
    """Bytes."""
    modified_ns: int
    """Modification time in nanoseconds since 1970; 0 if the store has none."""


class _Permanent(Exception):
    """Carries an `OSError` past `retry`."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file, folder or pattern in remote storage; it need not exist. Its names and operators are those of `Path`.

    Methods that ask the store retry failures that may pass. They raise `FileNotFoundError`, `PermissionError` or
    another `OSError`, which is a `StorageError` after the last attempt.
    """

    store: str
    """Scheme and bucket, container or host: `s3://bucket`."""
    parts: tuple[str, ...]
    settings: str = ""
    """pyarrow's settings, with the `?` before them."""
    entry: StoreEntry | None = field(default=None, compare=False, repr=False)
    """Its description, if a listing has given one."""

    def __str__(self) -> str:
        """Return the address without its settings."""
        escaped = (part.replace("%", "%25") for part in self.parts)
        return "/".join([self.store, *(_SETTINGS.sub("%3F", part) for part in escaped)])

    @property
    def address(self) -> str:
        """The address with its settings; `place_of` turns it into this path again."""
        return f"{self}{self.settings}"

    @property
    def name(self) -> str:
        """The last part."""
        return self.parts[-1] if self.parts else self.store.partition("://")[2]

    @property
    def stem(self) -> str:
        """The last part without its suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The suffix of the last part, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parents(self) -> tuple[RemotePath, ...]:
        """The folders that contain it, from the nearest to the whole store."""
        return tuple(self._at(self.parts[:count]) for count in reversed(range(len(self.parts))))

    @property
    def parent(self) -> RemotePath:
        """The folder that contains it."""
        return self._at(self.parts[:-1])

    def __truediv__(self, name: str) -> RemotePath:
        return self.joinpath(name)

    def joinpath(self, *names: str) -> RemotePath:
        """Return the path of these names, one inside the other, below this one."""
        return self._at((*self.parts, *(part for name in names for part in name.split("/"))))

    def relative_to(self, folder: Path | RemotePath) -> PurePosixPath:
        """Return this path relative to a folder that contains it. Raises `ValueError` if it does not."""
        count = len(folder.parts)
        if not isinstance(folder, RemotePath) or folder.store != self.store or folder.parts != self.parts[:count]:
            raise ValueError(f"{self} is not below {folder}")
        return PurePosixPath(*self.parts[count:])

    def look(self) -> StoreEntry | None:
        """Ask the store what is there; None if nothing is."""

        def ask() -> StoreEntry | None:
            system, path = self._opened()
            return _entry_of(system.get_file_info(path))

        return _tried(ask)

    def listed(self, *, recursive: bool) -> list[RemotePath]:
        """Return what is in this folder, or anywhere below it, each with its `entry`."""

        def ask() -> list[RemotePath]:
            from pyarrow import fs

            system, path = self._opened()
            return [
                RemotePath(self.store, (*self.parts, *_below(path, info.path)), self.settings, entry)
                for info in system.get_file_info(fs.FileSelector(path, recursive=recursive))
                if (entry := _entry_of(info)) is not None
            ]

        return _tried(ask)

    def read(self, act: Callable[[pa.NativeFile], T]) -> T:
        """Open the file and return what `act` makes of it; called again if a read fails."""

        def ask() -> T:
            system, path = self._opened()
            with system.open_input_file(path) as opened:
                return act(opened)

        return _tried(ask)

    def read_text(self) -> str:
        """Return the text of a small file."""
        return self.read(lambda opened: bytes(opened.read()).decode())

    def _at(self, parts: tuple[str, ...]) -> RemotePath:
        return RemotePath(self.store, parts, self.settings)

    def _opened(self) -> tuple[fs.FileSystem, str]:
        system, top = _system(f"{self.store}/{self.settings}")
        return system, "/".join([top, *self.parts])


Place: TypeAlias = Path | RemotePath
"""A file, folder or pattern, on this machine or in remote storage."""


def is_utf8(path: Place) -> bool:
    """Return whether a path is UTF-8: Linux takes any bytes as a name, and Arrow, JSON and Ray's messages take text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def place_of(where: str | Place) -> Place:
    """Return the absolute path, or the remote one, that a path or an address names.

    Raises `InputError` if an address contains a credential, or is none that is supported.
    """
    if isinstance(where, RemotePath):
        return where
    if isinstance(where, Path) or not is_address(where):
        return Path(where).absolute()
    return _remote_place(where)


@lru_cache(64)
def _remote_place(address: str) -> Place:
    refuse_credentials(address)
    scheme, _, rest = address.partition("://")
    if scheme not in SCHEMES:
        # Not the whole address: it may hold a password.
        known = ", ".join(f"{one}://" for one in SCHEMES)
        raise InputError(f"unsupported address '{scheme}://...'", expected=f"a path, or {known}")
    found = _SETTINGS.search(rest)
    place, settings = (rest, "") if found is None else (rest[: found.start()], rest[found.start() :])
    if scheme == "file":
        return Path(unquote(place)).absolute()
    host, *parts = place.rstrip("/").split("/")
    parts = [unquote(part) for part in parts]
    if (not host and "hdfs" not in scheme) or any(part in ("", ".", "..") for part in parts):
        raise InputError(
            "this is not a valid address of data: it has no bucket, or an empty part, '.' or '..'",
            where=address.partition("?")[0],
            expected="an address such as s3://bucket/folder",
        )
    return RemotePath(f"{scheme}://{host}", tuple(parts), settings)


def spelled(place: Place) -> str:
    """Return the text that `place_of` turns into this place again."""
    return place.address if isinstance(place, RemotePath) else str(place)


def in_parallel(act: Callable[[Item], T], items: Sequence[Item]) -> Iterator[T]:
    """Yield what `act` returns for each item, in order: remote files are asked for several at a time."""
    # A thread for a single file would only cost time.
    if len(items) == 1 or not any(isinstance(item, RemotePath) for item in items):
        yield from map(act, items)
        return
    with ThreadPoolExecutor(REQUESTS, thread_name_prefix="remote-data") as pool:
        yield from pool.map(act, items)


@lru_cache(16)
def _system(root: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a whole store, and the store's path in it."""
    # It loads slowly, and most runs do not need it.
    from raytrain_plus.storage.pyarrow_system import open_system

    system, top = open_system(root)
    return system, top.rstrip("/")


def _entry_of(info: Any) -> StoreEntry | None:
    from pyarrow import fs

    if info.type == fs.FileType.NotFound:
        return None
    return StoreEntry(info.type == fs.FileType.File, info.size or 0, info.mtime_ns or 0)


def _below(folder: str, path: str) -> Iterable[str]:
    return path.removeprefix(folder).strip("/").split("/")


def _tried(ask: Callable[[], T]) -> T:
    def once() -> T:
        try:
            return ask()
        except OSError as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)):
                raise _Permanent(error) from None
            if _REFUSED.search(str(error)):
                raise _Permanent(PermissionError(f"permission denied: {first_line(error)}")) from None
            if _PERMANENT.search(str(error)):
                raise _Permanent(error) from None
            raise StorageError(first_line(error)) from None

    try:
        return retry(once)
    except _Permanent as permanent:
        raise permanent.error from None
