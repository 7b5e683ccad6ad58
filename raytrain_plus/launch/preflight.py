"""Turn a job into an order: every check that this machine can make without Ray."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cloudpickle
import yaml

from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.data.dataset import both_data, reads_otherwise
from raytrain_plus.data.of_job import check_profiled, odd_sizes, sample_order_of
from raytrain_plus.data.prepare import check_preparable, prepare_data
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.parquet_source import check_restored
from raytrain_plus.data.sources.source import READING, Source, check_enough, linked_folders
from raytrain_plus.errors import CheckpointError, DamagedError, DataError, InputError, TaskError
from raytrain_plus.install.horovod_usable import choose_collective, passed_over
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import load_user_code
from raytrain_plus.job.task_source import changed_modules, source_digests
from raytrain_plus.observe.trackers.callbacks import defined_callbacks
from raytrain_plus.observe.trackers.trackers import check_installed, settings_for
from raytrain_plus.parallel.sizing import size_table, unused_workers
from raytrain_plus.release import VERSION
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import CHANGED, DATASET, TASK, check_writable, earlier_result, run_exists
from raytrain_plus.runs.history import Past, is_older, load_history
from raytrain_plus.state.stored.manifest import FOLDER as CHECKPOINTS
from raytrain_plus.state.stored.manifest import Manifest
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.model.layer_names import layers_of
from raytrain_plus.workers.messages import Plan

_DATASET = has.object_of(
    fingerprint=has.text,
    files=has.list_of(has.object_of(path=has.text, bytes=has.whole(0), footer_sha256=has.text)),
)


_TASK = has.object_of(modules=has.table_of(has.text))
_CHANGED = has.object_of(
    path=has.text, file=has.text, bytes=has.whole(0), modified_ns=has.whole(0), footer_sha256=has.text
)


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
        _refuse_another_task(folder, source_digests(job, search))
        return replace(done, trained_steps=0, trained_samples=0)
    collective = choose_collective(job.collective)
    if unused := passed_over(job.collective):
        print(f"warning: {unused}", file=sys.stderr)
    check_installed(job.trackers)
    code = load_user_code(job, search)
    pickled = _task_to_send(job)
    older = run_exists(folder) and not fresh and is_older(folder)
    seen, held_out = _look_at_data(job, search, older=older)
    steps = sample_order_of(job, seen).steps
    check_profiled(job, steps)
    past = None
    if run_exists(folder) and not fresh:
        past = load_history(folder)
        check_resumable(past, folder, job, seen)
        _check_restored(folder, seen, held_out)
    sources = source_digests(job, search)
    if past is not None:
        _warn_of_another_task(folder, sources)
        if not fresh_rates:
            check_schedule(folder, past, steps)
    sizes = size_table(job, layers_of(job, code.task))
    unformed = unused_workers(sizes)
    for warning in [*[unformed] * bool(unformed), *odd_sizes(job, seen)]:
        print(f"warning: {warning}", file=sys.stderr)
    return RunOrder(
        plan=Plan(
            job=job if pickled is None else replace(job, task=_spelled(job.task)),
            pickled_task=pickled,
            roots=tuple(str(root.absolute()) for root in search),
            steps=steps,
            data=seen,
            held_out=held_out,
            collective=collective,
            folder=folder.address,
            resumed=_resumed_rules(past),
            fresh_rates=fresh_rates,
        ),
        past=past,
        dataset={**seen.describe(), **({} if older else {READING: 2})},
        task_modules=sources,
        sizes=sizes,
        callbacks=defined_callbacks(code.task),
        fresh=fresh,
        job_yaml=job.to_yaml(),
        versions=_versions(),
        environment=settings_for(job.trackers, os.environ),
    )


def check_resumable(past: Past, folder: Folder, job: Job, seen: Source) -> None:
    """Raise `InputError` if the job cannot resume from `folder`.

    Reasons: other data, another job's checkpoints, a newer version, or a run past the job's last step.
    """
    _check_data(folder, job, seen)
    for manifest in (found.manifest for found in past.found if found.manifest is not None):
        _check_ours(manifest, folder, job, seen)
    for found in past.found:
        if found.error is not None and not isinstance(found.error, DamagedError):
            raise found.error
        if found.damaged:
            print(f"warning: the checkpoint {found.name} cannot be used: {found.why}", file=sys.stderr)
        if found.manifest is not None:
            made, steps = found.manifest.step + 1, sample_order_of(job, seen).steps
            if steps < made:
                raise InputError(
                    f"{steps} steps are fewer than the run has already made ({made})",
                    where="steps",
                    expected=f"{made} or more",
                )
            return
    lost = [found for found in past.found if found.damaged]
    if lost:
        raise CheckpointError(
            f"no checkpoint can be used; the newest: {lost[0].why}",
            where=f"{folder.where}/{CHECKPOINTS}/{lost[0].name}",
            remedy="restore the files if you have a copy; or start over with --fresh, which keeps this run's folder",
        )
    result = Result.load(folder)
    if result is not None and result.status == "finished":
        raise InputError("the finished run has no checkpoint to resume from", where=f"run folder {folder.where}")


def _check_data(folder: Folder, job: Job, seen: Source) -> None:
    """Raise `DataError` if the data differs from the description in the run's folder, if there is one."""
    remedy = "move the file away; the data is then compared with what the checkpoints record"
    try:
        then = read_object(folder, DATASET, remedy, _DATASET)
    except FileNotFoundError:
        return
    if then["fingerprint"] != seen.fingerprint:
        differing = differences(seen.describe(), then)
        links = linked_folders(seen)
        if links and seen.rows > then.get("rows", seen.rows):
            raise DataError(
                f"the data has changed since the run started: {'; '.join(differing[:3])}; versions before this one "
                f"followed no links, such as {links[0]}",
                where=seen.named,
                remedy="move the links to another folder to resume; or start over with --fresh to train on their rows",
            )
        raise _other_data(job, seen, then["fingerprint"], f"the run started: {'; '.join(differing[:3])}")


