"""A run's folder: whether a job may use it, and the lease of who does."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path

from raytrain_plus.errors import InputError
from raytrain_plus.job import Job
from raytrain_plus.result import Result

LEASE_S = 10.0
"""Seconds after its last renewal for which a lease holds."""


def check_writable(storage: Path) -> None:
    """Makes the storage folder and tries it. Raises `InputError` where nothing can be written there."""
    try:
        storage.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=storage, prefix=".probe-"):
            return
    except OSError as error:
        raise InputError(
            f"the storage folder cannot be written: {error.strerror}",
            where=f"storage: {storage}",
            remedy="choose another folder (--set storage=...), or mend its permissions or space",
        ) from error


def earlier_result(folder: Path, job: Job, fresh: bool) -> Result | None:
    """The result of the same, finished job in `folder`; None where the job may start there, or is to start `fresh`.

    Raises `InputError` where a living run, an unfinished one or another job's is in the way. A lease that nobody renews
    is waited for.
    """
    if not folder.exists():
        return None
    where = f"run folder {folder}"
    holder = _living(folder)
    if holder is not None:
        raise InputError(
            f"a run of this name is going on ({holder})",
            where=where,
            remedy="wait for it or stop it, or give this one another name (--set name=...)",
        )
    if fresh:
        return None
    result = Result.load(folder)
    if result is None or result.status != "finished":
        state = "did not finish" if result is None else result.status
        raise InputError(
            f"a run of this name is there already ({state})",
            where=where,
            remedy="--fresh moves it aside and starts over; or give this one another name (--set name=...)",
        )
    differing = job.same_as(folder / "job.yaml")
    if differing:
        raise InputError(
            f"another job's run of this name is there already; they differ in {', '.join(differing)}",
            where=where,
            remedy="--fresh moves it aside; or give this one another name (--set name=...)",
        )
    return result


def find_run(name: str, storage: str) -> Path:
    """A run's folder, by its path or by its name under `storage`. Raises `InputError` where there is none."""
    places = (Path(name), Path(storage) / name)
    for place in places:
        if (place / "job.yaml").exists():
            return place
    raise InputError(
        f"there is no run '{name}'",
        where=" and ".join(str(place) for place in places),
        remedy="name a run's folder, or say with --storage where it lies",
    )


def claim(folder: Path, fresh: bool) -> None:
    """Makes way for a new run in `folder`: with `fresh` an earlier run's folder is moved aside.

    Raises `InputError` where another run came in the meantime.
    """
    if not folder.exists():
        return
    holder = lease_holder(folder)
    if holder is not None or not fresh:
        raise InputError(
            f"another run of this name has begun in the meantime ({holder or 'and ended'})",
            where=f"run folder {folder}",
            remedy="give this one another name (--set name=...), or start it again",
        )
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(folder.stat().st_mtime))
    aside = folder.with_name(f"{folder.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{stamp}.{number}")
    folder.rename(aside)


class Lease:
    """Says in a run's folder that somebody holds it; renewed by its holder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "lease.json"
        self._renewed = 0.0

    def renew(self) -> None:
        """Writes the lease, unless it was written a moment ago."""
        if time.monotonic() - self._renewed < LEASE_S / 5:
            return
        self._renewed = time.monotonic()
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({"time": time.time(), "pid": os.getpid(), "host": socket.gethostname()}))
        part.replace(self._file)

    def release(self) -> None:
        """Gives the folder up."""
        self._file.unlink(missing_ok=True)


def _living(folder: Path) -> str | None:
    """Who holds the folder and renews its lease; None where nobody does, or where the lease ends without a renewal."""
    first = _lease(folder)
    deadline = time.monotonic() + LEASE_S
    while lease_holder(folder) is not None:
        if _lease(folder) != first or time.monotonic() > deadline:
            return lease_holder(folder)
        time.sleep(LEASE_S / 100)
    return None


def _lease(folder: Path) -> str:
    try:
        return (folder / "lease.json").read_text()
    except FileNotFoundError:
        return ""


def lease_holder(folder: Path) -> str | None:
    """Who holds the folder, or None. A lease that its holder stopped renewing ends after `LEASE_S`."""
    file = folder / "lease.json"
    try:
        lease = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    age = time.time() - lease["time"]
    if age > LEASE_S:
        return None
    return f"process {lease['pid']} on {lease['host']}, renewed {max(0.0, age):.0f} s ago"
