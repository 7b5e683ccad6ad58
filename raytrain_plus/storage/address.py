"""Take apart and put together the paths and addresses of storage folders. Pure."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote, unquote

from raytrain_plus.credentials import REMEDY, credential_in, without_credentials
from raytrain_plus.errors import InputError

SCHEMES = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs")
"""Supported schemes of folder addresses."""


def refuse_credentials(address: str, where: str = "", remedy: str = REMEDY) -> None:
    """Raise `InputError` if an address contains a credential. `where` is the setting that holds the address."""
    if part := credential_in(address):
        shown = without_credentials(address, whole=True)
        place = f"{where}: {shown}" if where else shown
        raise InputError(f"the address contains a credential: {part}", where=place, remedy=remedy)


def check_name(name: str) -> str:
    """Return `name` if it stays inside its folder. Raises `InputError` if not."""
    parts = name.split("/")
    if not name or name.startswith("/") or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise InputError(f"{name!r} is not a valid name of a file inside a run's folder", where="name")
    return name


def invalid_address(shown: str, why: str) -> InputError:
    """Return the error for an invalid address of a folder; `shown` is the address without its settings."""
    return InputError(
        f"this is not a valid address of a folder{f' ({why})' if why else ''}",
        where=shown,
        expected="s3://bucket/path, gs://bucket/path, abfs://container@account.dfs.core.windows.net/path, "
        "hdfs://host:port/path, or a path",
        remedy="correct the address",
    )


def is_address(where: str | Path) -> bool:
    """Return whether `where` is an address and not a path."""
    return "://" in str(where)


def within(where: str | Path, name: str) -> str:
    """Return the path or address of the file or folder `name` inside the folder `where`.

    >>> within("s3://bucket/runs/?region=eu-west-1", "digits")
    's3://bucket/runs/digits?region=eu-west-1'
    """
    if not is_address(where):
        return str(Path(where, name))
    scheme, place, settings = _parted(str(where))
    return f"{scheme}://{place}/{quote(check_name(name))}{settings}"


def split(where: str | Path) -> tuple[str, str]:
    """Return the parent of a folder, as a path or address, and the folder's name in it: the inverse of `within`.

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
    """Return scheme, place and settings; the settings include the mark that they begin with."""
    scheme, _, rest = address.partition("://")
    place, settings = re.findall("([^?#]*)(.*)", rest, re.DOTALL)[0]
    return scheme, place.rstrip("/"), settings
