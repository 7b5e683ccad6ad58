"""Report the status of a run from its folder alone: its state, its steps, its checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raytrain_plus.errors import InputError
from raytrain_plus.observe.expert_use import experts_text
from raytrain_plus.observe.gpu_use import gpu_text
from raytrain_plus.observe.run_progress import plural
from raytrain_plus.result import Result, resume_command, saved_text
from raytrain_plus.runs.folder import LEASE_S, LEFT, lease_holder, lost_holder, run_exists, runs_beside, single_writer
from raytrain_plus.runs.history import Past, load_history
from raytrain_plus.state.stored.manifest import Manifest, best_of
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import split
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.size_text import size_text

DIED = "unfinished (its controller died"
"""Prefix of the state of a run whose controller died."""
_SHARE = has.object_of(step=has.whole(0), generation=has.whole(0), writer=has.whole(0), writers=has.whole(1))
_LEFT = has.object_of(written=has.maybe(_SHARE))
"""The shape of what a worker leaves: see `workers.states.leftover`."""


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """A checkpoint, complete or not."""

    name: str
    step: int
    age_s: float
    bytes: int
    state: str
    """`complete`, or why it is not complete."""
    best: bool = False
    """Whether it is the best one, by the metric of `checkpoint.keep_best`."""


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker runs."""

    worker: str
    pid: int
    node: str
    gpu: Mapping[str, Any] | None = None
    """The newest reading of its GPU: `utilisation`, `memory_bytes`, `power_w`, `age_s`; None if there is none."""


@dataclass(frozen=True, slots=True)
class Status:
    """The status of a run."""

    run: str
    state: str
    """`running` (with its process), `finished`, `stopped`, `failed`, or `unfinished` (with the process that died)."""
    steps: int
    """Number of committed steps."""
    checkpoints: tuple[CheckpointStatus, ...]
    single_writer: bool
    """Whether the storage prevents two controllers from writing to the run."""
    resume: str = ""
    """The command that resumes the run, if its controller died."""
    incomplete_from: int | None = None
    """The first step, from 0, whose events are missing; None if none are, or while the run is alive."""
    saved_step: int | None = None
    """The step, from 0, of the newest complete checkpoint; None if there is none."""
    saved: str | None = None
    """Whether the state that a stopped run ended with was saved, in words; None for other runs."""

    workers: tuple[WorkerPlace, ...] = ()
    """The workers that train, if the run is alive."""
    experts: Mapping[str, Any] = field(default_factory=dict)
    """The newest use of the experts of each layer that has any: `load`, `max_vio`, `dropped`, `entropy`."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return lines of text for a person."""
        said = [f"{self.run}: {self.state}; {plural(self.steps, 'step')}"]
        if self.incomplete_from is not None:
            said.append(f"  the record (events.ndjson) is incomplete: it ends after step {self.incomplete_from:,}")
        said += [f"  {at.worker}: process {at.pid} on the node {at.node[:12]}{_gpu(at)}" for at in self.workers]
        if self.experts:
            said.append(f"  experts: {experts_text(self.experts)}")
        if not self.checkpoints:
            said.append("  no checkpoints yet")
        else:
            said.append(f"  {'checkpoint':<24}{'after step':>12}{'age':>12}{'size':>12}  state")
        for one in self.checkpoints:
            said.append(
                f"  {one.name:<24}{one.step + 1:>12,}{_spelled_age(one.age_s):>12}{size_text(one.bytes):>12}"
                f"  {one.state}{', the best' * one.best}"
            )
        if self.saved is not None:
            said.append(f"  {self.saved}")
        if self.resume:
            said.append(f"  resume with: {self.resume}")
        if not self.single_writer:
            said.append("  single writer not enforced: this storage cannot tell which of two controllers came first")
        return said


def status(run: Folder) -> Status:
    """Return the status of the run in this folder."""
    # Read the state and the result first: the events of a run that has ended by then are all written.
    state, result = state_of(run), Result.load(run)
    past, now = load_history(run), time.time()
    steps, gap = past.committed + 1, None if state.startswith("running") else _gap(past, result)
    best = best_of([one.manifest for one in past.found if one.manifest is not None])
    kept = tuple(
        CheckpointStatus(
            one.name,
            one.step,
            max(0.0, now - _moment(one.manifest, one.time)),
            one.bytes,
            one.why or "complete",
            best is not None and one.manifest is best,
        )
        for one in past.found
    )
    resume = resume_command(run) if state.startswith("unfinished (") else ""
    if gap is not None:
        steps = max(steps, _reached(past, result) + 1)
    saved = saved_text(result) if result is not None and state == result.status else None
    alive = past.members if state.startswith("running") else ()
    return Status(
        split(run.address)[1],
        state,
        steps,
        kept,
        single_writer(run),
        resume,
        gap,
        saved_step=_newest(past),
        saved=saved,
        workers=tuple(_place(one, past, now) for one in alive),
        experts=past.experts,
    )


