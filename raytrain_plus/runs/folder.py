"""A run's folder: check whether a job may use it, find runs, and hold the folder by claims and a lease.

A claim orders the controllers of a run: only the newest may write. The lease shows that its holder is alive.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from raytrain_plus.errors import InputError, JobError
from raytrain_plus.job.sameness import Kept, kept_settings
from raytrain_plus.job.settings import Job
from raytrain_plus.job.yaml import read_job
from raytrain_plus.result import Result
from raytrain_plus.runs.process import lives, this_process
from raytrain_plus.state.stored.manifest import FOLDER as CHECKPOINTS
from raytrain_plus.state.stored.manifest import parse_name
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import is_address, split, within
from raytrain_plus.storage.document import parse_object, read_object
from raytrain_plus.storage.folders.claimed import Claim
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.place import is_utf8
from raytrain_plus.storage.probe import keeps_others_out

JOB = "job.yaml"
"""File with the resolved job, in the run's folder."""
DATASET = "dataset.json"
"""File that describes the data at the start of the run, as in `Source.describe`."""
TASK = "task.json"
"""File with the digests of the task's source, by module, as the run was last started."""
CHANGED = "data_changed.json"
"""File that describes the original state of the data file whose change ended the run: `DataChanged.first`."""
MODEL = "model.safetensors"
"""File with the final weights."""
PICTURE = "pipeline.svg"
TRACE = "pipeline.json"
"""One step of a pipelined model: as a picture, and for trace viewers."""
PROFILE = "profile"
"""Folder with the traces of profiled steps, and `summary.json`, the table of their times."""
LEFT = "left"
"""Folder with what workers have left that ended because no controller came back: see `workers.states.leftover`."""
LEASE_S = 10.0
"""Seconds for which a lease is valid after its last renewal."""
LEASE = "lease.json"
CLAIMS = "claims"
_PID = has.whole(1, 2**31 - 1)
_CLAIM = has.object_of(pid=_PID, host=has.text)
_LEASE = has.object_of(time=has.number(0, 1e12), pid=_PID, host=has.text)


def check_writable(where: str | Path) -> Folder:
    """Return the storage folder at a path or address; create it and test that it can be written.

    Raises `InputError` if the path or address is invalid, or nothing can be written there.
    """
    shown = "" if is_address(where) else str(where)
    if not is_address(where) and not is_utf8(Path(where).absolute()):
        raise InputError(
            "the name of the storage folder is not UTF-8 text",
            where=f"storage: {Path(where).absolute()}",
            remedy="rename it, or choose another folder (--set storage=...)",
        )
    try:
        storage = open_folder(where)
        shown = storage.where
        # Tests the operations that a run needs. The answer is ignored: `raytrain status` reports if the storage cannot
        # keep a second controller out, and a run is still allowed then.
        keeps_others_out(storage)
        return storage
    except OSError as error:
        raise InputError(
            f"the storage folder cannot be written: {error.strerror or error}",
            where=f"storage: {shown}" if shown else "storage",
            remedy="choose another folder (--set storage=...), or fix its permissions or free space",
        ) from error


def run_exists(run: Folder) -> bool:
    """Return whether there is anything in a run's folder."""
    return bool(run.files())


