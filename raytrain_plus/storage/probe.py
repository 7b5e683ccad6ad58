"""Whether another machine sees the same storage, and may write there: one leaves a file, and the other looks for it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from raytrain_plus.errors import InputError
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.open import open_folder


@dataclass(frozen=True, slots=True)
class Probe:
    """A file that was left in a folder."""

    where: str
    """The folder, as `open_folder` takes it."""
    name: str
    content: bytes
    """As nobody else has written it."""


@contextlib.contextmanager
def left(storage: Folder, name: str) -> Iterator[Probe]:
    """One that lies there meanwhile; `name` tells it from those of others. Raises `OSError` where it cannot be left."""
    probe = Probe(storage.address, f".probe-{name}", secrets.token_hex(8).encode())
    storage.write(probe.name, [probe.content])
    try:
        yield probe
    finally:
        # A storage that has failed meanwhile keeps it: the next one of this name takes its place. One that did so
        # already, as who had the run was taken for dead, has left its own.
        with contextlib.suppress(OSError):
            if storage.read(probe.name) == probe.content:
                storage.remove(probe.name)


def amiss_with(probe: Probe) -> str:
    """What is amiss with the storage as this machine sees it; empty where nothing is."""
    try:
        storage = open_folder(probe.where)
        if storage.read(probe.name) != probe.content:
            return "has another folder there"
        keeps_others_out(storage)
    except FileNotFoundError:
        return "has another folder there, or none"
    except OSError as error:
        return f"cannot write there: {error.strerror or error}"
    return ""


def refusal(machine: str, fault: str, storage: str) -> InputError:
    """What is told of a machine with such a fault."""
    return InputError(
        f"the machine {machine} {fault}",
        where=f"storage: {storage}",
        expected="a folder that all machines of the cluster see and may write: a share's absolute path, or an address",
        remedy="--set storage=s3://BUCKET/runs, say",
    )


def keeps_others_out(folder: Folder) -> bool:
    """Whether of two that create the same file there the second fails, as it is tried.

    Raises `OSError` where nothing can be created, or removed.
    """
    tried = f".probe-{secrets.token_hex(4)}"
    folder.create(tried, b"one")
    kept = not folder.create(tried, b"another")
    folder.remove(tried)
    return kept
