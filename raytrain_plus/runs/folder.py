"""A run's folder: whether a job may use it, and the lease of who does."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import os
import re
import secrets
import shlex
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import InputError, JobError
from raytrain_plus.job.settings import Job
from raytrain_plus.job.yaml import read_job
from raytrain_plus.result import Result
from raytrain_plus.runs.process import lives, this_process
from raytrain_plus.state.manifest import FOLDER as CHECKPOINTS
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import is_address, split, within
from raytrain_plus.storage.claimed import Claim
from raytrain_plus.storage.document import parse_object, read_object
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.open import open_folder
from raytrain_plus.storage.probe import keeps_others_out

JOB = "job.yaml"
"""The file, in a run's folder, with the resolved job."""
DATASET = "dataset.json"
"""The file with what the data was when the run began, as in `Index.to_json`."""
CHANGED = "data_changed.json"
"""The file with what the run first saw of the data file whose change ended it: `DataChanged.first`."""
MODEL = "model.safetensors"
"""The file with the weights at the end."""
PICTURE = "pipeline.svg"
TRACE = "pipeline.json"
"""One step of a model in stages, to look at; the same for trace viewers."""
LEASE_S = 10.0
"""Seconds after its last renewal for which a lease holds."""
LEASE = "lease.json"
CLAIMS = "claims"
_PID = has.whole(1, 2**31 - 1)
_CLAIM = has.object_of(pid=_PID, host=has.text)
_LEASE = has.object_of(time=has.number(0, 1e12), pid=_PID, host=has.text)


def check_writable(where: str | Path) -> Folder:
    """The storage folder at a path or address, made and tried.

    Raises `InputError` where that is none, or nothing can be written there.
    """
    shown = "" if is_address(where) else str(where)
    try:
        storage = open_folder(where)
        shown = storage.where
        # What a run needs there; that nobody is kept out is told by `raytrain status`, and is no reason to stop.
        keeps_others_out(storage)
        return storage
    except OSError as error:
        raise InputError(
            f"the storage folder cannot be written: {error.strerror or error}",
            where=f"storage: {shown}" if shown else "storage",
            remedy="choose another folder (--set storage=...), or mend its permissions or space",
        ) from error


def exists(run: Folder) -> bool:
    """Whether there is anything in a run's folder."""
    return bool(run.files())


def earlier_result(run: Folder, job: Job, fresh: bool, may_change: Collection[str] = ()) -> Result | None:
    """The result of the same, finished job in `run`; None where the job may start or go on there.

    `fresh`: what is there will be moved aside. `may_change`: settings in which the job may differ from the one that
    began, beside those that no result depends on. Raises `InputError` where a living run or another job's is in the
    way. A lease that nobody renews is waited for.
    """
    where = f"run folder {run.where}"
    if run.path is not None and run.path.is_file():
        raise InputError("it is a file", where=where, remedy="move it away, or give this run another name")
    if not exists(run):
        return None
    holder = _living(run)
    if holder is not None:
        raise InputError(
            f"a run of this name is going on ({holder})",
            where=where,
            remedy="wait for it or stop it, or give this one another name (--set name=...)",
        )
    if fresh:
        return None
    try:
        differs = job.same_as(run.read(JOB).decode())
    except FileNotFoundError:
        if all(name == LEASE or name.startswith(f"{CLAIMS}/") for name in run.files()):
            # A controller was killed when it had taken the folder, before it could write anything.
            return None
        raise InputError(
            "a folder of this name is there, which is no run's: it has no job.yaml",
            where=where,
            remedy="move it away, or give this run another name (--set name=...)",
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError):
        raise InputError(
            "the file is damaged: it is no job",
            where=f"{run.where}/{JOB}",
            remedy="put back the job that the run began with; or --fresh moves its folder aside",
        ) from None
    differing = [key for key in differs if key not in may_change]
    if differing:
        raise InputError(
            f"another job's run of this name is there already; they differ in {', '.join(differing)}",
            where=where,
            remedy="--fresh moves it aside; or give this one another name (--set name=...)",
        )
    result = Result.load(run)
    done = result is not None and result.status == "finished" and "steps" not in differs
    return result if done else None


