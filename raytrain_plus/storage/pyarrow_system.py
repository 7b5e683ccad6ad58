"""Open what an address names as a file system of pyarrow: data of every kind, and the runs' folders on HDFS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyarrow import fs

from raytrain_plus.errors import StorageError
from raytrain_plus.storage.address import invalid_address
from raytrain_plus.storage.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S


def open_system(where: str) -> tuple[fs.FileSystem, str]:
    """Return the file system that an address names, on S3 with our time limits, and the address's path in it.

    Raises `InputError` if the address is invalid, `OSError` if its store cannot be reached.
    """
    shown = where.partition("?")[0]
    with told_by_pyarrow(f"{shown} could not be opened"):
        try:
            system, path = fs.FileSystem.from_uri(where)
        except (ValueError, NotImplementedError) as error:
            raise invalid_address(shown, str(error).replace(where, shown)) from None
    if system.type_name == "s3":
        limits = {"connect_timeout": CONNECT_TIMEOUT_S, "request_timeout": REQUEST_TIMEOUT_S}
        system = fs.S3FileSystem(**{**system_settings(system), **limits})
    return system, path


def system_settings(system: fs.FileSystem) -> dict[str, Any]:
    """Return the settings of an object store's file system; the region of a bucket on S3 is found if none was given."""
    _, (settings,) = system.__reduce__()
    return {**settings, "region": system.region} if system.type_name == "s3" else settings


@contextlib.contextmanager
def told_by_pyarrow(failure: str) -> Iterator[None]:
    """Turn the errors of pyarrow into a `StorageError` that begins with `failure`.

    The cause is not chained: logs would show its unmodified text, which may contain an address with credentials.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{failure}: it does not exist") from None
    except (OSError, pa.ArrowException) as error:
        why = str(error).partition("\n")[0]
        raise StorageError(f"{failure}: {why}") from None