def earlier_result(run: Folder, job: Job, fresh: bool, *, resumes: bool = False) -> Result | None:
    """Return the result if the same job has finished in `run`; None if the job may start or resume there.

    `fresh`: the existing contents will be moved aside. `resumes`: whether the job may differ from the one that started
    the run as far as `resume` allows. Waits for a lease that nobody renews to expire.
    Raises `InputError` if a run is running there, or the folder belongs to another job or is no run's.
    """
    where = f"run folder {run.where}"
    if run.path is not None and run.path.is_file():
        raise InputError(
            "the path is a file, not a folder", where=where, remedy="move it away, or choose another name for this run"
        )
    if not run_exists(run):
        return None
    holder = _living(run)
    if holder is not None:
        raise InputError(
            f"a run with this name is already running ({holder})",
            where=where,
            remedy="wait for it or stop it, or choose another name (--set name=...)",
        )
    if fresh:
        return None
    try:
        begun = run.read(JOB).decode()
        differing = job.same_as(begun, resumes=resumes)
    except FileNotFoundError:
        if all(name == LEASE or name.startswith(f"{CLAIMS}/") for name in run.files()):
            # A controller took the folder and was killed before it could write anything else.
            return None
        raise InputError(
            "the folder exists but does not belong to a run: it has no job.yaml",
            where=where,
            remedy="move it away, or choose another name (--set name=...)",
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise InputError(
            "the file is damaged: it is not a valid job",
            where=f"{run.where}/{JOB}",
            remedy="restore the job that the run started with; or move the folder aside with --fresh",
        ) from None
    if differing:
        raise InputError(
            f"the folder has the run of another job; they differ in {', '.join(differing)}",
            where=where,
            remedy=f"only {_may_change()} may change when a run is resumed; to start over, use run --fresh"
            if resumes
            else "move that run aside with --fresh, or choose another name (--set name=...)",
        )
    result = Result.load(run)
    done = result is not None and result.status == "finished" and not {"steps", "early_stop"} & {*job.same_as(begun)}
    return result if done else None


def _may_change() -> str:
    *first, last = (key for key, kept, _ in kept_settings(Job) if kept is Kept.UNLESS_RESUMED)
    return f"{', '.join(first)} and {last}"


def find_run(name: str, storage: str) -> Folder:
    """Return a run's folder, given its path or address, or its name under `storage`.

    Raises `InputError` if there is no such run.
    """
    places = [open_folder(name)]
    if not is_address(name):
        places.append(open_folder(within(storage, name)))
    for place in places:
        with contextlib.suppress(FileNotFoundError):
            place.read(JOB)
            return place
    near = [] if is_address(name) else difflib.get_close_matches(name, runs_beside(open_folder(storage).path), 3)
    raise InputError(
        f"there is no run '{places[0].where if is_address(name) else name}'",
        where=" and ".join(dict.fromkeys(place.where for place in places)),
        remedy=f"did you mean {' or '.join(near)}?" if near else "give the run's folder, or set --storage",
    )


def checkpoint_at(where: str | Path) -> tuple[str, str] | None:
    """Return the run's path or address and the checkpoint's name, if `where` is a checkpoint's folder or manifest.

    >>> checkpoint_at("s3://bucket/runs/digits/checkpoints/000000000059-00000000?region=x")
    ('s3://bucket/runs/digits?region=x', '000000000059-00000000')
    """
    if not is_address(where) and len(Path(where).parts) < 3:
        return None
    above, file = split(where)
    run, folder = split(above)
    name = file.removesuffix(".json")
    return (run, name) if folder == CHECKPOINTS and parse_name(name) is not None else None


def runs_beside(storage: Path | None) -> list[str]:
    """Return the names of the runs in a folder on a file system; none for an object store, where listing is slow."""
    if storage is None or not storage.is_dir():
        return []
    return [entry.name for entry in storage.iterdir() if (entry / JOB).is_file()]


def job_of(run: Folder, overrides: Sequence[str] = ()) -> Job:
    """Return the job of the run in a folder, with `a.b=c` overrides applied. Raises `JobError` if it is not valid."""
    where = f"{run.where}/{JOB}"
    try:
        text = run.read(JOB).decode()
    except FileNotFoundError:
        raise JobError([InputError("there is no such file", where=where)]) from None
    except UnicodeDecodeError:
        raise JobError([InputError("the file is not UTF-8 text", where=where, expected="a job file in YAML")]) from None
    return read_job(text, where, split(run.address)[1], overrides)


def claim(run: Folder, *, fresh: bool, claims: int | None, controller: str = "") -> Fence:
    """Take the folder for a run; with `fresh`, move an earlier run's folder aside.

    `claims`: the number of controllers so far of a run that resumes; None for a new run. `controller`: the name of this
    one. Raises `InputError` if another controller took the folder in the meantime.
    """
    files = run.files()
    if not files:
        return Fence(run, 0, controller)
    holder = _living(run)
    if holder is not None or not (fresh or claims is not None):
        raise InputError(
            f"another run with this name has started in the meantime ({holder or 'and ended'})",
            where=f"run folder {run.where}",
            remedy="choose another name (--set name=...), or start this run again",
        )
    if not fresh and claims is not None:
        return Fence(run, claims, controller)
    newest = max(stat.time for stat in files.values())
    aside = f"{split(run.address)[1]}.{time.strftime('%Y%m%d-%H%M%S', time.gmtime(newest))}"
    for name in itertools.chain([aside], (f"{aside}.{number}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            run.move(name)
            break
    return Fence(run, 0, controller)


class Fence:
    """Ensure that only the newest of all controllers of a run writes: each creates the claim with the next number.

    Only one controller can create the claim of a given number; a controller that finds a newer claim stops.
    """

    def __init__(self, run: Folder, earlier: int, controller: str = "") -> None:
        """Create the next claim, of that controller; `earlier` is the number of claims when the history was read.

        Raises `InputError` if another controller has claimed the run since.
        """
        self._run = run
        self.number = earlier + 1
        """The number of its claim."""
        who = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "token": secrets.token_hex(8)}
        who["controller"] = controller
        alone = run.exclusive and keeps_others_out(run.inside(CLAIMS))
        self.claim = Claim(_claim_of(self.number), json.dumps({**who, "exclusive": alone}).encode())
        if not run.create(self.claim.name, self.claim.content):
            raise InputError(
                f"another run with this name has started in the meantime ({self._holder()})",
                where=f"run folder {run.where}",
                remedy="choose another name (--set name=...), or start this run again",
            )
        _tidy(run)

    def overtaken(self) -> str | None:
        """Return which process has taken the run over, in words; None if none has.

        Raises `OSError` if the storage fails.
        """
        newest = claims_of(self._run)
        if newest == self.number and self._run.read(self.claim.name) == self.claim.content:
            return None
        return self._holder()

    @property
    def gone(self) -> bool:
        """Whether the folder has no claim: it was moved or removed. Raises `OSError` if the storage fails."""
        return not claims_of(self._run)

    def _holder(self) -> str:
        newest = claims_of(self._run)
        if not newest:
            return "its folder was moved away"
        try:
            who = read_object(self._run, _claim_of(newest), "", _CLAIM)
        except (InputError, FileNotFoundError):
            return f"its claim, {_claim_of(newest)}, is damaged"
        return _process(who)


def _tidy(run: Folder) -> None:
    """Remove unfinished files of killed writers, except those of checkpoints, which are cleaned up separately.

    Files younger than a lease are kept: their writer may have been overtaken only now, or may be claiming the run.
    """
    with contextlib.suppress(OSError):
        for name, stat in run.unfinished().items():
            if stat.time < time.time() - LEASE_S and not name.startswith((f"{CLAIMS}/", f"{CHECKPOINTS}/")):
                run.remove(name)


def _claim_of(number: int) -> str:
    return f"{CLAIMS}/{number:08d}.json"


def claims_of(run: Folder) -> int:
    """Return how many controllers have claimed the run."""
    names = [name.removeprefix(f"{CLAIMS}/").removesuffix(".json") for name in run.files(CLAIMS)]
    return max((int(name) for name in names if re.fullmatch("[0-9]{8}", name)), default=0)


def claimed_by(run: Folder) -> str:
    """Return the name of the newest controller that has claimed the run, dead or alive; empty if none has."""
    return claimant(run, claims_of(run)).controller


class Claimant(NamedTuple):
    """The process that has created a claim."""

    controller: str = ""
    """The name of its actor; empty if that is not known. So are the others, then."""
    host: str = ""
    pid: int = 0


def claimant(run: Folder, number: int) -> Claimant:
    """Return who has created the claim of that number."""
    try:
        claim = read_object(run, _claim_of(number), "", _CLAIM)
    except (FileNotFoundError, InputError):
        return Claimant()
    return Claimant(str(claim.get("controller", "")), claim["host"], claim["pid"])


def single_writer(run: Folder) -> bool:
    """Return whether the storage prevents two controllers from writing to the run, as the newest one tested it."""
    try:
        claim = read_object(run, _claim_of(claims_of(run)), "")
    except (FileNotFoundError, InputError):
        return run.exclusive
    return run.exclusive and claim.get("exclusive") is not False


LEASE_BYTES = 512
"""Length of every lease, in bytes."""


class Lease:
    """A file in a run's folder that names the folder's holder, which renews it while it lives."""

    def __init__(self, run: Folder, address: str, controller: str = "") -> None:
        """Prepare a lease of the controller named `controller` on the Ray cluster at `address`."""
        self._run = run
        self._where = {"address": address, "controller": controller}
        self._renewed = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time to renew it."""
        return time.monotonic() - self._renewed > LEASE_S / 5

    def renew(self) -> None:
        """Write the lease. Raises `OSError` if it cannot be written."""
        self._renewed = time.monotonic()
        # Ray sets this variable for the processes of a cluster that requires a token.
        token = os.environ.get("RAY_AUTH_MODE") == "token"
        who = {"pid": os.getpid(), "host": socket.gethostname(), **this_process()}
        lease = {"time": time.time(), **who, **self._where, "token": token}
        # All leases have the same length: on HDFS a file's length is read first, and with a new version in between a
        # reader would miss the end, or read past it.
        self._run.write(LEASE, [json.dumps(lease).encode().ljust(LEASE_BYTES)])

    def release(self) -> None:
        """Remove the lease. Raises `OSError` if it cannot be removed."""
        self._run.remove(LEASE)


def _living(run: Folder) -> str | None:
    """Return the process that holds the folder and renews its lease; None if there is none.

    Waits until the lease is renewed or expires. It also expires once it has not changed for `LEASE_S` of this machine's
    clock: the holder's clock may be ahead.
    """
    first = lease = _lease(run)
    deadline = time.monotonic() + LEASE_S
    while (holder := _holder(lease)) is not None:
        if lease != first:
            return holder
        if time.monotonic() > deadline:
            return None
        time.sleep(LEASE_S / 100)
        lease = _lease(run)
    return None


def _lease(run: Folder) -> bytes:
    try:
        return run.read(LEASE)
    except FileNotFoundError:
        return b""


def lease_holder(run: Folder) -> str | None:
    """Return the process that holds the folder, in words; None if there is none.

    A lease that is not renewed expires after `LEASE_S`. If its holder was a process of this machine, it expires with
    that process. A damaged lease counts as none: a living holder soon writes it again.
    """
    return _holder(_lease(run))


@dataclass(frozen=True, slots=True)
class LostHolder:
    """A controller that no longer renews its lease and has not removed it, as a controller does that ends normally."""

    process: str
    """Its process id and host, in words."""
    lives: bool | None
    """Whether its process lives; None if that cannot be known here."""
    unresponsive_s: float
    """Seconds since it renewed its lease."""


def lost_holder(run: Folder) -> LostHolder | None:
    """Return the controller whose lease has expired; None if the lease is valid, or there is none."""
    lease = _parsed(_lease(run))
    if lease is None or _holds(lease):
        return None
    return LostHolder(_process(lease), _lives(lease), time.time() - lease["time"])


def holder_lives(document: bytes) -> bool | None:
    """Return whether the process that a lease names lives; None if only time can tell.

    That is so for a moment after its death, too: another one may take its place.
    """
    lease = _parsed(document)
    found = None if lease is None else _lives(lease)
    return None if found is False and lease is not None and _valid(lease) else found


@dataclass(frozen=True, slots=True)
class Holder:
    """How to reach the controller of a run."""

    address: str
    """Address of its Ray cluster."""
    controller: str
    """Name of its actor there."""
    token: bool
    """Whether the cluster requires a token."""


def held_at(run: Folder) -> Holder | None:
    """Return how to reach the folder's holder, or the one that takes its place; None if nobody holds it."""
    lease = _parsed(_lease(run))
    if lease is None or not _valid(lease):
        return None
    return Holder(str(lease.get("address", "")), str(lease.get("controller", "")), bool(lease.get("token")))


def lease_document(run: Folder) -> bytes:
    """Return the content of the lease; empty if there is none.

    While somebody holds the folder it changes every few seconds, whatever the holder's clock says.
    """
    return _lease(run)


def _holder(document: bytes) -> str | None:
    lease = _parsed(document)
    if lease is None or not _holds(lease):
        return None
    return f"{_process(lease)}, renewed {max(0.0, time.time() - lease['time']):.0f} s ago"


def _parsed(document: bytes) -> dict[str, Any] | None:
    """Return the parsed lease; None if it is damaged or missing."""
    try:
        return parse_object(document, LEASE, 1, "", _LEASE)
    except InputError:
        return None


def _holds(lease: Mapping[str, Any]) -> bool:
    return _valid(lease) and _lives(lease) is not False


def _valid(lease: Mapping[str, Any]) -> bool:
    return bool(time.time() - lease["time"] <= LEASE_S)


def _lives(lease: Mapping[str, Any]) -> bool | None:
    # Leases of older versions lack `machine` and `born`, and damaged ones may hold anything there.
    return lives(lease["pid"], str(lease.get("machine", "")), str(lease.get("born", "")))


def _process(lease: Mapping[str, Any]) -> str:
    return f"process {lease['pid']} on {lease['host']}"