def find_run(name: str, storage: str) -> Folder:
    """A run's folder, by its path or address, or by its name under `storage`.

    Raises `InputError` where there is none.
    """
    places = [open_folder(name)]
    if not is_address(name):
        places.append(open_folder(within(storage, name)))
    for place in places:
        with contextlib.suppress(FileNotFoundError):
            place.read(JOB)
            return place
    near = [] if is_address(name) else difflib.get_close_matches(name, _runs_beside(open_folder(storage).path), 3)
    raise InputError(
        f"there is no run '{places[0].where if is_address(name) else name}'",
        where=" and ".join(dict.fromkeys(place.where for place in places)),
        remedy=f"did you mean {' or '.join(near)}?" if near else "name its folder, or say with --storage where it lies",
    )


def _runs_beside(storage: Path | None) -> list[str]:
    """The runs in a folder on a file system; of others a list would take its time."""
    if storage is None or not storage.is_dir():
        return []
    return [entry.name for entry in storage.iterdir() if (entry / JOB).is_file()]


def job_of(run: Folder, overrides: Sequence[str] = ()) -> Job:
    """The job of the run in a folder, with `a.b=c` overrides applied. Raises `JobError` where there is none."""
    where = f"{run.where}/{JOB}"
    try:
        text = run.read(JOB).decode()
    except FileNotFoundError:
        raise JobError([InputError("there is no such file", where=where)]) from None
    except UnicodeDecodeError:
        raise JobError([InputError("is no text", where=where, expected="a job file in YAML")]) from None
    return read_job(text, where, split(run.address)[1], overrides)


