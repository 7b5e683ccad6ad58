"""Running a job: to its end, with the caller; or on its own, with a handle for the caller."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import ray

from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.launch.background import begin_in_background
from raytrain_plus.launch.cluster import connected
from raytrain_plus.launch.driver import Signals, drive, launch
from raytrain_plus.launch.handle import Handle
from raytrain_plus.launch.preflight import order_of
from raytrain_plus.observe.progress import View, view_for
from raytrain_plus.ray_compat import is_submitted
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import job_of
from raytrain_plus.storage.address import is_address, split
from raytrain_plus.storage.open import open_folder


def run(
    job: Job,
    *,
    address: str | None = None,
    fresh: bool = False,
    view: View | None = None,
    quiet: bool = False,
    roots: Sequence[Path] = (),
    may_change: Collection[str] = (),
) -> Result:
    """Runs `job` to its end and returns its result; a run that failed is a result too, with its error in words.

    A run of this name that has not finished goes on from its newest complete checkpoint. `may_change`: settings in
    which the job may then differ from the one that began, beside those that no result depends on.

    `address` names a Ray cluster to join (else RAY_ADDRESS, else a connection that is already there, else one of our
    own is started for this run); in a job that was submitted to it, the run goes on when this process ends. `fresh`
    moves an earlier run of this name aside. `view` is told of everything, unless `quiet`. `roots` are folders to import
    the task from, beside the working directory. Raises `InputError` where the job, its data or its task is wrong:
    before a folder is made.
    """
    view = None if quiet else view or view_for(sys.stdout)
    order = order_of(job, fresh=fresh, roots=roots, may_change=may_change)
    if isinstance(order, Result):
        if view is not None:
            view.finish(order)
        return order
    submitted = is_submitted()
    if submitted:
        _warn_of_a_copy(job)
    with Signals() as signals, connected(job, address) as began:
        # Ray's own code in C++ has put something in their place.
        signals.listen()
        # Whose driver Ray ends a few seconds after it was told to stop, saved or not.
        return drive(order, began, view, signals, detached=submitted)


def _warn_of_a_copy(job: Job) -> None:
    """A submitted job works in a copy of the folder that was sent, which Ray keeps for no longer than it likes."""
    if not is_address(job.storage) and not Path(job.storage).is_absolute():
        print(
            f"warning: storage: {job.storage} is relative to Ray's copy of the working directory, {Path.cwd()}; "
            "Ray may remove it when the job has ended (--set storage=... with an absolute path, or an address)",
            file=sys.stderr,
        )


def start(job: Job, *, address: str | None = None, fresh: bool = False, roots: Sequence[Path] = ()) -> Handle:
    """Begins what `run` would do, and returns when it trains: it goes on whatever becomes of this process.

    On the cluster that is named or connected; else on a Ray of its own, in processes of its own on this machine. A job
    that has finished already is not run again. Raises what keeps the run from beginning.
    """
    order = order_of(job, fresh=fresh, roots=roots)
    if not isinstance(order, Result):
        if address or ray.is_initialized() or os.environ.get("RAY_ADDRESS"):
            with connected(job, address) as began:
                launch(order, began)
        else:
            begin_in_background(order)
    return Handle(open_folder(job.storage).inside(job.name))


def resume(
    run_folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    address: str | None = None,
    view: View | None = None,
    quiet: bool = False,
    roots: Sequence[Path] = (),
) -> Result:
    """Goes on with the run in this folder, a path or an address, from its newest complete checkpoint; its result.

    `overrides` are `a.b=c`: what no result depends on may change, and on purpose `args.…`, and `steps`, which lets a
    finished run go on. Its task and relative paths are looked up from the working directory, as when it began.
    """
    storage, name = split(run_folder)
    folder = open_folder(run_folder)
    if job_of(folder).epochs is not None and any(override.split("=")[0] == "steps" for override in overrides):
        raise InputError(
            "the length of this run is given in epochs, and its last step is of a size of its own",
            where="--set steps",
            expected="a run whose job says `steps`",
        )
    own = [f"name={json.dumps(name)}", f"storage={json.dumps(storage)}"]
    job = job_of(folder, [*overrides, *own])
    return run(job, address=address, view=view, quiet=quiet, roots=roots, may_change=("args", "steps"))
