"""Check a job before it runs: its sizes, its data, and its task, which a trial may run (`checks.trial_process`)."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_plus.checks.promises import promises_of
from raytrain_plus.checks.trial_process import Trying
from raytrain_plus.credentials import without_credentials
from raytrain_plus.data.dataset import held_out_data, training_data
from raytrain_plus.data.of_job import (
    SourceShare,
    check_profiled,
    keeps_rows,
    odd_sizes,
    read_factor_of,
    sample_order_of,
    source_shares,
    training_paths,
)
from raytrain_plus.data.paths.files import data_exists
from raytrain_plus.data.paths.page_checksum import HOW, LOOKED_AT, without_checksums
from raytrain_plus.data.prepare import check_preparable
from raytrain_plus.data.sources.alike import alike
from raytrain_plus.data.sources.source import check_enough
from raytrain_plus.errors import InputError
from raytrain_plus.install.horovod_usable import choose_collective
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import as_task_error, build_task, load_user_code, prints_hidden, run_facts
from raytrain_plus.membership.mesh import rank_counts
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.observe.run_progress import plural
from raytrain_plus.observe.trackers.trackers import check_installed
from raytrain_plus.parallel.pipeline.layout import result_depends_on_partition
from raytrain_plus.parallel.sizing import many_passes, sharded_lines, share_of, size_table, unused_workers
from raytrain_plus.planner.expected import expected_steps
from raytrain_plus.storage.address import is_address
from raytrain_plus.storage.place import Place, place_of
from raytrain_plus.storage.size_text import size_text
from raytrain_plus.training.model.layer_names import layers_of
from raytrain_plus.training.model.weights_check import check_files

if TYPE_CHECKING:
    from raytrain_plus.parallel.pipeline.forecast import Forecast
    from raytrain_plus.parallel.pipeline.partition import Layer
    from raytrain_plus.task import Task
    from raytrain_plus.trial.task_trial import Trial

NAMED = 3
"""Maximum number of file names in a message."""
FACTOR_WARNING = 2.0
"""Read factor above which to warn: row groups are much longer than a shard's span, and most reads are wasted."""
STORAGE_S = 8.0
"""Maximum seconds for a storage that is an address to answer; its client would retry for minutes."""
ASK = """
import sys
from raytrain_plus.errors import InputError
from raytrain_plus.storage.folders.open import open_folder
try:
    open_folder(sys.stdin.read()).read("job.yaml")
except FileNotFoundError:
    pass
except (OSError, InputError) as error:
    print(error)
    sys.exit(2 if isinstance(error, InputError) else 1)
"""


@dataclass(frozen=True, slots=True)
class Size:
    """What one number of workers means for a job."""

    workers: int
    shards: int
    """Shards of the replica that hosts the most; they determine the duration of a step."""
    efficiency: float
    """Used share of the workers' time: shards / (replicas x `shards`), times the share of workers that have a place."""
    replicas: int = 1
    """Model replicas."""
    stages: int = 1
    ranks: int = 1
    """Workers that share the tensor slices of a stage."""


