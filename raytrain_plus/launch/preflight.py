"""Turn a job into an order: every check that this machine can make without Ray."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.data.of_job import check_profiled, odd_sizes, sample_order_of
from raytrain_plus.data.prepare import prepared_data
from raytrain_plus.install.horovod_usable import choose_collective, passed_over
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import load_user_code
from raytrain_plus.job.task_pickle import task_name, task_to_send
from raytrain_plus.job.task_source import source_digests, whole_digest
from raytrain_plus.observe.trackers.callbacks import defined_callbacks
from raytrain_plus.observe.trackers.trackers import check_installed, settings_for
from raytrain_plus.parallel.sizing import size_table, unused_workers
from raytrain_plus.release import VERSION
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import check_writable, earlier_result, run_exists
from raytrain_plus.runs.history import is_older, load_history
from raytrain_plus.runs.resumption import (
    check_resumable,
    check_schedule,
    check_unharmed,
    refuse_another_task,
    warn_of_another_task,
)
from raytrain_plus.training.model.layer_names import layers_of
from raytrain_plus.training.model.weights_check import check_files
from raytrain_plus.workers.messages import Plan


def order_of(
    job: Job,
    *,
    fresh: bool = False,
    roots: Sequence[Path] = (),
    resumes: bool = False,
    fresh_rates: bool = False,
) -> RunOrder | Result:
    """Return the order for the controller, or the result if the same job has finished already.

    `roots` are folders to import the task from, besides the working directory. An unfinished run of this name resumes
    from its newest complete checkpoint, or is moved aside if `fresh`. `resumes`: whether the job may differ from the
    one that started the run as far as `resume` allows. `fresh_rates`: see `messages.Plan`. Raises `InputError` if the
    job, its data or its task is wrong, before any folder is made. Warnings go to stderr.
    """
    folder = check_writable(job.storage).inside(job.name)
    search = [Path.cwd(), *roots]
    done = earlier_result(folder, job, fresh, resumes=resumes)
    if done is not None:
        refuse_another_task(folder, source_digests(job, search))
        return replace(done, trained_steps=0, trained_samples=0)
    collective = choose_collective(job.collective)
    if unused := passed_over(job.collective):
        print(f"warning: {unused}", file=sys.stderr)
    check_installed(job.trackers)
    code = load_user_code(job, search)
    pickled = task_to_send(job)
    older = run_exists(folder) and not fresh and is_older(folder)
    seen, held_out = prepared_data(job, search, older=older)
    steps = sample_order_of(job, seen).steps
    check_profiled(job, steps)
    past = None
    if run_exists(folder) and not fresh:
        past = load_history(folder)
        check_resumable(past, folder, job, seen)
        check_unharmed(folder, seen, held_out)
    sources = source_digests(job, search)
    if past is not None:
        warn_of_another_task(folder, sources)
        if not fresh_rates:
            check_schedule(folder, past, steps)
    check_files(job, code.task)
    sizes = size_table(job, layers_of(job, code.task))
    unformed = unused_workers(sizes)
    for warning in [*[unformed] * bool(unformed), *odd_sizes(job, seen)]:
        print(f"warning: {warning}", file=sys.stderr)
    return RunOrder(
        plan=Plan(
            job=job if pickled is None else replace(job, task=task_name(job.task)),
            pickled_task=pickled,
            roots=tuple(str(root.absolute()) for root in search),
            steps=steps,
            data=seen,
            held_out=held_out,
            collective=collective,
            folder=folder.address,
            resumed=None if past is None else past.rules,
            fresh_rates=fresh_rates,
        ),
        past=past,
        older=older,
        task_modules=sources,
        task_sha256=whole_digest(sources),
        sizes=sizes,
        callbacks=defined_callbacks(code.task),
        fresh=fresh,
        job_yaml=job.to_yaml(),
        versions=_versions(),
        environment=settings_for(job.trackers, os.environ),
    )


def _versions() -> dict[str, str]:
    names = ("ray", "torch", "pyarrow", "numpy")
    ours = {"python": platform.python_version(), "raytrain-plus": VERSION}
    return {**ours, **{name: version(name) for name in names}}