def claim(run: Folder, *, fresh: bool, claims: int | None) -> Fence:
    """Takes the folder for a run: with `fresh` an earlier run's is moved aside.

    `claims`: how many controllers the run had, where it goes on; None where it begins. Raises `InputError` where
    another one came in the meantime.
    """
    files = run.files()
    if not files:
        return Fence(run, 0)
    holder = _living(run)
    if holder is not None or not (fresh or claims is not None):
        raise InputError(
            f"another run of this name has begun in the meantime ({holder or 'and ended'})",
            where=f"run folder {run.where}",
            remedy="give this one another name (--set name=...), or start it again",
        )
    if not fresh and claims is not None:
        return Fence(run, claims)
    newest = max(stat.time for stat in files.values())
    aside = f"{split(run.address)[1]}.{time.strftime('%Y%m%d-%H%M%S', time.gmtime(newest))}"
    for name in itertools.chain([aside], (f"{aside}.{number}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            run.move(name)
            break
    return Fence(run, 0)


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
        alone = run.exclusive and keeps_others_out(run.inside(CLAIMS))
        self.claim = Claim(_claim_of(self._number), json.dumps({**who, "exclusive": alone}).encode())
        if not run.create(self.claim.name, self.claim.content):
            raise InputError(
                f"another run of this name has begun in the meantime ({self._holder()})",
                where=f"run folder {run.where}",
                remedy="give this one another name (--set name=...), or start it again",
            )
        _tidy(run)

    def overtaken(self) -> str | None:
        """Who has taken the run over, if anybody has. Raises `OSError` where the storage fails."""
        newest = claims_of(self._run)
        if newest == self._number and self._run.read(self.claim.name) == self.claim.content:
            return None
        return self._holder()

    @property
    def gone(self) -> bool:
        """Whether no claim lies in the folder: it was moved or removed. Raises `OSError` if the storage fails."""
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
    """Removes what writers that were killed have left unfinished, but for checkpoints, which are swept.

    What is younger than a lease may be of somebody who is only just overtaken, or of who claims the run now.
    """
    with contextlib.suppress(OSError):
        for name, stat in run.unfinished().items():
            if stat.time < time.time() - LEASE_S and not name.startswith((f"{CLAIMS}/", f"{CHECKPOINTS}/")):
                run.remove(name)


def _claim_of(number: int) -> str:
    return f"{CLAIMS}/{number:08d}.json"


def claims_of(run: Folder) -> int:
    """How many controllers have claimed the run."""
    names = [name.removeprefix(f"{CLAIMS}/").removesuffix(".json") for name in run.files(CLAIMS)]
    return max((int(name) for name in names if re.fullmatch("[0-9]{8}", name)), default=0)


def single_writer(run: Folder) -> bool:
    """Whether the storage makes sure that no two controllers write into the run; as tried by the newest of them."""
    try:
        claim = read_object(run, _claim_of(claims_of(run)), "")
    except (FileNotFoundError, InputError):
        return run.exclusive
    return run.exclusive and claim.get("exclusive") is not False


def resume_command(where: Folder | str | Path) -> str:
    """The command that resumes the run in a folder, or at its path or address."""
    address = str(where) if isinstance(where, (str, Path)) else where.address
    return f"raytrain resume {shlex.quote(without_credentials(address, whole=True))}"


LEASE_BYTES = 512
"""Length of a lease, whatever it says."""


class Lease:
    """Says in a run's folder that somebody holds it; renewed by its holder."""

    def __init__(self, run: Folder, address: str, controller: str = "") -> None:
        """`address`: of the Ray cluster that its holder is on, whose name there is `controller`."""
        self._run = run
        self._where = {"address": address, "controller": controller}
        self._renewed = 0.0

    @property
    def due(self) -> bool:
        """Whether it is time to renew it."""
        return time.monotonic() - self._renewed > LEASE_S / 5

    def renew(self) -> None:
        """Writes the lease. Raises `OSError` where that is not possible."""
        self._renewed = time.monotonic()
        # Ray's own processes have it in their environment.
        token = os.environ.get("RAY_AUTH_MODE") == "token"
        who = {"pid": os.getpid(), "host": socket.gethostname(), **this_process()}
        lease = {"time": time.time(), **who, **self._where, "token": token}
        # All as long: pyarrow asks for an object's length first, and would read another one's end, or none.
        self._run.write(LEASE, [json.dumps(lease).encode().ljust(LEASE_BYTES)])

    def release(self) -> None:
        """Gives the folder up. Raises `OSError` where that is not possible."""
        self._run.remove(LEASE)


def _living(run: Folder) -> str | None:
    """Who holds the folder and renews its lease; None where nobody does, or where the lease ends without a renewal.

    It ends, too, when it has been the same for `LEASE_S` of our clock: the holder's may be ahead.
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
    """Who holds the folder, or None. A lease that its holder stopped renewing ends after `LEASE_S`.

    If its holder was a process of this machine, the lease ends with that process. One that is damaged is nobody's: its
    holder writes it again soon.
    """
    return _holder(_lease(run))


@dataclass(frozen=True, slots=True)
class Lost:
    """A controller that left its lease behind, and no longer renews it. One that ends by itself removes its lease."""

    process: str
    """Its process id and host, in words."""
    lives: bool | None
    """Whether its process lives; None if that cannot be known here."""
    silent_s: float
    """Seconds since it renewed its lease."""


def lost_holder(run: Folder) -> Lost | None:
    """Return the controller that has lost the folder; None if somebody holds it, or nobody has left a lease."""
    lease = _parsed(_lease(run))
    if lease is None or _holds(lease):
        return None
    return Lost(_process(lease), _lives(lease), time.time() - lease["time"])


def holder_lives(document: bytes) -> bool | None:
    """Return whether the process that a lease names lives; None if only time can tell."""
    lease = _parsed(document)
    return None if lease is None else _lives(lease)


@dataclass(frozen=True, slots=True)
class Holder:
    """Where the controller of a run is to be reached."""

    address: str
    """Of its Ray cluster."""
    controller: str
    """Its name there."""
    token: bool
    """Whether the cluster asks for one."""


def held_at(run: Folder) -> Holder | None:
    """Where the folder's holder is; None where nobody holds it."""
    lease = _parsed(_lease(run))
    if lease is None or not _holds(lease):
        return None
    return Holder(str(lease.get("address", "")), str(lease.get("controller", "")), bool(lease.get("token")))


def lease_document(run: Folder) -> bytes:
    """The lease as it stands; empty where there is none. While somebody holds the folder it changes every few seconds,
    whatever their clock says."""
    return _lease(run)


def _holder(document: bytes) -> str | None:
    lease = _parsed(document)
    if lease is None or not _holds(lease):
        return None
    return f"{_process(lease)}, renewed {max(0.0, time.time() - lease['time']):.0f} s ago"


def _parsed(document: bytes) -> dict[str, Any] | None:
    """Return what a lease says; None if it is damaged, or there is none."""
    try:
        return parse_object(document, LEASE, 1, "", _LEASE)
    except InputError:
        return None


def _holds(lease: Mapping[str, Any]) -> bool:
    return bool(time.time() - lease["time"] <= LEASE_S) and _lives(lease) is not False


def _lives(lease: Mapping[str, Any]) -> bool | None:
    # Leases of older versions lack the last two, and damaged ones may hold anything there.
    return lives(lease["pid"], str(lease.get("machine", "")), str(lease.get("born", "")))


def _process(lease: Mapping[str, Any]) -> str:
    return f"process {lease['pid']} on {lease['host']}"
