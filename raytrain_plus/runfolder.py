"""A run's folder: whether a job may use it, and the lease of who does."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from raytrain_plus.errors import InputError
from raytrain_plus.job import Job
from raytrain_plus.result import Result
from raytrain_plus.storage.folder import Folder, open_folder

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


def earlier_result(folder: Path, job: Job, fresh: bool, may_change: Collection[str] = ()) -> Result | None:
    """The result of the same, finished job in `folder`; None where the job may start or go on there.

    `fresh`: what is there will be moved aside. `may_change`: settings in which the job may differ from the one that
    began, beside those that no result depends on. Raises `InputError` where a living run or another job's is in the
    way. A lease that nobody renews is waited for.
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
    if not (folder / "job.yaml").exists():
        raise InputError(
            "a folder of this name is there, which is no run's: it has no job.yaml",
            where=where,
            remedy="move it away, or give this run another name (--set name=...)",
        )
    differing = [key for key in job.same_as(folder / "job.yaml") if key not in may_change]
    if differing:
        raise InputError(
            f"another job's run of this name is there already; they differ in {', '.join(differing)}",
            where=where,
            remedy="--fresh moves it aside; or give this one another name (--set name=...)",
        )
    result = Result.load(folder)
    done = result is not None and result.status == "finished" and "steps" not in job.same_as(folder / "job.yaml")
    return result if done else None


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


def claim(folder: Path, *, fresh: bool, claims: int | None) -> Fence:
    """Takes `folder` for a run: with `fresh` an earlier run's is moved aside.

    `claims`: how many controllers the run had, where it goes on; None where it begins. Raises `InputError` where
    another one came in the meantime.
    """
    if not folder.exists():
        return Fence(open_folder(folder), 0)
    holder = lease_holder(folder)
    if holder is not None or not (fresh or claims is not None):
        raise InputError(
            f"another run of this name has begun in the meantime ({holder or 'and ended'})",
            where=f"run folder {folder}",
            remedy="give this one another name (--set name=...), or start it again",
        )
    if not fresh and claims is not None:
        return Fence(open_folder(folder), claims)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(folder.stat().st_mtime))
    aside = folder.with_name(f"{folder.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = folder.with_name(f"{folder.name}.{stamp}.{number}")
    folder.rename(aside)
    return Fence(open_folder(folder), 0)


class Fence:
    """Of all controllers that ever had a run, the newest alone may write: each creates the next number's claim.

    A claim is created where none of its number is, which only one can; who finds a newer one stops.
    """

    def __init__(self, run: Folder, earlier: int) -> None:
        """`earlier`: how many claims there were when the run's past was read.

        Raises `InputError` where another controller came since.
        """
        self._run = run
        self._number = earlier + 1
        who = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "token": secrets.token_hex(8)}
        self._claim = json.dumps(who).encode()
        if not run.create(_claim_of(self._number), self._claim):
            raise InputError(
                f"another run of this name has begun in the meantime ({self._holder()})",
                where=f"run folder {run.where}",
                remedy="give this one another name (--set name=...), or start it again",
            )

    def overtaken(self) -> str | None:
        """Who has taken the run over, if anybody has. Raises `OSError` where the storage fails."""
        newest = claims_of(self._run)
        if newest == self._number and self._run.read(_claim_of(newest)) == self._claim:
            return None
        return self._holder()

    def _holder(self) -> str:
        newest = claims_of(self._run)
        if not newest:
            return "its folder was moved away"
        who = json.loads(self._run.read(_claim_of(newest)))
        return f"process {who['pid']} on {who['host']}"


def _claim_of(number: int) -> str:
    return f"claims/{number:08d}.json"


def claims_of(run: Folder) -> int:
    """How many controllers have claimed the run."""
    names = [name.removeprefix("claims/").removesuffix(".json") for name in run.files("claims")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


class Lease:
    """Says in a run's folder that somebody holds it; renewed by its holder."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "lease.json"
        self._renewed = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time to renew it."""
        return time.monotonic() - self._renewed > LEASE_S / 5

    def renew(self) -> None:
        """Writes the lease. Raises `OSError` where that is not possible."""
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
