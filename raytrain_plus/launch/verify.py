"""Run a job's first steps on several numbers of workers, killing some, and compare the results bit by bit."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raytrain_plus.audit.audit import audit
from raytrain_plus.data.dataset import training_data
from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.prepare import check_preparable, prepare_data
from raytrain_plus.errors import DamagedError, InputError, RunError
from raytrain_plus.job.settings import Job
from raytrain_plus.launch.cluster import connected
from raytrain_plus.launch.fault import LOOK_S, ProcessesOfRun, Who, kill_process
from raytrain_plus.launch.runner import run
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.observe.run_progress import plural
from raytrain_plus.parallel.sizing import size_table
from raytrain_plus.runs.history import load_history
from raytrain_plus.state.stored.checkpoint import read_tensors
from raytrain_plus.state.stored.manifest import Manifest
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder

TRIES = 3
"""Attempts per trial until all planned kills happen: if steps are short, a kill can come too late."""
CULPRITS = (
    "random numbers from the task's own generator, which is not seeded (use the global ones of torch, NumPy or "
    "Python), or drawn in `collate` (use data.transform, which receives a generator)",
    "an unregistered buffer or attribute that the loss changes in place",
    "an operation whose result depends on timing (a nondeterministic kernel, the order of a set, the clock)",
)
"""Common reasons why a task is not reproducible, most frequent first."""


@dataclass(frozen=True, slots=True)
class Kills:
    """How many processes are killed in a run."""

    workers: int = 0
    """In runs with more than one."""
    controllers: int = 0

    @property
    def all(self) -> int:
        """All of them."""
        return self.workers + self.controllers


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One run of the first steps."""

    workers: int
    """Members of its largest view."""
    to_form: int
    """Members that it should have had."""
    to_kill: int
    """Processes that should be killed during the run."""
    killed: int
    """Processes that were killed before it ended."""
    state_sha256: str
    losses: tuple[float, ...]
    metrics: dict[str, float]
    audit_clean: bool
    seconds: float

    @property
    def as_asked(self) -> bool:
        """Whether it had the planned number of workers and all planned kills."""
        return self.workers == self.to_form and self.killed == self.to_kill


