"""Run a job: attached to the caller until it ends, or detached with a handle for the caller."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import ray

from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.launch.background import begin_in_background
from raytrain_plus.launch.cluster import connected
from raytrain_plus.launch.driver import Signals, drive, launch
from raytrain_plus.launch.fault import FaultInjection, InjectedFault
from raytrain_plus.launch.handle import Handle
from raytrain_plus.launch.preflight import order_of
from raytrain_plus.observe.views.progress import ProgressView, SummaryView, view_for
from raytrain_plus.ray_compat import is_submitted, own_lines_apart
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import job_of
from raytrain_plus.storage.address import is_address, split
from raytrain_plus.storage.folders.open import open_folder


def run(
    job: Job,
    *,
    address: str | None = None,
    fresh: bool = False,
    view: ProgressView | None = None,
    quiet: bool = False,
    roots: Sequence[Path] = (),
    resumes: bool = False,
    fresh_rates: bool = False,
    faults: Sequence[InjectedFault] = (),
) -> Result:
    """Run `job` until it ends and return its result; a failed run is a result too, with its error in words.

    An unfinished run of this name resumes from its newest complete checkpoint. A finished one is not run again: its
    result has `trained_steps` 0. `resumes`: whether the job may differ from the one that started the run as far as
    `resume` allows. `fresh_rates`: see `resume`.

    `address`: the Ray cluster to join. An existing connection to Ray comes first; without `address` and RAY_ADDRESS a
    local Ray is started for this run. In a job that was submitted to a cluster, the run survives the end of this
    process. `fresh` moves an earlier run of this name aside. `view` receives all events, unless `quiet`. `roots` are
    folders to import the task from, besides the working directory. `faults` are injected meanwhile. Raises `InputError`
    if the job, its data or its task is wrong, before any folder is made.
    """
    view = None if quiet else view or view_for(sys.stdout)
    order = order_of(job, fresh=fresh, roots=roots, resumes=resumes, fresh_rates=fresh_rates)
    if isinstance(order, Result):
        if view is not None:
            view.finish(order)
        return order
    submitted = is_submitted()
    if submitted:
        _warn_of_a_copy(job)
    shown = not isinstance(view, SummaryView)
    with Signals() as signals, own_lines_apart(job.name, prints=shown) as keep_apart, connected(job, address) as began:
        # Ray's C++ code has replaced our signal handlers.
        signals.listen()
        # A submitted job's output is its log already.
        log = None if submitted else keep_apart()
        if log is not None and view is not None and shown:
            print(f"messages of Ray and Horovod go to {log}", file=sys.stderr)
        # Detached if submitted: Ray ends the driver a few seconds after a stop request, even if the state is not saved.
        with FaultInjection(open_folder(order.plan.folder), faults):
            return drive(order, began, view, signals, detached=submitted)


def _warn_of_a_copy(job: Job) -> None:
    """Warn about a relative storage in a submitted job: Ray may remove its copy of the folder at any time."""
    if not is_address(job.storage) and not Path(job.storage).is_absolute():
        print(
            f"warning: storage: {job.storage} is relative to Ray's copy of the working directory, {Path.cwd()}; "
            "Ray may remove it when the job has ended (--set storage=... with an absolute path, or an address)",
            file=sys.stderr,
        )


def start(
    job: Job,
    *,
    address: str | None = None,
    fresh: bool = False,
    roots: Sequence[Path] = (),
    resumes: bool = False,
    fresh_rates: bool = False,
) -> Handle:
    """Start `job` as `run` does, but detached; return once it trains. The run survives this process.

    It uses the named or connected cluster, else a local Ray in separate processes on this machine. A job that has
    finished already is not run again: the handle then has its result in `ended`. `resumes`, `fresh_rates`: as for
    `run`. Raises the error that prevented the start.
    """
    order = order_of(job, fresh=fresh, roots=roots, resumes=resumes, fresh_rates=fresh_rates)
    if not isinstance(order, Result):
        if address or ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
            with connected(job, address) as began:
                launch(order, began)
        else:
            begin_in_background(order)
    return Handle(open_folder(job.storage).inside(job.name), order if isinstance(order, Result) else None)


def resume(
    run_folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    address: str | None = None,
    view: ProgressView | None = None,
    quiet: bool = False,
    roots: Sequence[Path] = (),
    fresh_rates: bool = False,
) -> Result:
    """Resume the run in this folder, a path or an address, from its newest complete checkpoint; return its result.

    `overrides` have the form `a.b=c`. They may change settings that do not affect results, and also `args.…` and
    `steps`; more `steps` continue a finished run. The optimizer keeps its rates and other settings, unless
    `fresh_rates`: then they are as the task now makes them, as many steps into its schedule. The task and relative
    paths are resolved from the working directory, as when the run started. Raises `InputError` if the run cannot be
    resumed like this.
    """
    job = _resumed(run_folder, overrides)
    return run(job, address=address, view=view, quiet=quiet, roots=roots, resumes=True, fresh_rates=fresh_rates)


def start_again(
    run_folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    address: str | None = None,
    roots: Sequence[Path] = (),
    fresh_rates: bool = False,
) -> Handle:
    """Resume the run in this folder as `resume` does, but detached; return once it trains, as `start` does."""
    job = _resumed(run_folder, overrides)
    return start(job, address=address, roots=roots, resumes=True, fresh_rates=fresh_rates)


def _resumed(run_folder: str | Path, overrides: Sequence[str]) -> Job:
    """Return the job of the run in this folder with these overrides. Raises `InputError` if they are not allowed."""
    storage, name = split(run_folder)
    folder = open_folder(run_folder)
    if job_of(folder).epochs is not None and any(override.split("=")[0] == "steps" for override in overrides):
        raise InputError(
            "the length of this run is set in epochs, and its last step can be smaller than the others",
            where="--set steps",
            expected="a run whose job sets `steps`",
        )
    own = [f"name={json.dumps(name)}", f"storage={json.dumps(storage)}"]
    return job_of(folder, [*overrides, *own])
