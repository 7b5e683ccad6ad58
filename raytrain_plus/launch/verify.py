"""Runs a job's first steps on several numbers of workers, with real deaths, and says whether the bits agree."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from raytrain_plus.data.audit import audit
from raytrain_plus.data.of_job import line_of
from raytrain_plus.data.prepare import prepare
from raytrain_plus.data.source import index
from raytrain_plus.errors import DamagedError, InputError, RunError
from raytrain_plus.job.settings import Job
from raytrain_plus.launch.cluster import connected
from raytrain_plus.launch.fault import kill_process
from raytrain_plus.launch.runner import run
from raytrain_plus.observe.events import read_events
from raytrain_plus.parallel.sizing import cuts_of, shapes_of
from raytrain_plus.runs.history import look_back
from raytrain_plus.state.checkpoint import read_tensors
from raytrain_plus.state.manifest import Manifest
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.local import LocalFolder

LOOK_S = 0.01
"""Seconds between two looks at what a run has told."""
TRIES = 3
"""How often a run is made until all die that are to: where steps are short, a death can come too late."""
CULPRITS = (
    "random numbers from a generator of its own, which no key seeds (use torch's, NumPy's or Python's global ones), or "
    "drawn in `collate` (use data.transform, which is given a generator)",
    "a buffer or an attribute that the loss changes in place, and that is not registered",
    "an operation whose result depends on timing (a nondeterministic kernel, a set's order, the clock)",
)
"""What makes a task give other bits, most frequent first."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of the first steps."""

    workers: int
    """Members of its largest view."""
    to_form: int
    """Members that it was to have."""
    to_kill: int
    """Workers that were to be killed while it ran."""
    killed: int
    """Those that were, before it ended."""
    state_sha256: str
    losses: tuple[float, ...]
    metrics: dict[str, float]
    audit_clean: bool
    seconds: float

    @property
    def as_asked(self) -> bool:
        """Whether it was the run that was to be made: of that many workers, with all the deaths."""
        return self.workers == self.to_form and self.killed == self.to_kill


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the trials say together."""

    name: str
    steps: int
    trials: tuple[Trial, ...]
    differs: str
    """Where the first difference lies, in words; empty where there is none."""

    @property
    def agree(self) -> bool:
        """Whether all were made as asked, gave the same bits, and used the same rows."""
        return not self.differs and all(trial.as_asked and trial.audit_clean for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return {"agree": self.agree, **asdict(self), "culprits": CULPRITS if self.differs else ()}

    def lines(self) -> list[str]:
        """For a person."""
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
            said += [f"  they differ: {self.differs}", "  the usual culprits:"]
            said += [f"    - {culprit}" for culprit in CULPRITS]
        elif self.agree:
            said.append("  every run gave the same bits, and used every row once")
        if any(trial.workers != trial.to_form for trial in self.trials):
            said.append("  a run never had the workers that it was to have: name sizes that the cluster has room for")
        if any(trial.killed != trial.to_kill for trial in self.trials):
            said.append("  a run ended before all were killed that were to be: give it more --steps")
        return said


def _of(done: int, wanted: int) -> str:
    return f"{done}" if done == wanted else f"{done} of {wanted}"


def verify(
    job: Job,
    sizes: Sequence[int],
    *,
    kills: int = 0,
    steps: int = 20,
    address: str | None = None,
    roots: Sequence[Path] = (),
    tell: Callable[[str], None] = lambda line: None,
) -> Verdict:
    """Runs the first `steps` steps of `job` on each number of workers in `sizes`; where there is more than one worker,
    `kills` of them are killed.

    `tell` is told what is being done. Raises `InputError` where the job cannot be verified, `RunError` where a run
    fails.
    """
    _check(job, sizes)
    largest = max(sizes)
    with (
        tempfile.TemporaryDirectory(prefix="raytrain-verify-") as folder,
        connected(replace(job, workers=replace(job.workers, min=1, max=largest, spares=0)), address),
    ):
        short = _shortened(job, steps, roots)
        trials = []
        for number, size in enumerate(sizes):
            tell(f"{size} worker{'s' * (size != 1)} ...")
            for again in range(TRIES):
                trial = _trial(short, Path(folder), f"{number}-{again}", size, kills if size > 1 else 0, roots)
                if trial.killed == trial.to_kill:
                    break
                more = "; once more" if again < TRIES - 1 else ""
                tell(f"it ended when {trial.killed} of {trial.to_kill} were killed{more}")
            trials.append(trial)
        differs = ""
        for number, trial in enumerate(trials):
            if not _same(trials[0], trial):
                pair = ((sizes[0], trials[0].to_kill), (sizes[number], trial.to_kill))
                differs = _first_difference(short, Path(folder), trials[0], trial, pair, roots, tell)
                break
    return Verdict(job.name, len(trials[0].losses), tuple(trials), differs)


def _check(job: Job, sizes: Sequence[int]) -> None:
    if job.reduction != "exact":
        raise InputError(
            "only an exact sum has the same bits on any number of workers",
            where=f"reduction: {job.reduction}",
            remedy="--set reduction=exact",
        )
    if len(sizes) < 2:
        raise InputError(
            "there is nothing to compare a single run with", where="--workers", remedy="name two sizes: --workers 1,2"
        )
    for size in sizes:
        most = job.data.shards * job.parallel.pipeline
        if not 1 <= size <= most:
            raise InputError(
                f"{size} workers cannot train this job",
                where="--workers",
                expected=f"from 1 to {'data.shards = ' * (job.parallel.pipeline == 1)}{most}",
            )


def _shortened(job: Job, steps: int, roots: Sequence[Path]) -> Job:
    """The job with that many steps, or its own where it has fewer."""
    prepare(job.data.prepare, job.data.path, [Path.cwd(), *roots])
    whole = line_of(job, index(job.data.path)).steps
    return job if steps >= whole else replace(job, steps=steps, epochs=None)


def _trial(job: Job, folder: Path, name: str, size: int, kills: int, roots: Sequence[Path]) -> Trial:
    sized = replace(
        job,
        name=name,
        workers=replace(job.workers, min=1 if kills else size, max=size, spares=0),
        # Fewer workers than a cell has hold the model in fewer stages.
        parallel=replace(job.parallel, pipeline=min(job.parallel.pipeline, size)),
        storage=str(folder),
        trackers=(),
    )
    run_folder = LocalFolder(folder / name)
    killer = _Killer(run_folder, kills, job.steps or 2 * kills)
    with killer:
        result = run(sized, quiet=True, fresh=True, roots=roots)
    if result.status != "finished":
        raise RunError(f"the run on {size} workers {result.status}: {result.error or 'by a signal'}")
    assert result.state_sha256 is not None
    return Trial(
        workers=_present(run_folder).most,
        to_form=shapes_of(sized, cuts_of(sized))[size].size,
        to_kill=kills,
        killed=killer.killed,
        state_sha256=result.state_sha256,
        losses=tuple(event["loss"] for event in read_events(run_folder) if event["kind"] == "step_committed"),
        metrics=dict(result.metrics),
        audit_clean=audit(result.path).clean,
        seconds=result.seconds,
    )


def _same(one: Trial, other: Trial) -> bool:
    # As text: what is not a number is the same as itself.
    return repr((one.state_sha256, one.losses, one.metrics)) == repr((other.state_sha256, other.losses, other.metrics))


def _first_difference(
    job: Job,
    folder: Path,
    one: Trial,
    other: Trial,
    pair: tuple[tuple[int, int], tuple[int, int]],
    roots: Sequence[Path],
    tell: Callable[[str], None],
) -> str:
    """The first step after which two runs have another state, and the first tensor that differs then.

    A step's loss tells of the state before it: the search runs the job to ever closer steps.
    """
    pairs = enumerate(zip(one.losses, other.losses, strict=False))
    differing = next((step for step, (mine, theirs) in pairs if repr(mine) != repr(theirs)), None)
    if one.state_sha256 == other.state_sha256:
        what = "figures of an evaluation" if differing is None else f"loss of step {differing}"
        return f"in the {what} alone"
    high = len(one.losses) - 1 if differing is None else differing
    low = 0
    found = ""
    while low <= high:
        middle = (low + high) // 2
        tell(f"they differ; looking at the state after step {middle} ...")
        names = [f"to-{middle}-{side}" for side in ("one", "other")]
        cut = replace(job, steps=middle + 1, epochs=None)
        try:
            left, right = (
                _trial(cut, folder, name, size, kills if middle else 0, roots)
                for name, (size, kills) in zip(names, pair, strict=True)
            )
            if left.state_sha256 == right.state_sha256:
                low = middle + 1
                continue
            tensor = _first_tensor([LocalFolder(folder / name) for name in names], middle)
        except (RunError, DamagedError, OSError) as error:
            return f"up to step {high}; the search for the first difference failed: {error}"
        found = f"after step {middle}, first in {tensor}"
        high = middle - 1
    return found or "not every time: run anew, the states agree after every step"


def _first_tensor(runs: Sequence[Folder], step: int) -> str:
    """The first tensor, in words, that differs between the states after `step` that two runs ended with: weights and
    buffers by name, then what the optimizer has of them. Raises `RunError` where a run has not kept it."""
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
    raise RunError(f"the states after step {step} have other hashes and the same tensors; please report this")


def _kept(run: Folder, step: int) -> Manifest:
    for found in look_back(run).found:
        if found.manifest is not None and found.manifest.step == step:
            return found.manifest
    raise RunError(f"the state after step {step} was not kept in {run.where}")


class _Killer:
    """Kills members of a run at moments drawn by chance, while it is open."""

    def __init__(self, run: Folder, kills: int, steps: int) -> None:
        self._run_folder = run
        self._draw = random.Random(kills)
        # Early enough that the run does not end before.
        self._moments = sorted(self._draw.randrange(max(1, steps // 2)) for _ in range(kills))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)
        self._error: BaseException | None = None
        self.killed = 0
        """Deaths that the run has told of."""

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
            for moment in self._moments:
                while True:
                    if self._over.wait(LOOK_S):
                        return
                    now = _present(self._run_folder)
                    # One that holds the state is to be left: no two at once.
                    if now.whole and now.committed >= moment and len(now.members) > 1:
                        break
                victim = self._draw.choice(now.members)
                kill_process(victim["node"], victim["pid"])
                while _present(self._run_folder).lost == now.lost:
                    if self._over.wait(LOOK_S):
                        return
                self.killed += 1
        except BaseException as error:
            self._error = error


@dataclass
class _Now:
    """What a run has told."""

    members: list[dict[str, Any]]
    whole: bool = False
    """Nobody was lost since its newest view was formed."""
    committed: int = -1
    lost: int = 0
    most: int = 0
    """Members of its largest view."""


def _present(run: Folder) -> _Now:
    now = _Now([])
    for event in read_events(run):
        if event["kind"] == "view_formed":
            now.members, now.whole = event["members"], True
            now.most = max(now.most, len(now.members))
        elif event["kind"] == "worker_lost":
            now.whole = False
            now.lost += 1
        elif event["kind"] == "step_committed":
            now.committed = event["step"]
    return now
