"""Open the storage folder at a path or an address."""

from __future__ import annotations

from pathlib import Path

from raytrain_plus.storage.address import invalid_address, refuse_credentials
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.folders.store_address import STORES, store_address
from raytrain_plus.storage.interface import Folder


def open_folder(where: str | Path) -> Folder:
    """Return the folder at a path or an address, such as `s3://bucket/runs`; it need not exist.

    The address can carry pyarrow's settings but no credentials: these come from the environment. Raises `InputError` if
    the address is invalid or contains a credential, `OSError` if its store cannot be opened.
    """
    text = str(where)
    refuse_credentials(text)
    if "://" not in text:
        return LocalFolder(Path(text).absolute())
    # The libraries of remote storage load slowly, and most runs do not need them.
    from raytrain_plus.storage.pyarrow_system import open_system, system_settings

    system, path = open_system(text)
    if system.type_name == "local":
        return LocalFolder(Path(path))
    parts = path.rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in (parts if system.type_name in STORES else parts[1:])):
        raise invalid_address(text.partition("?")[0], "its path is empty, or has an empty part, '.' or '..'")
    if system.type_name not in STORES:
        from raytrain_plus.storage.folders.hdfs import HdfsFolder

        return HdfsFolder(system, "/".join(parts), text)
    from raytrain_plus.storage.folders.objects import ObjectFolder
    from raytrain_plus.storage.folders.store_client import open_store

    place = store_address(system.type_name, "/".join(parts), system_settings(system))
    return ObjectFolder(open_store(place), place.path, text)
