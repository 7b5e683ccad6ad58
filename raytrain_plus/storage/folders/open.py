"""Open the storage folder at a path or an address."""

from __future__ import annotations

from pathlib import Path

from raytrain_plus.storage.address import refuse_credentials
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder


def open_folder(where: str | Path) -> Folder:
    """Return the folder at a path or an address, such as `s3://bucket/runs`; it need not exist.

    Raises `InputError` if the kind of address is unknown, or if the address contains a credential.
    """
    text = str(where)
    refuse_credentials(text)
    if "://" not in text:
        return LocalFolder(Path(text).absolute())
    # The libraries of remote storage load slowly, and most runs do not need them.
    from raytrain_plus.storage.folders.remote import open_remote

    return open_remote(text)