@dataclass(frozen=True, slots=True)
class Report:
    """The report of `raytrain validate`."""

    name: str
    sizes: tuple[Size, ...]
    rows: int | None
    """None if the data has yet to be prepared; so are `units`, `steps` and `read_factor`."""
    units: int | None
    """Row groups; None also for a dataset that is read by index, as is `read_factor`."""
    steps: int | None
    read_factor: float | None
    """Mean number of times that a row group is read in an epoch."""
    left_out: str = ""
    """Which numbers of workers the job allows but never uses, and why; empty if it can use all."""
    cut: Forecast | None = None
    """The partition into stages at the largest number of workers; None for a model in one stage."""
    misfits: tuple[str, ...] = ()
    """The possible numbers of stages for which this machine's memory is too small, each with the reason."""
    files: int = 0
    """Data files, including held-out ones, that were checked for page checksums."""
    files_in_all: int = 0
    without_checksums: tuple[str, ...] = ()
    """The checked files without page checksums."""
    storage: str = ""
    """Why a storage that is an address cannot be read from here; empty if it can."""

    odd_sizes: tuple[str, ...] = ()
    """What is unusual about the number of rows in the steps."""
    trial: Trial | None = None
    """What a trial of the task found; None if nothing of it was run."""
    mix: tuple[SourceShare, ...] = ()
    """The sources of a mix."""
    many_passes: str = ""
    """Why GPUs are used badly; empty if they are not."""
    kept: bool = False
    """Whether workers keep the row groups in memory once they are read, so that an epoch reads nothing again."""
    sharded: tuple[str, ...] = ()
    """What each worker holds of a sharded training state."""
    slices: tuple[str, ...] = ()
    """The part of a model in slices that each worker holds."""
    promises: tuple[str, ...] = ()
    """See `checks.promises`."""
    expected: tuple[str, ...] = ()
    """How fast steps are expected to be, and whether more workers pay."""

    @property
    def most_stages(self) -> int:
        """The largest number of stages at any number of workers."""
        return max(size.stages for size in self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        found = asdict(self)
        if found["trial"] is not None:
            # For a comparison within one process.
            del found["trial"]["initial"]
        return found

    def lines(self) -> list[str]:
        """Return lines of text for a person."""
        said = [f"{self.name}: OK"]
        said += _trial_lines(self.trial)
        if self.storage:
            said.append(f"  warning: {self.storage}")
        if self.rows is None:
            said.append("  data: will be prepared by data.prepare when the job runs")
        else:
            assert self.steps is not None
            where = "read by index" if self.units is None else f"in {plural(self.units, 'row group')}"
            said.append(f"  data: {plural(self.rows, 'row')} {where}, {plural(self.steps, 'step')}")
            said += [source.line() for source in self.mix]
            said += [f"  warning: {odd}" for odd in self.odd_sizes]
            if self.read_factor is not None:
                said += self._read_lines(self.read_factor)
            said += self._checksum_lines()
        for size in self.sizes:
            of = [plural(size.stages, "stage")] * (self.most_stages > 1)
            of += [plural(size.ranks, "worker")] * (max(one.ranks for one in self.sizes) > 1)
            replicas = f"{' of '.join([plural(size.replicas, 'replica'), *of])}, " if of else ""
            said.append(f"  {plural(size.workers, 'worker')}: {replicas}{_load(size)}")
        said += [f"  {line}" for line in (*self.expected, *self.slices, *self.sharded)]
        said += [f"  promised: {line}" for line in self.promises]
        if self.left_out:
            said.append(f"  warning: {self.left_out}")
        if self.many_passes:
            said.append(f"  warning: {self.many_passes}")
        if self.cut is not None:
            said += _partition_lines(self.cut)
        elif self.most_stages > 1:
            said.append("  the partition into stages is not known without a trial: layers are run on rows of the data")
        return said + [
            f"  warning: the model does not fit on workers with this machine's memory: {why}" for why in self.misfits
        ]

    def _read_lines(self, factor: float) -> list[str]:
        if self.kept:
            return ["  workers keep the row groups in memory once they are read (data.cache_mb)"]
        said = [f"  each row group is read {factor:.2f} times in an epoch, because shards share row groups"]
        if factor > FACTOR_WARNING:
            said.append("  warning: most reads are wasted; use fewer data.shards, or Parquet of smaller row groups")
        return said

    def _checksum_lines(self) -> list[str]:
        missing = self.without_checksums
        if not missing:
            return []
        looked = f"the first {self.files:,}" if self.files < self.files_in_all else f"{self.files:,}"
        names = ", ".join([*missing[:NAMED], *["..."] * (len(missing) > NAMED)])
        return [
            f"  {len(missing):,} of {looked} files have no page checksums ({names}), so damaged values in them "
            f"cannot be detected; write them with {HOW}"
        ]


def sizes_of(table: SizeTable) -> tuple[Size, ...]:
    """Return the size at each number of workers from min to max, except those with more workers than can be used."""
    shards = table.shards
    found = []
    for workers, shape in table.formed.items():
        # Where a worker is a replica, all form one; one that makes no step faster is left out only above the minimum.
        stages, ranks = shape.layout
        replicas = workers if shape.layout == (1, 1) else shape.replicas
        fullest = math.ceil(shards / replicas)
        used = shards * stages * ranks / (workers * fullest)
        found.append(Size(workers, fullest, used, replicas, stages, ranks))
    return tuple(found)


def validate_job(job: Job, roots: Sequence[Path], trying: Trying | None = None) -> Report:
    """Check a job: import what it names, build its task, its model without values, and read its data's metadata.

    `trying`: a trial of its task under way; None to run nothing of it. A storage that is an address is asked whether it
    answers. Raises `InputError` if anything is wrong.
    """
    if not is_address(job.storage):
        return _looked_at(job, roots, trying)
    with _asking(job.storage) as asked:
        return replace(_looked_at(job, roots, trying), storage=asked.answer())


class _Asked:
    """Ask in a separate process whether a storage answers: only so can a waiting client be ended."""

    def __init__(self, storage: str) -> None:
        self._where = f"storage: {without_credentials(storage, whole=True).partition('?')[0]}"
        self._until = time.monotonic() + STORAGE_S
        command = [sys.executable, "-c", ASK]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
        # Not as an argument, which everybody on the machine can read: the address may hold secrets.
        assert self.process.stdin is not None
        self.process.stdin.write(storage)
        self.process.stdin.close()
        self.process.stdin = None

    def answer(self) -> str:
        """Return why the storage cannot be read from here; empty if it can.

        Raises `InputError` if the address is invalid.
        """
        try:
            # The output is short and fits into the pipe, so waiting before reading cannot block the process.
            self.process.wait(timeout=max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"{self._where} does not answer this machine within {STORAGE_S:g} s"
        said, _ = self.process.communicate()
        first = (said.splitlines() or [""])[0]
        if self.process.returncode == 2:
            raise InputError(first, where="storage")
        return f"{self._where} cannot be read from this machine: {first}" if self.process.returncode else ""


@contextmanager
def _asking(storage: str) -> Iterator[_Asked]:
    asked = _Asked(storage)
    try:
        yield asked
    finally:
        with asked.process:
            asked.process.kill()


def _looked_at(job: Job, roots: Sequence[Path], trying: Trying | None) -> Report:
    search = [Path.cwd(), *roots]
    # What the task prints, a trial shows.
    shown = nullcontext if trying is None else prints_hidden
    with shown():
        code = load_user_code(job, search)
        build_task(code.task, job.args)
    inexact = ""
    if trying is None:
        # Without the data, the length of a job in epochs is not known: its workers check a scheduler that needs it.
        facts = None if job.steps is None else run_facts(job, job.steps)
        with prints_hidden():
            check_files(job, code.task)
            inexact = _check_model(job, build_task(code.task, job.args, facts))
    check_preparable(job, search)
    choose_collective(job.collective)
    check_installed(job.trackers)
    with prints_hidden():
        names = layers_of(job, code.task)
    table = size_table(job, names)
    sizes, unformed = sizes_of(table), unused_workers(table)
    passes = many_passes(job, max(size.replicas for size in sizes))
    sharded = sharded_lines(job.parallel, [size.replicas for size in sizes])
    if trying is not None:
        trying.data()
    elif not all(_is_made(job, path) for path in training_paths(job).values()):
        promises = promises_of(job, table, inexact)
        return Report(
            job.name,
            sizes,
            None,
            None,
            None,
            None,
            unformed,
            many_passes=passes,
            sharded=sharded,
            promises=promises,
        )
    with shown():
        seen = training_data(job, search)
    check_enough(seen, job.data.shards)
    files: Sequence[Place] = seen.places
    if job.evaluate is not None and (job.evaluate.path is None or _is_made(job, job.evaluate.path)):
        with shown():
            held_out = held_out_data(job, search)
        check_enough(held_out, job.data.shards)
        seen, held_out = alike(seen, held_out)
        # Rows of the same files may be trained on, too.
        files = list(dict.fromkeys([*files, *held_out.places]))
    looked_at = files[:LOOKED_AT]
    sample_order = sample_order_of(job, seen)
    check_profiled(job, sample_order.steps)
    trial = None if trying is None else trying.result()
    if trial and trial.state:
        apart = bool(job.workers.gpus)
        state = {size.workers: trial.state.of(job, size.workers, apart=apart) for size in sizes}
        sharded = sharded_lines(job.parallel, list(state), state)
    layers = trial.layers if trial else ()
    partition, misfits = _forecast(job, layers, sizes[-1], table) if layers else (None, ())
    return Report(
        job.name,
        sizes,
        seen.rows,
        None if seen.by_index else len(seen.unit_rows),
        sample_order.steps,
        read_factor_of(sample_order, seen),
        unformed,
        partition,
        misfits,
        files=len(looked_at),
        files_in_all=len(files),
        without_checksums=tuple(map(str, without_checksums(looked_at))),
        odd_sizes=tuple(odd_sizes(job, seen)),
        trial=trial,
        mix=source_shares(job, seen),
        many_passes=passes,
        kept=keeps_rows(job, seen),
        sharded=sharded,
        slices=_slice_lines(job, layers),
        promises=promises_of(job, table, inexact if trial is None else trial.inexact),
        expected=() if trial is None else _expected(job, trial, sizes[-1].replicas),
    )


def _expected(job: Job, trial: Trial, replicas: int) -> tuple[str, ...]:
    """Return what to expect of the steps of workers that hold whole models; nothing if they have GPUs."""
    cost = trial.shard_cost
    if cost is None or trial.state is None or job.workers.gpus or job.parallel.by_layer:
        return ()
    from raytrain_plus.trial.link_speed import measure_link

    cores = (os.cpu_count() or 1) / job.workers.threads
    return expected_steps(job, trial.state, cost.passes_s + cost.own_s, replicas, link=measure_link(), cores=cores)


def _slice_lines(job: Job, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return how much of the model a worker holds that hosts some of its slices; nothing if it is not cut."""
    if job.parallel.slices == 1 or not layers:
        return ()
    # Imported here because it loads torch.
    from raytrain_plus.parallel.pipeline.memory import hosting_slices

    whole = sum(layer.own_parameters for layer in layers)
    held = [
        f"{sum(layer.own_parameters for layer in hosting_slices(layers, ranks)):,} on each of {ranks} workers"
        for ranks in rank_counts(job.parallel.slices)
        if ranks > 1
    ]
    of = "the model" if job.parallel.pipeline == 1 else "all stages"
    return (f"{job.parallel.slices} slices; of the {whole:,} parameters of {of}: {', '.join(held)}",)


def _is_made(job: Job, path: str) -> bool:
    """Return whether the data at a path is there, or is to be there because nothing makes it."""
    return job.data.prepare is None or data_exists(place_of(path))


def _check_model(job: Job, task: Task) -> str:
    """Return `inexact_parameter` of the task's model.

    Raises `TaskError` for a parameter whose gradients cannot be summed as the job requests, or for the scheduler.

    `task`: used for nothing else, because it may keep the model without values that is built here.
    """
    # Imported here because these modules load torch.
    from raytrain_plus.training.model.model import parameters_of
    from raytrain_plus.training.weights.model_part import check_summable, inexact_parameter
    from raytrain_plus.training.weights.scheduler import check_scheduler

    with as_task_error(f"the model of {type(task).__name__} cannot be checked", f"task: {job.task}"):
        named = parameters_of(task)
        check_summable(named, exact=job.reduction == "exact")
        check_scheduler(task, named)
        return inexact_parameter(named)


def _forecast(
    job: Job, layers: Sequence[Layer], size: Size, table: SizeTable
) -> tuple[Forecast | None, tuple[str, ...]]:
    """Partition the model into the job's stages, given the cost of its layers on this machine.

    Also return with which numbers of stages in `table` it does not fit here.
    """
    # Imported here because these modules load torch.
    from raytrain_plus.parallel.pipeline.forecast import forecast
    from raytrain_plus.parallel.pipeline.memory import (
        Misfit,
        hosting_slices,
        partition_within_memory,
        sharing_optimizer,
    )
    from raytrain_plus.trial.memory_limits import total_memory

    microbatches = size.shards * job.parallel.microbatches * job.parallel.steps_together
    schedule = job.parallel.schedule
    layers = hosting_slices(layers, job.parallel.slices)
    # A GPU's memory is known only on a machine with one.
    room = total_memory() if not job.workers.gpus else None
    partitions = [
        partition_within_memory(
            sharing_optimizer(layers, share_of(job.parallel, table.fewest_replicas(stages, table.slices))),
            schedule,
            stages,
            table.most_shards(stages, table.slices) * job.parallel.microbatches,
            room,
            job.parallel.first_layers(stages),
        )
        for stages in table.stage_counts
        if room is not None
    ]
    misfits = tuple(str(found) for found in partitions if isinstance(found, Misfit))
    if job.parallel.pipeline == 1:
        return None, misfits
    shared = sharing_optimizer(layers, share_of(job.parallel, size.replicas))
    return forecast(shared, schedule, job.parallel.pipeline, microbatches, job.parallel.partition), misfits


def _load(size: Size) -> str:
    """Return how many shards a replica hosts, in words, and how much of the workers' time a step uses."""
    if size.efficiency == 1:
        return f"{plural(size.shards, 'shard')} each"
    return f"up to {plural(size.shards, 'shard')} each; their work fills {100 * size.efficiency:.0f} % of the time"


def _trial_lines(trial: Trial | None) -> list[str]:
    if trial is None:
        return ["  the task was not run"]
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in trial.metrics.items())
    what = f"  tried: a step with {plural(trial.rows, 'row')} took {1000 * trial.seconds:,.0f} ms"
    evaluated = f"; an untrained model gives {metrics}" if metrics else ""
    memory = [] if trial.bytes is None else [f"  a worker needs about {size_text(trial.bytes)} of memory"]
    cost = "" if trial.shard_cost is None else trial.shard_cost.remark()
    notes = [*trial.remarks, *([cost] if cost else [])]
    return [what + evaluated, *memory, *(f"  note: {note}" for note in notes)]


def _partition_lines(partition: Forecast) -> list[str]:
    counted = result_depends_on_partition(partition.schedule)
    costs = "counted operations of each layer" if counted else "time of each layer on this machine"
    how = "as parallel.partition says" if partition.given else f"by the {costs}"
    said = [
        f"  partitioned into {len(partition.stages)} stages, {how}; "
        f"{partition.schedule} with {partition.microbatches} microbatches in the fullest replica:"
    ]
    for number, stage in enumerate(partition.stages):
        chunks = " and ".join(
            chunk[0] if len(chunk) == 1 else f"{chunk[0]} to {chunk[-1]} ({len(chunk)} layers)"
            for chunk in stage.layers
        )
        said.append(
            f"    stage {number}: {chunks}; {stage.parameters:,} parameters, {stage.bytes / 1e6:,.1f} MB, "
            f"{1000 * stage.seconds:.1f} ms a microbatch"
        )
    # At most two copies of its own state and two of another worker's.
    copied = 4 * max(stage.state_bytes for stage in partition.stages)
    return [
        *said,
        f"    expected bubble: {100 * partition.bubble:.0f} %",
        f"    with a single replica, copies in memory: up to {copied / 1e6:,.1f} MB more on each worker",
    ]
