"""Check whether a job can resume the run in a folder: its data, its checkpoints, its task and its schedule."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.parquet_source import check_restored
from raytrain_plus.data.sources.source import Source, linked_folders
from raytrain_plus.errors import CheckpointError, DamagedError, DataError, InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_source import changed_modules
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import CHANGED, DATASET, TASK
from raytrain_plus.runs.history import Past
from raytrain_plus.state.stored.manifest import FOLDER as CHECKPOINTS
from raytrain_plus.state.stored.manifest import Manifest
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder

_DATASET = has.object_of(
    fingerprint=has.text,
    files=has.list_of(has.object_of(path=has.text, bytes=has.whole(0), footer_sha256=has.text)),
)


_TASK = has.object_of(modules=has.table_of(has.text))
_CHANGED = has.object_of(
    path=has.text, file=has.text, bytes=has.whole(0), modified_ns=has.whole(0), footer_sha256=has.text
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


def check_unharmed(folder: Folder, *data: Source | None) -> None:
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


def refuse_another_task(folder: Folder, sources: Mapping[str, str]) -> None:
    """Raise `InputError` if the source of a finished run's task has changed."""
    if changed := _changes(folder, sources):
        raise InputError(
            f"the task's source has changed since this run finished: {changed}",
            where=f"run folder {folder.where}",
            remedy="train again with raytrain run JOB --fresh (fresh=True in Python), which moves this run aside; or "
            "choose another name (--set name=...)",
        )


def warn_of_another_task(folder: Folder, sources: Mapping[str, str]) -> None:
    """Warn if the source of the task has changed."""
    if changed := _changes(folder, sources):
        print(f"warning: the task's source has changed since this run was last started: {changed}", file=sys.stderr)


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
