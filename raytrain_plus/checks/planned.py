"""Plan a job: profile its task on this machine, find out what machines it has, and search (`planner.search`)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raytrain_plus.checks.cluster_file import node_types
from raytrain_plus.checks.plan_report import PlanReport
from raytrain_plus.checks.trial_process import trying_apart
from raytrain_plus.data.dataset import training_data
from raytrain_plus.data.of_job import rows_of
from raytrain_plus.data.prepare import prepare_data
from raytrain_plus.data.reading.microbatches import microbatch_rows
from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import load_user_code, prints_hidden
from raytrain_plus.membership.sizes import room_for
from raytrain_plus.observe.run_progress import plural
from raytrain_plus.planner.layer_profile import ModelProfile
from raytrain_plus.planner.proposals import proposals
from raytrain_plus.planner.search import plan_sizes
from raytrain_plus.storage.size_text import size_text

MOST_SIZES = 10_000
"""The most workers of a plan."""
FEWEST = 2
"""Rows that BatchNorm needs."""
_SIZES = re.compile(r"(\d+)(?:\.\.(\d+))?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class ProfiledTask:
    """What was measured of a task on this machine."""

    model: ModelProfile
    rows: int
    """Rows of an epoch."""
    memory: int
    """Bytes of memory of this machine."""


class ProfilingHere:
    """Profile a task in this process."""

    def __init__(self, job: Job, roots: Sequence[Path]) -> None:
        self._job = job
        self._search = [Path.cwd(), *roots]

    def data(self) -> None:
        """Prepare the data."""
        prepare_data(self._job, self._search)

    def result(self) -> ProfiledTask:
        """Return what was measured. Raises `TaskError` for a mistake in the task."""
        # Loaded here, because these load torch.
        from raytrain_plus.data.reading.first_rows import first_rows, microbatch_of
        from raytrain_plus.training.step.build import task_of
        from raytrain_plus.trial.memory_limits import total_memory
        from raytrain_plus.trial.profile_layers import profile_layers
        from raytrain_plus.trial.task_trial import explained

        job = self._job
        code = load_user_code(job, self._search)
        seen = training_data(job, self._search)
        rows = rows_of(job, seen, code.transform)
        task = task_of(job, code.task, rows.sample_order.steps, rows.sample_order.rows)
        wanted = microbatch_rows(rows.sample_order, job.parallel.microbatches)
        table = first_rows(rows, wanted)
        few = max(min(FEWEST, wanted), wanted // 2)
        with explained(job, task), prints_hidden():
            small, large = (microbatch_of(table.slice(0, count), task.collate) for count in (few, wanted))
            model = profile_layers(job, task, small, large, cores=os.cpu_count() or 1)
        return ProfiledTask(model, rows.sample_order.rows, total_memory())


def plan_job(
    job: Job, roots: Sequence[Path], sizes: Sequence[int], cluster: str | None, memory: int | None
) -> PlanReport:
    """Return the plans of a job for these numbers of workers.

    `cluster`: a file of the machines; None: all workers are on this machine. `memory`: bytes of each worker, if given.
    Raises `InputError` if the machines' memory is not known, and the errors of `ProfilingHere`.
    """
    machines = None if cluster is None else _machines(job, cluster, memory)
    with trying_apart(job, roots, ProfilingHere) as trying:
        result: Any = trying.result()
    found: ProfiledTask = result
    profile, each = found.model, memory
    if machines is not None:
        on_one, cores, each = machines
        profile = replace(profile, on_one=on_one, cores=cores / job.workers.threads)

    def room(workers: int) -> float:
        return found.memory / workers if each is None else each

    table = plan_sizes(job, profile, sizes, room, rows=found.rows)
    proposed = tuple(proposals(job, profile, max(sizes), room))
    return PlanReport(job.name, job, table, profile, proposed, _where(machines, found.memory))


def _where(machines: tuple[int, float, int] | None, here: int) -> str:
    if machines is None:
        return f"all workers on this machine: {os.cpu_count()} cores, {size_text(here)}"
    on_one, cores, each = machines
    return f"machines with room for {plural(on_one, 'worker')} on {cores:g} cores, {size_text(each)} each"


def _machines(job: Job, file: str, memory: int | None) -> tuple[int, float, int]:
    """Return the workers, the cores, and the bytes of memory of each worker, on the machines where most workers fit."""
    need = {"CPU": job.workers.cpus, "GPU": job.workers.gpus}
    types, _ = node_types(file)
    each = {one.name: room_for([one.resources], need) if one.may_have(job.workers.accelerator) else 0 for one in types}
    able = [one for one in types if each[one.name] and one.most]
    if not able:
        raise InputError("no machine has room for a worker", where=file, remedy="lower workers.cpus or workers.gpus")
    best = max(able, key=lambda one: each[one.name] * one.most)
    on_one, has = each[best.name], best.resources.get("memory")
    if memory is None and (has is None or job.workers.gpus):
        of = "its GPUs" if job.workers.gpus else "its machines"
        raise InputError(
            f"the file does not say how much memory {of} have",
            where=f"{file}: {best.name}",
            expected="`memory` in the resources of the node type, in bytes" if not job.workers.gpus else "",
            remedy="give the memory of a worker, such as --memory 80G",
        )
    # A GPU computes beside the cores.
    cores = float("inf") if job.workers.gpus else best.resources.get("CPU", 1.0)
    return on_one, cores, memory if memory is not None else int((has or 0.0) / on_one)


def read_sizes(text: str, job: Job) -> list[int]:
    """Return the numbers of workers that `--sizes` asks for, such as `1..16` or `1,2,4`.

    Raises `InputError` if it has another form, or if none of them can hold a replica.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = _SIZES.fullmatch(part.strip())
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= low <= high <= MOST_SIZES:
            raise InputError(
                f"{text!r} gives no numbers of workers",
                where="--sizes",
                expected=f"a range such as 1..16, or numbers such as 1,2,4, from 1 to {MOST_SIZES:,}",
            )
        found |= set(range(low, high + 1))
    fewest = job.parallel.width if job.parallel.overlaps else 1
    if max(found) < fewest:
        raise InputError(
            f"at most {plural(max(found), 'worker')}, but a replica of this job needs {fewest}",
            where="--sizes",
            expected=f"{fewest} or more",
        )
    return sorted(found)


def read_memory(text: str) -> int:
    """Return the bytes of a text such as `80G`; units are powers of 1,000, or of 1,024 with an i. Raises `InputError`.

    >>> read_memory("80G"), read_memory("1.5MiB")
    (80000000000, 1572864)
    """
    match = _MEMORY.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * (1024 if match[3] else 1000) ** _POWERS[match[2]])
    if size <= 0:
        raise InputError(f"{text!r} is no amount of memory", where="--memory", expected="such as 80G or 512MiB")
    return size