@dataclass(frozen=True, slots=True)
class Comparison:
    """The combined result of all trials."""

    name: str
    steps: int
    trials: tuple[ComparedRun, ...]
    differs: str
    """The first difference, in words; empty if there is none."""

    @property
    def agree(self) -> bool:
        """Whether all trials ran as planned, gave the same bits, and used every row once."""
        return not self.differs and all(trial.as_asked and trial.audit_clean for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        return {"agree": self.agree, **asdict(self), "culprits": CULPRITS if self.differs else ()}

    def lines(self) -> list[str]:
        """Return the comparison as lines of text."""
        said = [f"{self.name}: its first {self.steps} steps, reduction: exact"]
        for trial in self.trials:
            who = f"{_of(trial.workers, trial.to_form)} worker{'s' * (trial.to_form != 1)}"
            if trial.to_kill:
                who += f", {_of(trial.killed, trial.to_kill)} killed"
            rows = "audit clean" if trial.audit_clean else "AUDIT NOT CLEAN"
            said.append(
                f"  {who:24} state {trial.state_sha256[:16]}  last loss {trial.losses[-1]!r:22}  {rows}  "
                f"{trial.seconds:.1f} s"
            )
        if self.differs:
            said += [f"  the runs differ: {self.differs}", "  common causes:"]
            said += [f"    - {culprit}" for culprit in CULPRITS]
        elif self.agree:
            said.append("  all runs gave the same bits and used every row once")
        if any(trial.workers != trial.to_form for trial in self.trials):
            said.append("  a run never had all its workers: choose sizes that fit on the cluster")
        if any(trial.killed != trial.to_kill for trial in self.trials):
            said.append("  a run ended before all planned kills: use more --steps")
        return said


def _of(done: int, wanted: int) -> str:
    return f"{done}" if done == wanted else f"{done} of {wanted}"


def verify(
    job: Job,
    sizes: Sequence[int],
    *,
    kills: int = 0,
    controller_kills: int = 0,
    steps: int = 20,
    address: str | None = None,
    roots: Sequence[Path] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run the first `steps` steps of `job` on each number of workers in `sizes` and compare the results.

    In each run with more than one worker, `kills` workers are killed; in each run, the controller `controller_kills`
    times. `tell` receives progress messages. Raises `InputError` if the job cannot be verified, `RunError` if a run
    fails.
    """
    planned = Kills(kills, controller_kills)
    _check(job, sizes)
    largest = max(sizes)
    with (
        tempfile.TemporaryDirectory(prefix="raytrain-verify-") as folder,
        connected(replace(job, workers=replace(job.workers, min=1, max=largest, spares=0)), address),
    ):
        # The runs are compared, and a profile may lie beyond their end.
        short = _shortened(replace(job, profile=None), steps, roots)
        trials = []
        for number, size in enumerate(sizes):
            tell(f"{size} worker{'s' * (size != 1)} ...")
            for again in range(TRIES):
                trial = _trial(short, Path(folder), f"{number}-{again}", size, _of_size(planned, size), roots)
                if trial.killed == trial.to_kill:
                    break
                more = "; retrying" if again < TRIES - 1 else ""
                tell(f"the run ended after {trial.killed} of {trial.to_kill} kills{more}")
            trials.append(trial)
        differs = ""
        for number, trial in enumerate(trials):
            if not _same(trials[0], trial):
                pair = (sizes[0], _of_size(planned, sizes[0])), (sizes[number], _of_size(planned, sizes[number]))
                differs = _first_difference(short, Path(folder), trials[0], trial, pair, roots, tell)
                break
    return Comparison(job.name, len(trials[0].losses), tuple(trials), differs)


def _of_size(kills: Kills, size: int) -> Kills:
    """Return the kills in a run with that many workers."""
    return kills if size > 1 else replace(kills, workers=0)


def _check(job: Job, sizes: Sequence[int]) -> None:
    if job.reduction != "exact":
        raise InputError(
            "only reduction: exact gives the same bits on any number of workers",
            where=f"reduction: {job.reduction}",
            remedy="--set reduction=exact",
        )
    if len(sizes) < 2:
        raise InputError(
            "one run has nothing to compare with", where="--workers", remedy="give at least two sizes: --workers 1,2"
        )
    for size in sizes:
        most = job.data.shards * job.parallel.width
        if not 1 <= size <= most:
            raise InputError(
                f"{size} workers cannot train this job",
                where="--workers",
                expected=f"from 1 to {'data.shards = ' * (not job.parallel.in_parts)}{most}",
            )


def _shortened(job: Job, steps: int, roots: Sequence[Path]) -> Job:
    """Return the job with that many steps, or unchanged if it has fewer."""
    search = [Path.cwd(), *roots]
    check_preparable(job, search)
    prepare_data(job, search)
    whole = sample_order_of(job, training_data(job, search)).steps
    return job if steps >= whole else replace(job, steps=steps, epochs=None)


def _trial(job: Job, folder: Path, name: str, size: int, kills: Kills, roots: Sequence[Path]) -> ComparedRun:
    # With fewer workers than a model replica has stages, use fewer stages.
    stages = min(job.parallel.pipeline, size)
    sized = replace(
        job,
        name=name,
        workers=replace(job.workers, min=1 if kills.workers else size, max=size, spares=0),
        parallel=replace(job.parallel, pipeline=stages, partition=job.parallel.first_layers(stages)),
        storage=str(folder),
        trackers=(),
    )
    run_folder = LocalFolder(folder / name)
    killer = _Killer(run_folder, kills, job.steps or 2 * kills.all)
    with killer:
        result = run(sized, quiet=True, fresh=True, roots=roots)
    if result.status != "finished":
        raise RunError(f"the run on {plural(size, 'worker')} {result.status}: {result.error or 'by a signal'}")
    assert result.state_sha256 is not None
    return ComparedRun(
        workers=_present(run_folder).most,
        to_form=size_table(sized).formed[size].size,
        to_kill=kills.all,
        killed=killer.killed,
        state_sha256=result.state_sha256,
        losses=tuple(event["loss"] for event in read_events(run_folder) if event["kind"] == "step_committed"),
        metrics=dict(result.metrics),
        audit_clean=audit(result.path).clean,
        seconds=result.seconds,
    )


def _same(one: ComparedRun, other: ComparedRun) -> bool:
    # Compare as text, so that NaN equals NaN.
    return repr((one.state_sha256, one.losses, one.metrics)) == repr((other.state_sha256, other.losses, other.metrics))


def _first_difference(
    job: Job,
    folder: Path,
    one: ComparedRun,
    other: ComparedRun,
    pair: tuple[tuple[int, Kills], tuple[int, Kills]],
    roots: Sequence[Path],
    tell: Callable[[str], None],
) -> str:
    """Return the first step after which two runs differ in state, and the first tensor that differs then, in words.

    A step's loss depends on the state before the step, so the losses bound the step from above. A binary search then
    runs the job again up to steps in between.
    """
    pairs = enumerate(zip(one.losses, other.losses, strict=False))
    differing = next((step for step, (mine, theirs) in pairs if repr(mine) != repr(theirs)), None)
    if one.state_sha256 == other.state_sha256:
        what = "metrics of an evaluation" if differing is None else f"loss of step {differing}"
        return f"only in the {what}"
    high = len(one.losses) - 1 if differing is None else differing
    low = 0
    found = ""
    while low <= high:
        middle = (low + high) // 2
        tell(f"the runs differ; comparing the states after step {middle} ...")
        names = [f"to-{middle}-{side}" for side in ("one", "other")]
        cut = replace(job, steps=middle + 1, epochs=None)
        try:
            left, right = (
                _trial(cut, folder, name, size, kills if middle else Kills(), roots)
                for name, (size, kills) in zip(names, pair, strict=True)
            )
            if left.state_sha256 == right.state_sha256:
                low = middle + 1
                continue
            tensor = _first_tensor([LocalFolder(folder / name) for name in names], middle)
        except (RunError, DamagedError, OSError) as error:
            return f"at step {high} or before; the search for the first difference failed: {error}"
        found = f"after step {middle}, first in {tensor}"
        high = middle - 1
    return found or "not every time: when run again, the states agree after every step"


def _first_tensor(runs: Sequence[Folder], step: int) -> str:
    """Return the first tensor, in words, that differs between the final states of two runs, after `step`.

    Weights and buffers come first, by name, then their optimizer state. Raises `RunError` if a run has not kept its
    final state, or no tensor differs.
    """
    ends = [(run, _kept(run, step)) for run in runs]
    names = {name for _, manifest in ends for name in manifest.tensors}
    for name in sorted(names, key=lambda name: (name.startswith("optim/"), name.partition("/")[2])):
        mine, theirs = (
            read_tensors(run, manifest, {name: None})[name] if name in manifest.tensors else None
            for run, manifest in ends
        )
        if mine is None or theirs is None or mine[:2] != theirs[:2] or mine[2].tobytes() != theirs[2].tobytes():
            kind, _, rest = name.partition("/")
            of, _, what = rest.rpartition("/")
            return f"the optimizer's '{what}' of '{of}'" if kind == "optim" else f"'{rest}'"
    raise RunError(f"the states after step {step} have different hashes but equal tensors; please report this")


def _kept(run: Folder, step: int) -> Manifest:
    for found in load_history(run).found:
        if found.manifest is not None and found.manifest.step == step:
            return found.manifest
    raise RunError(f"the state after step {step} was not kept in {run.where}")


class _Killer:
    """Kill members and controllers of a run at randomly drawn steps, while it is open."""

    def __init__(self, run: Folder, kills: Kills, steps: int) -> None:
        self._run_folder = run
        self._draw = random.Random(kills.workers)
        workers: list[Who] = ["worker"] * kills.workers
        controllers: list[Who] = ["controller"] * kills.controllers
        # In the first half, so that the run does not end before the last kill.
        self._moments = sorted((self._draw.randrange(max(1, steps // 2)), who) for who in (*workers, *controllers))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)
        self._error: BaseException | None = None
        self.killed = 0
        """Kills that the run has reported."""

    def __enter__(self) -> _Killer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None and exception[0] is None:
            raise self._error

    def _run(self) -> None:
        try:
            for moment, who in self._moments:
                while True:
                    if self._over.wait(LOOK_S):
                        return
                    now = _present(self._run_folder)
                    # Never kill two at once: one member that holds the state must survive.
                    able = now.controller if who == "controller" else len(now.members) > 1
                    if now.whole and now.committed >= moment and able:
                        break
                victim = now.controller if who == "controller" else self._draw.choice(now.members)
                kill_process(victim["node"], victim["pid"])
                while (now.lost, now.replaced) == _counts(self._run_folder):
                    if self._over.wait(LOOK_S):
                        return
                self.killed += 1
        except BaseException as error:
            self._error = error


def _counts(run: Folder) -> tuple[int, int]:
    now = _present(run)
    return now.lost, now.replaced


def _present(run: Folder) -> ProcessesOfRun:
    now = ProcessesOfRun()
    for event in read_events(run):
        now.add(event)
    return now
