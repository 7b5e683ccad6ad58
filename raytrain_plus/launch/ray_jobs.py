"""Submit, follow and stop runs as Ray jobs, from any machine that can reach the cluster's dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import glob
import logging
import os
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

from raytrain_plus.data.of_job import data_paths
from raytrain_plus.data.paths.files import split_pattern
from raytrain_plus.data.values.tokens import find_tokenizer
from raytrain_plus.errors import InputError, RaytrainError, RunError
from raytrain_plus.job.settings import Job
from raytrain_plus.launch.ray_address import authentication_failed
from raytrain_plus.ray_compat import show_token_if_any
from raytrain_plus.runs.folder import find_run, job_of
from raytrain_plus.storage.address import is_address, refuse_credentials
from raytrain_plus.storage.size_text import size_text

RUN = "raytrain_run"
"""The key of the run's name in the metadata of a Ray job."""
NEVER_SENT = (".git", ".venv", "venv", "__pycache__")
STOP_S = 300
"""Seconds that a job has to stop before Ray kills its driver; the run survives that."""
LOOK_S = 0.5
"""Seconds between two checks of a job that is stopping."""
LARGEST = 5
"""How many of the largest files and folders an error names when the upload is too large."""


class Jobs:
    """The Ray jobs of a cluster that are runs."""

    def __init__(self, address: str) -> None:
        """Connect to the dashboard at the `http://` address.

        Raises `InputError` if no cluster answers there, or authentication fails.
        """
        self._address = address
        # Otherwise Ray prefers RAY_ADDRESS to its argument.
        os.environ["RAY_API_SERVER_ADDRESS"] = address
        show_token_if_any()
        # At a lower level Ray logs each package that it builds and uploads.
        logging.getLogger("ray").setLevel(logging.WARNING)
        with self._answering():
            self._client = JobSubmissionClient(address)

    def submit(self, run: str, words: Sequence[str], folder: Path, unneeded: Sequence[str] = ()) -> str:
        """Submit a job that runs `python -m raytrain_plus` with these words on a copy of `folder`; return its id.

        The copy excludes `.git`, environments, and what .gitignore, .rayignore and the patterns in `unneeded` match.
        This package is uploaded too if it is not in the folder. Raises `InputError` if the cluster refuses the job.
        """
        environment: dict[str, Any] = {
            "working_dir": str(folder),
            "excludes": left_out(folder, unneeded),
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)},
        }
        package = Path(__file__).parents[1]
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
        """Return the job of the run with this name, or the job with this id.

        Of several jobs it prefers the newest unfinished one, else the newest. Raises `InputError` if there is none.
        """
        with self._answering():
            jobs = [job for job in self._client.list_jobs() if job.submission_id]
        found = [job for job in jobs if run in (job.submission_id, (job.metadata or {}).get(RUN))]
        if found:
            # Prefer an unfinished job: a newer one may have been refused because that one was running.
            return max(found, key=lambda job: (not job.status.is_terminal(), job.start_time or 0))
        names = {str((job.metadata or {}).get(RUN) or job.submission_id) for job in jobs}
        near = difflib.get_close_matches(run, names, 3)
        raise InputError(
            f"the cluster has no job for a run '{run}'",
            where=f"address: {self._address}",
            remedy=f"did you mean {' or '.join(near)}?" if near else "give the name of a submitted run, or a job's id",
        )

    def status(self, run: str) -> dict[str, Any]:
        """Return the status of a run's job: `state`, `job` (its id), `newest` (the last line that it printed)."""
        job = self.find(run)
        lines = self._printed(job).strip().splitlines()
        return {"state": job.status.value.lower(), "job": job.submission_id, "newest": lines[-1] if lines else ""}

    def print_output(self, run: str, stream: TextIO, follow: bool) -> None:
        """Write what a run's job has printed to `stream`; if `follow`, continue until the job ends."""
        job = self.find(run)
        if follow:
            self._tail(str(job.submission_id), stream)
        else:
            stream.write(self._printed(job))

    def watch(self, job: str, stream: TextIO) -> int:
        """Write what the job with this id prints until it ends; return its exit code.

        Raises `RunError` if the job failed without an exit code, or can no longer be followed.
        """
        self._tail(job, stream)
        with self._answering():
            ended = self._client.get_job_info(job)
        if not ended.status.is_terminal():
            raise self._out_of_sight(job)
        if ended.status == JobStatus.STOPPED:
            return 143
        if ended.driver_exit_code is None and ended.status == JobStatus.FAILED:
            raise RunError(f"the job {job} failed: {ended.message}")
        return ended.driver_exit_code or 0

    def stop(self, run: str, wait: bool) -> str:
        """Ask a run's job to save its state and stop; return what happened, in words.

        Raises `InputError` if the job has ended already, and `RunError` if it does not stop in time.
        """
        job = str(self.find(run).submission_id)
        with self._answering():
            if not self._client.stop_job(job):
                raise InputError(
                    f"the job {job} has ended ({self._client.get_job_status(job).value.lower()})",
                    where=f"address: {self._address}",
                    remedy="a run can outlive a killed driver; on a machine of the cluster: raytrain stop FOLDER",
                )
        until = time.monotonic() + STOP_S + 30
        while wait:
            with self._answering():
                status = self._client.get_job_status(job)
            if status.is_terminal():
                return f"{run}: {status.value.lower()} (job {job})"
            if time.monotonic() > until:
                raise RunError(f"the job {job} did not stop within {STOP_S + 30} s")
            time.sleep(LOOK_S)
        return f"{run}: stop requested (job {job})"

    def _printed(self, job: JobDetails) -> str:
        with self._answering():
            return self._client.get_job_logs(str(job.submission_id))

    def _tail(self, job: str, stream: TextIO) -> None:
        async def tail() -> None:
            async for lines in self._client.tail_job_logs(job):
                stream.write(lines)
                stream.flush()

        try:
            asyncio.run(tail())
        except (OSError, RuntimeError, aiohttp.ClientError):
            raise self._out_of_sight(job) from None

    def _out_of_sight(self, job: str) -> RunError:
        return RunError(
            f"lost the connection to the job {job}, which may still be running; follow it again with: "
            f"raytrain attach {job} --address {self._address}"
        )

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except AuthenticationError as error:
            raise authentication_failed(self._address, error.message) from None
        except (OSError, aiohttp.ClientError) as error:
            raise InputError(
                f"the jobs API of a Ray cluster does not answer: {' '.join(str(error).split())[:200]}",
                where=f"address: {self._address}",
                remedy="give the URL of its dashboard (--address http://HOST:8265), as `ray start` or `ray dashboard` "
                "prints it",
            ) from error
        except (RuntimeError, ValueError, KeyError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
            if any("exceeds the maximum size" in line for line in lines):
                raise InputError(
                    f"the directory exceeds Ray's upload limit of 512 MiB; largest entries: {largest(Path.cwd())}",
                    where=f"working directory {Path.cwd()}",
                    remedy="list what the run does not need in .rayignore",
                ) from None
            raise InputError(
                f"the cluster refused the request: {lines[-1][:300]}",
                where=f"address: {self._address}",
                remedy="check that this is a Ray dashboard, and that its version of Ray is close to the one here",
            ) from error


def left_out(folder: Path, unneeded: Sequence[str] = ()) -> list[str]:
    """Return .gitignore patterns of what is never sent of a folder, in addition to its own ignore files."""
    # Ray applies these patterns also to this package if it is uploaded: an environment may have the name of one of its
    # folders, so exclude the environment's entries rather than its name.
    inside = [path.relative_to(folder).as_posix() for one in environments(folder) for path in sorted(one.iterdir())]
    return [*NEVER_SENT, *(f"/{glob.escape(path)}" for path in inside), *unneeded]


def environments(folder: Path) -> list[Path]:
    """Return the venv and conda environments at the top of a folder, under any name."""
    tops = sorted(path for path in folder.iterdir() if path.is_dir())
    return [path for path in tops if (path / "pyvenv.cfg").is_file() or (path / "conda-meta").is_dir()]


def unneeded_by(job: Job, folder: Path) -> list[str]:
    """Return .gitignore patterns of what a submitted job does not need: earlier runs and data files.

    The machines read the data where it is, or make it.

    >>> from raytrain_plus.job.data_settings import Data
    >>> data = Data(path="data/x", batch_size=8, prepare="t:p")
    >>> unneeded_by(Job(name="n", task="t:T", steps=1, data=data), Path.cwd())
    ['/runs/*/', '/data/x/**/*.parquet']
    """
    # If the storage is the folder itself, a pattern would exclude everything.
    runs = [place for place in _inside(job.storage, folder) if place != "."]
    data = [pattern for path in data_paths(job).values() if not is_address(path) for pattern in _data_in(path, folder)]
    return [*(f"/{place}/*/" for place in runs), *data]


def _data_in(path: str, folder: Path) -> list[str]:
    """Return .gitignore patterns of the data files inside `folder` that a data path names."""
    root, pattern = split_pattern(Path(os.path.abspath(folder / path)))
    found = []
    for place in _inside(str(root), folder):
        parts = [glob.escape(place), *pattern]
        # Restrict to Parquet files: this package has a folder `data`, too, but no such files.
        if not parts[-1].endswith(".parquet"):
            parts = [glob.escape(place), "**", "*.parquet"]
        found.append(str(PurePosixPath("/", *parts)))
    return found


def unneeded_to_resume(run: str, storage: str, folder: Path) -> list[str]:
    """Return the same patterns for a run to resume; only `/runs/*/` if its folder cannot be read from here."""
    runs = "/runs/*/"
    # The cluster may see the run's folder even if this machine does not.
    with contextlib.suppress(RaytrainError, OSError):
        return list(dict.fromkeys([runs, *unneeded_by(job_of(find_run(run, storage)), folder)]))
    return [runs]


def _inside(place: str, folder: Path) -> list[str]:
    """Return a path relative to the folder that contains it: as given, and with links resolved; empty if outside."""
    found = []
    if not is_address(place):
        for real in (os.path.abspath, os.path.realpath):
            with contextlib.suppress(ValueError):
                found.append(Path(real(folder / place)).relative_to(real(folder)).as_posix())
    return list(dict.fromkeys(found))


def largest(folder: Path) -> str:
    """Return the largest entries of a folder with their sizes, in words."""

    def size(path: Path) -> int:
        total = 0
        for one in [path] if path.is_file() else path.rglob("*"):
            with contextlib.suppress(OSError):
                total += 0 if one.is_dir() else one.lstat().st_size
        return total

    unsent = environments(folder)
    sent = [path for path in folder.iterdir() if path.name not in NEVER_SENT and path not in unsent]
    sizes = sorted(((size(path), path.name) for path in sent), reverse=True)
    return ", ".join(f"{name} ({size_text(bytes_)})" for bytes_, name in sizes[:LARGEST])


def check_sendable(job: Job, file: Path, folder: Path) -> str:
    """Return the job file's path relative to `folder`, a copy of which is sent.

    Raises `InputError` if the job file is outside it, or the job needs data that is not sent.
    """
    try:
        inside = file.resolve().relative_to(folder.resolve())
    except ValueError:
        raise InputError(
            "the job file is not inside the working directory, a copy of which is sent to the cluster",
            where=f"{file}, working directory {folder}",
            remedy="submit from the folder that contains the job file and the task's module",
        ) from None
    for key, path in data_paths(job).items():
        if not is_address(path) and not Path(path).is_absolute() and not job.data.prepare:
            raise InputError(
                "the path is relative, and data is not sent to the cluster",
                where=f"{key}: {path}",
                expected="an absolute path that all machines of the cluster see, or a `data.prepare` that makes the "
                "data there",
            )
    _check_tokenizer_sent(job, folder)
    return inside.as_posix()


def _check_tokenizer_sent(job: Job, folder: Path) -> None:
    """Raise `InputError` if a tokenizer with a relative path is not in the copy of `folder` that is sent."""
    path = job.data.tokenizer
    if path is None or Path(path).is_absolute() or job.data.prepare:
        return
    places, stores = _inside(path, folder), [place for place in _inside(job.storage, folder) if place != "."]
    if not places or any(PurePosixPath(place).is_relative_to(store) for place in places for store in stores):
        where = "inside `storage`" if places else "outside the working directory"
        raise InputError(
            f"the tokenizer is {where}, and is not sent to the cluster",
            where=f"data.tokenizer: {path}",
            expected="a folder inside the working directory, or an absolute path that all machines of the cluster see",
        )
    # Not loaded: only the cluster needs the package.
    find_tokenizer(folder / path)


def check_shown(words: Sequence[str]) -> None:
    """Raise `InputError` if a word contains a credential: a cluster shows the commands of its jobs to everybody."""
    for word in words:
        key, equals, value = word.partition("=")
        if re.fullmatch(r"[\w.-]+", key) and equals:
            refuse_credentials(value, f"--set {key}")
        else:
            refuse_credentials(word)
