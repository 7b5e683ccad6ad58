"""Runs as jobs of a cluster: sent, followed and stopped through its jobs API, from wherever its dashboard is seen."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import logging
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from raytrain_plus.errors import InputError, RunError
from raytrain_plus.job import Job
from raytrain_plus.sizetext import size_text
from raytrain_plus.storage.folder import is_address
from raytrain_plus.workers.ray_private import show_token_if_any

HERE = "http://127.0.0.1:8265"
"""Where a cluster's dashboard is unless it is told otherwise."""
RUN = "raytrain_run"
"""The key of a run's name among what is noted with its job."""
NEVER_SENT = (".git", ".venv", "venv", "__pycache__")
STOP_S = 300
"""Seconds that a job has to stop in before Ray kills its driver, which does the run no harm."""
LOOK_S = 0.5
"""Seconds between two looks at a job that is to stop."""
LARGEST = 5
"""How many of the largest things are named where there is too much to send."""


class Jobs:
    """The jobs of a cluster that are runs."""

    def __init__(self, address: str) -> None:
        """Raises `InputError` where no cluster answers at the `http://` address, or refuses who asks."""
        self._address = address
        # Ray would prefer RAY_ADDRESS to what it is told.
        os.environ["RAY_API_SERVER_ADDRESS"] = address
        show_token_if_any()
        # Which tells of each package that it makes and sends.
        logging.getLogger("ray").setLevel(logging.WARNING)
        with self._answering():
            self._client = JobSubmissionClient(address)

    def submit(self, run: str, words: Sequence[str], folder: Path, unneeded: Sequence[str] = ()) -> str:
        """Has the cluster run `python -m raytrain_plus` with these words on a copy of `folder`; the job's id.

        Left out of the copy: `.git`, environments, and what .gitignore, .rayignore, or `unneeded` in their manner say.
        This package goes along where it is not in the folder. Raises `InputError`.
        """
        environment: dict[str, Any] = {
            "working_dir": str(folder),
            "excludes": [*NEVER_SENT, *unneeded],
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)},
        }
        package = Path(__file__).parent
        if not (folder / package.name / "__init__.py").is_file():
            environment["py_modules"] = [str(package)]
        with self._answering():
            return self._client.submit_job(
                entrypoint=shlex.join(["python", "-m", package.name, *words]),
                submission_id=f"{run}-{secrets.token_hex(4)}",
                metadata={RUN: run},
                runtime_env=environment,
            )

    def find(self, run: str) -> JobDetails:
        """The newest job that is a run of this name; or the one with this id. Raises `InputError` where none is."""
        with self._answering():
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        found = [job for job in jobs if run in (job.submission_id, (job.metadata or {}).get(RUN))]
        if found:
            return max(found, key=lambda job: job.start_time or 0)
        names = {str((job.metadata or {}).get(RUN) or job.submission_id) for job in jobs}
        near = difflib.get_close_matches(run, names, 3)
        raise InputError(
            f"no job of the cluster is a run '{run}'",
            where=f"address: {self._address}",
            remedy=f"did you mean {' or '.join(near)}?" if near else "name a run that was submitted, or a job's id",
        )

    def status(self, run: str) -> dict[str, Any]:
        """What is known of a run's job: `state`, `job` (its id), `newest` (the last line that it printed)."""
        job = self.find(run)
        lines = self._printed(job).strip().splitlines()
        return {"state": job.status.value.lower(), "job": job.submission_id, "newest": lines[-1] if lines else ""}

    def tell(self, run: str, stream: TextIO, follow: bool) -> None:
        """Writes what a run's job has printed; and what it prints, until it has ended, if `follow`."""
        job = self.find(run)
        if follow:
            self._tail(str(job.submission_id), stream)
        else:
            stream.write(self._printed(job))

    def watch(self, job: str, stream: TextIO) -> int:
        """Writes what the job with this id prints until it has ended; its exit code."""
        self._tail(job, stream)
        with self._answering():
            ended = self._client.get_job_info(job)
        if ended.status == JobStatus.STOPPED:
            return 143
        if ended.driver_exit_code is None and ended.status == JobStatus.FAILED:
            raise RunError(f"the job {job} failed: {ended.message}")
        return ended.driver_exit_code or 0

    def stop(self, run: str, wait: bool) -> str:
        """Asks a run's job to stop, its state saved; what became of it. Raises `RunError` where it does not stop."""
        job = str(self.find(run).submission_id)
        with self._answering():
            heard = self._client.stop_job(job)
        until = time.monotonic() + STOP_S + 30
        while True:
            with self._answering():
                status = self._client.get_job_status(job)
            if not wait or status.is_terminal():
                return f"{run}: {'told to stop' if heard and not wait else status.value.lower()} (job {job})"
            if time.monotonic() > until:
                raise RunError(f"the job {job} has not stopped within {STOP_S + 30} s")
            time.sleep(LOOK_S)

    def _printed(self, job: JobDetails) -> str:
        with self._answering():
            return self._client.get_job_logs(str(job.submission_id))

    def _tail(self, job: str, stream: TextIO) -> None:
        async def tail() -> None:
            async for lines in self._client.tail_job_logs(job):
                stream.write(lines)
                stream.flush()

        with self._answering():
            asyncio.run(tail())

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise InputError(
                f"the cluster asks for a token, and is not content with what it got: {str(error).splitlines()[0]}",
                where=f"address: {self._address}",
                remedy="put the cluster's token into ~/.ray/auth_token, or name its file: RAY_AUTH_TOKEN_PATH=FILE",
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            if "exceeds the maximum size" in why or "too large" in why.lower():
                raise InputError(
                    f"there is more in the working directory than Ray sends (512 MiB): {largest(Path.cwd())}",
                    where=f"working directory {Path.cwd()}",
                    remedy="name in .rayignore what the run does not need",
                ) from None
            raise InputError(
                f"the jobs API of a Ray cluster does not answer: {why[:200]}",
                where=f"address: {self._address}",
                remedy="give the address of its dashboard (--address http://HOST:8265), as `ray start` or "
                "`ray dashboard` prints it",
            ) from error


def unneeded_by(job: Job, folder: Path) -> list[str]:
    """Patterns, as in .gitignore, of what a job has no need of where it is sent: earlier runs, and what `data.prepare`
    makes.

    >>> from raytrain_plus.job import Data
    >>> data = Data(path="data/x", batch_size=8, prepare="t:p")
    >>> unneeded_by(Job(name="n", task="t:T", steps=1, data=data), Path.cwd())
    ['/runs', '/data/x']
    """
    made = [job.data.path, *([] if job.evaluate is None else [job.evaluate.path])]
    places = [job.storage, *(made if job.data.prepare else ())]
    inside = []
    for place in places:
        if not is_address(place):
            with contextlib.suppress(ValueError):
                inside.append("/" + Path(os.path.abspath(folder / place)).relative_to(folder).as_posix())
    return inside


def largest(folder: Path) -> str:
    """The largest things in a folder, with their sizes, in words."""

    def size(path: Path) -> int:
        inside = [path] if path.is_file() else path.rglob("*")
        return sum(one.lstat().st_size for one in inside if not one.is_dir())

    sizes = sorted(((size(path), path.name) for path in folder.iterdir()), reverse=True)
    return ", ".join(f"{name} ({size_text(bytes_)})" for bytes_, name in sizes[:LARGEST])


def address_of(wanted: str | None) -> str:
    """The address of the cluster's dashboard: the one that is wanted, or the environment's, or this machine's."""
    given = [wanted, os.environ.get("RAY_API_SERVER_ADDRESS"), os.environ.get("RAY_ADDRESS")]
    return next((one for one in given if one and is_http(one)), HERE)


def is_http(address: str | None) -> bool:
    """Whether it is the address of a cluster's dashboard."""
    return (address or "").startswith(("http://", "https://"))


def check_sendable(job: Job, file: Path, folder: Path) -> str:
    """The job file's path inside `folder`, of which a copy is sent. Raises `InputError` where the run could not go
    by that copy."""
    try:
        inside = file.resolve().relative_to(folder.resolve())
    except ValueError:
        raise InputError(
            "the job file is not inside the working directory, a copy of which is sent to the cluster",
            where=f"{file}, working directory {folder}",
            remedy="go to the folder that holds the job file and the task's module, and submit from there",
        ) from None
    if not is_address(job.data.path) and not Path(job.data.path).is_absolute() and not job.data.prepare:
        raise InputError(
            "it is relative, and data is not sent along",
            where=f"data.path: {job.data.path}",
            expected="a path that all machines of the cluster see, or a `data.prepare` that makes the data there",
        )
    return inside.as_posix()