def _check_restored(folder: Folder, *data: Source | None) -> None:
    """Raise `DataError` if the run ended because a data file changed, and the file is not as it was before."""
    with contextlib.suppress(FileNotFoundError):
        first = read_object(folder, CHANGED, "restore the file, or start over with --fresh", _CHANGED)
        for seen in filter(None, data):
            check_restored(seen, first)


def _check_ours(manifest: Manifest, folder: Folder, job: Job, seen: Source) -> None:
    """Refuse a checkpoint of another job or of other data that was copied into the folder."""
    where = f"{folder.where}/{CHECKPOINTS}/{manifest.name}.json"
    if differing := job.same_as(yaml.safe_dump(manifest.job), resumes=True):
        raise CheckpointError(
            f"the checkpoint belongs to another job ({manifest.run}); they differ in {', '.join(differing)}",
            where=where,
            remedy="move it away; or start over with --fresh, which keeps this run's folder",
        )
    if manifest.data["fingerprint"] != seen.fingerprint:
        raise _other_data(job, seen, str(manifest.data["fingerprint"]), f"the checkpoint {manifest.name} was written")


def _other_data(job: Job, seen: Source, fingerprint: str, when: str) -> DataError:
    return DataError(
        f"the data has changed since {when}",
        where=seen.named,
        expected=f"the data with the fingerprint {fingerprint[:12]}, not {seen.fingerprint[:12]}",
        remedy="restore the original files; or start over with --fresh",
    )


def _changes(folder: Folder, sources: Mapping[str, str]) -> str:
    """Name the modules of the task whose source is not as recorded in the run's folder; empty without a record."""
    try:
        then = read_object(folder, TASK, "move the file away; the task's source is then not compared", _TASK)
    except FileNotFoundError:
        return ""
    return ", ".join(changed_modules(then["modules"], sources))


def _refuse_another_task(folder: Folder, sources: Mapping[str, str]) -> None:
    if changed := _changes(folder, sources):
        raise InputError(
            f"the task's source has changed since this run finished: {changed}",
            where=f"run folder {folder.where}",
            remedy="train again with raytrain run JOB --fresh (fresh=True in Python), which moves this run aside; or "
            "choose another name (--set name=...)",
        )


def _warn_of_another_task(folder: Folder, sources: Mapping[str, str]) -> None:
    if changed := _changes(folder, sources):
        print(f"warning: the task's source has changed since this run was last started: {changed}", file=sys.stderr)