def _place(member: Mapping[str, Any], past: Past, now: float) -> WorkerPlace:
    name = member["worker"]
    time_s, use = past.gpus.get(name, (0.0, None))
    gpu = None if use is None else {**use, "age_s": max(0.0, now - time_s)}
    return WorkerPlace(name, member["pid"], member["node"], gpu)


def _gpu(at: WorkerPlace) -> str:
    text = "" if at.gpu is None else gpu_text(at.gpu)
    return f"; {text}, {_spelled_age(at.gpu['age_s'])} ago" if at.gpu is not None and text else ""


def newest_saved(run: Folder) -> int | None:
    """Return the step of the newest complete checkpoint in a run's folder; None if there is none."""
    return _newest(load_history(run)) if run_exists(run) else None


def _newest(past: Past) -> int | None:
    return next((found.step for found in past.found if found.manifest is not None), None)


def listed(storage: str) -> tuple[dict[str, Any], list[str]]:
    """Return the state of each run in a storage folder, by name, and the same as lines of text.

    Raises `InputError` if there are none, or they cannot be listed.
    """
    folder = open_folder(storage)
    names = sorted(runs_beside(folder.path))
    if not names:
        raise InputError(
            "there are no runs" if folder.path is not None else "runs are listed on a file system only",
            where=f"storage: {folder.where}",
            remedy="give a run, or another folder with --storage",
        )
    states = {name: state_of(folder.inside(name)) for name in names}
    return {"runs": states}, [f"{name}: {state}" for name, state in states.items()]


def _reached(past: Past, result: Result | None) -> int:
    """Return the newest step that the files other than the events record."""
    saved = [one.step for one in past.found if one.manifest is not None]
    return max([-1 if result is None else result.steps - 1, *saved, *(step for _, step in past.entered)])


def _gap(past: Past, result: Result | None) -> int | None:
    """Return the first step whose events are missing, by the files that are written after them; None if none are."""
    generations = [one.generation for one in past.found if one.manifest is not None]
    newest = max([*generations, *(generation for generation, _ in past.entered)], default=-1)
    missing = _reached(past, result) > past.committed or newest > past.recorded
    return past.committed + 1 if missing else None


def state_of(run: Folder) -> str:
    """Return only the state, as in `Status`; this is fast."""
    # Read in this order: a controller that ends writes its result before it removes its lease.
    lost, holder, result = lost_holder(run), lease_holder(run), Result.load(run)
    if holder:
        return f"running ({holder})"
    if result is not None:
        return result.status
    if lost is None:
        return "unfinished"
    if lost.lives is False and lost.unresponsive_s <= LEASE_S:
        return f"running (its controller, {lost.process}, died and is being replaced)"
    if lost.lives is False:
        return f"{DIED}: {lost.process})"
    expired = f"has not renewed its lease for {lost.unresponsive_s:.0f} s"
    return f"running ({lost.process}, which {expired})" if lost.lives else f"unfinished ({lost.process} {expired})"


def what_is_kept(run: Folder) -> str:
    """Return what is left of a run whose controller died, and the command that resumes it, in words."""
    try:
        if not run_exists(run):
            return "nothing was written yet: run the job again"
        if _has_last_state(run):
            return f"its workers have written the state that they had; resume with: {resume_command(run)}"
        newest = next((found for found in load_history(run).found if found.manifest is not None), None)
    except (OSError, InputError) as error:
        return f"the run's checkpoints cannot be read ({error}); see: raytrain status '{run.where}'"
    if newest is None:
        return f"no checkpoint is complete, so it restarts from its first step; resume with: {resume_command(run)}"
    return f"the checkpoint after step {newest.step + 1:,} is kept; resume with: {resume_command(run)}"


def _has_last_state(run: Folder) -> bool:
    """Return whether workers have left a whole state: the shares of all its writers."""
    shares = []
    for file in run.files(LEFT):
        # It may be gone by now, and nobody uses one that is damaged.
        with contextlib.suppress(FileNotFoundError, InputError):
            shares.append(read_object(run, file, "", _LEFT)["written"])
    written = [share for share in shares if share is not None]
    together = {(share["step"], share["generation"], share["writers"]) for share in written}
    return len(together) == 1 and {share["writer"] for share in written} == {*range(written[0]["writers"])}


def _moment(manifest: Manifest | None, newest_file: float) -> float:
    return newest_file if manifest is None else manifest.time


def _spelled_age(seconds: float) -> str:
    for length, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {word}"
    return f"{seconds:.0f} s"
