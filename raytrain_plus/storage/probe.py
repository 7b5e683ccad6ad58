"""Check that another machine sees the same storage and can write to it: one writes a file, the other looks for it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from raytrain_plus.errors import InputError
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder


@dataclass(frozen=True, slots=True)
class Probe:
    """A file that was written to a folder for other machines to find."""

    where: str
    """Path or address of the folder, as `open_folder` takes it."""
    name: str
    content: bytes
    """Random bytes that no other probe has."""


@contextlib.contextmanager
def leave_probe(storage: Folder, name: str) -> Iterator[Probe]:
    """Keep a probe in `storage` while the context is open; `name` identifies it. Raises `OSError` if writing fails."""
    probe = Probe(storage.address, f".probe-{name}", secrets.token_hex(8).encode())
    storage.write(probe.name, [probe.content])
    try:
        yield probe
    finally:
        # If the storage has failed meanwhile the file stays, and the next probe of this name replaces it. It may be
        # replaced already, if this run's holder was taken for dead: then the file is another's, and stays.
        with contextlib.suppress(OSError):
            if storage.read(probe.name) == probe.content:
                storage.remove(probe.name)


def find_probe_fault(probe: Probe) -> str:
    """Return what is wrong with the storage as seen from this machine; empty if nothing is."""
    try:
        storage = open_folder(probe.where)
        if storage.read(probe.name) != probe.content:
            return "sees a different directory at this path"
        keeps_others_out(storage)
    except FileNotFoundError:
        return "sees a different directory, or none, at this path"
    except OSError as error:
        return f"cannot write to this path: {error.strerror or error}"
    return ""


def refusal(machine: str, fault: str, storage: str) -> InputError:
    """Return the error for a machine on which `find_probe_fault` found a fault."""
    return InputError(
        f"the machine {machine} {fault}",
        where=f"storage: {storage}",
        expected="a folder that every machine can read and write: the absolute path of a share, or an address",
        remedy="set another storage, for example --set storage=s3://BUCKET/runs",
    )


def keeps_others_out(folder: Folder) -> bool:
    """Return whether creating an existing file fails in this folder, by trying it.

    Raises `OSError` if a file cannot be created or removed.
    """
    name = f".probe-{secrets.token_hex(4)}"
    folder.create(name, b"one")
    kept = not folder.create(name, b"another")
    folder.remove(name)
    return kept