def _resumed_rules(past: Past | None) -> Mapping[str, Any] | None:
    manifest = None if past is None else next((one.manifest for one in past.found if one.manifest is not None), None)
    return None if manifest is None else {"rules": manifest.tree.get("rules", {})}


def check_schedule(folder: Folder, past: Past, steps: int) -> None:
    """Warn if a run is to make more steps than its schedule of learning rates is good for.

    Raises `InputError` if the schedule would raise an error. The checkpoint has the schedule, with the length that it
    had when the run began.
    """
    manifest = next((found.manifest for found in past.found if found.manifest is not None), None)
    if manifest is None:
        return
    kind, end = schedule_end(manifest.tree)
    if kind == "OneCycleLR" and steps > end:
        raise InputError(
            f"the run's schedule, OneCycleLR, has {end:,} steps, and fails in the one after them",
            where=f"steps: {steps}",
            expected=f"{end:,} or fewer",
            remedy=f"raytrain resume RUN --fresh-rates, if the task's schedule is as long as the run; {_GROWING}",
        )
    result = Result.load(folder)
    rates = [group["settings"].get("lr") for group in manifest.tree.get("groups") or ()]
    ended = result is not None and result.status == "finished" and rates and all(rate == 0 for rate in rates)
    if kind and steps > end:
        print(
            f"warning: the run's schedule, {kind}, ends after {end:,} steps, and raises the learning rate again in the "
            f"{steps - end:,} after them; {_GROWING}",
            file=sys.stderr,
        )
    elif ended:
        print(
            f"warning: this run finished after {manifest.step + 1} steps with a learning rate of 0: more steps change "
            "no weights, unless the task's schedule depends on the length of the run (self.run.total_steps)",
            file=sys.stderr,
        )


_GROWING = "raytrain_plus.schedules, given self.run.total_steps, and StepLR and ExponentialLR go on in longer runs"


def schedule_end(tree: Mapping[str, Any]) -> tuple[str, int]:
    """Return the kind of a schedule that must not go on for ever, and its steps, by the tree of a checkpoint.

    It may be the last one of several that follow each other. Without such a schedule, the kind is empty.
    """
    state = tree.get("scheduler")
    before = 0
    if isinstance(state, Mapping) and state.get("_milestones") and state.get("_schedulers"):
        before, state = state["_milestones"][-1], state["_schedulers"][-1]
    if not isinstance(state, Mapping):
        return "", 0
    if "total_steps" in state and "_schedule_phases" in state:
        return "OneCycleLR", int(before + state["total_steps"])
    return ("CosineAnnealingLR", int(before + state["T_max"])) if "T_max" in state else ("", 0)


def _spelled(task: str | type) -> str:
    return task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"


def _task_to_send(job: Job) -> bytes | None:
    """Return the pickled task class if the job holds the class itself; None if workers import it by name."""
    if isinstance(job.task, str):
        return None
    module = sys.modules[job.task.__module__]
    named = module.__name__ != "__main__"
    try:
        if named:
            cloudpickle.register_pickle_by_value(module)
        pickled: bytes = cloudpickle.dumps(job.task)
        return pickled
    except Exception as error:
        raise TaskError(
            f"{job.task.__qualname__} cannot be sent to a worker: {type(error).__name__}: {error}",
            where=f"task: {_spelled(job.task)}",
            remedy="keep locks, files, connections and loaded models out of module globals and class attributes; "
            "make them in the task's methods",
        ) from error
    finally:
        if named:
            with contextlib.suppress(ValueError):
                cloudpickle.unregister_pickle_by_value(module)


def _look_at_data(job: Job, roots: Sequence[Path], *, older: bool) -> tuple[Source, Source | None]:
    check_preparable(job, roots)
    prepare_data(job, roots)
    seen, held_out = both_data(job, roots, older=older)
    if older and reads_otherwise(seen):
        print(
            "warning: this run was begun by an older version: as before, fractions of text formats are float64, and "
            "the names of folders no columns",
            file=sys.stderr,
        )
    for one in filter(None, (seen, held_out)):
        check_enough(one, job.data.shards)
    return seen, held_out


def _versions() -> dict[str, str]:
    names = ("ray", "torch", "pyarrow", "numpy")
    ours = {"python": platform.python_version(), "raytrain-plus": VERSION}
    return {**ours, **{name: version(name) for name in names}}
