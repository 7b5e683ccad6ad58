"""The commands that go through a cluster's dashboard: submit a run, and ask about one that was submitted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from raytrain_plus.cli.answer import Answer
from raytrain_plus.errors import InputError
from raytrain_plus.launch.ray_address import dashboard_of, named_dashboard
from raytrain_plus.storage.address import is_address, split

if TYPE_CHECKING:
    from raytrain_plus.launch.ray_jobs import Jobs


def submit_run(
    job: str, overrides: Sequence[str], address: str | None, fresh: bool, follow: bool, as_json: bool
) -> int | Answer:
    """Submit the run of a job file to the cluster with the dashboard at `address`; return the exit code or answer."""
    from raytrain_plus.job.yaml import load_job

    loaded, _ = load_job(job, overrides)
    from raytrain_plus.launch.ray_jobs import check_sendable, unneeded_by

    file = check_sendable(loaded, Path(job), Path.cwd())
    where = dashboard_of(address)
    words = ["run", file, *_settings(overrides), *(["--fresh"] if fresh else [])]
    return _send(where, loaded.name, words, unneeded_by(loaded, Path.cwd()), follow, as_json)


def submit_resume(
    address: str, run: str, storage: str, overrides: Sequence[str], fresh_rates: bool, as_json: bool
) -> int | Answer:
    """Let the cluster with this dashboard resume a run; return the exit code or answer."""
    if not any(is_address(place) or Path(place).is_absolute() for place in (run, storage)):
        raise InputError(
            "the run's folder is not sent to the cluster",
            where=f"storage: {storage}",
            expected="a place that the cluster's machines see: --storage with an absolute path, or an address",
        )
    name = split(run)[1] if is_address(run) else Path(run).name
    from raytrain_plus.launch.ray_jobs import check_shown, unneeded_to_resume

    words = ["resume", run, "--storage", storage, *_settings(overrides), *["--fresh-rates"] * fresh_rates]
    check_shown(words)
    return _send(address, name, words, unneeded_to_resume(run, storage, Path.cwd()), False, as_json)


def _settings(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def asked_cluster(run: str, storage: str, address: str | None) -> str | None:
    """Return the cluster to ask about a run; None if its folder is read instead.

    An explicit `address` wins. If the run is not in the storage as seen from here, it is the cluster whose dashboard
    the environment names.
    """
    there = named_dashboard()
    if address is not None or there is None:
        return address
    from raytrain_plus.runs.folder import find_run

    try:
        find_run(run, storage)
    except InputError:
        click.echo(f"run '{run}' not found in {storage}: asking {there}", err=True)
        return there
    return None


def jobs_at(address: str | None) -> Jobs:
    """Return the jobs of the cluster with this dashboard."""
    from raytrain_plus.launch.ray_jobs import Jobs

    return Jobs(dashboard_of(address))


def _send(
    address: str, run: str, words: Sequence[str], unneeded: Sequence[str], follow: bool, as_json: bool
) -> int | Answer:
    """Submit the command `words` for a run to a cluster, with a copy of this folder; return the exit code or answer."""
    jobs = jobs_at(address)
    job = jobs.submit(run, words, Path.cwd(), unneeded)
    if as_json:
        return Answer(0, {"name": run, "job": job, "address": address})
    click.echo(f"{run} was submitted (job {job}); follow it with: raytrain attach {run} --address {address}")
    return watch_job(jobs, job, run, address) if follow else 0


def watch_job(jobs: Jobs, job: str, run: str, address: str) -> int:
    """Print a job's output until it ends; return its exit code. SIGINT and SIGTERM end only the printing."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return jobs.watch(job, sys.stdout)
    except (KeyboardInterrupt, SystemExit) as ended:
        click.echo(f"the run continues; stop it with: raytrain stop {run} --address {address}", err=True)
        return 130 if isinstance(ended, KeyboardInterrupt) else int(str(ended.code))
