"""Say what a run of a job promises, and the setting with which it would promise more. Pure."""

from __future__ import annotations

from dataclasses import replace

from raytrain_plus.errors import JobError
from raytrain_plus.job.settings import Job, Parallel
from raytrain_plus.membership.sizes import SizeTable


def promises_of(job: Job, table: SizeTable, inexact: str = "") -> tuple[str, ...]:
    """Return what holds if workers are lost, for the rows, and for the bits: one sentence each.

    `table`: the groups that the job can form. `inexact`: why the model's gradients have no exact sums; empty if they
    have, or if that is not known.
    """
    return _of_losses(job, table), _of_rows(job), _of_bits(job, inexact)


def _of_losses(job: Job, table: SizeTable) -> str:
    parallel, back = job.parallel, f"the run goes back to {_newest_checkpoint(job)}"
    most = max(shape.size for shape in table.formed.values())
    replicas = max(shape.replicas for shape in table.formed.values())
    every = "each step" if job.elastic.copy_every == 1 else f"every {job.elastic.copy_every} steps"
    copies = f"the run goes back to copies in other workers' memory, of {every}; if these are lost too, {back}"
    if parallel.overlaps:
        again = f"up to {parallel.commit_every} steps are computed again (parallel.commit_every)"
        fewer = "other schedules than pipedream repeat fewer, or none"
        if replicas > 1:
            return f"after the loss of a worker, {again} while another replica is whole; else {copies}; {fewer}"
        return f"after the loss of a worker, {copies}; {fewer}"
    if most == 1:
        shards = " and data.shards: 2" if job.data.shards == 1 else ""
        more = f"with workers.max: {2 * parallel.width}{shards}"
        return f"if its only worker is lost, {back}; {more} the loss of a worker costs no step"
    if parallel.sharded != "none":
        return _of_holders(parallel, back)
    if not parallel.in_parts:
        return f"the loss of a worker costs no step while another one lives; if all are lost at once, {back}"
    if replicas > 1:
        return f"the loss of a worker costs no step while another replica is whole; else {copies}"
    more = f"with workers.max: {2 * parallel.width} there are two replicas, and it costs no step"
    return f"after the loss of a worker, {copies}; {more}"


def _of_holders(parallel: Parallel, back: str) -> str:
    holders = parallel.holders
    if holders == 1:
        return f"after the loss of any worker, {back}; with parallel.holders: 2 it costs no step"
    lost, of = "the loss of a worker costs", "both holders"
    if holders > 2:
        lost, of = f"losses of {holders - 1} workers cost", f"all {holders} holders"
    copied = "; the stages of a single replica are copied to other workers" if parallel.in_parts else ""
    return f"{lost} no step while another one lives; if {of} of a row are lost at once, {back}{copied}"


def _newest_checkpoint(job: Job) -> str:
    every_steps, every_s = job.checkpoint.every_steps, job.checkpoint.every_s
    steps = [] if every_steps is None else [f"{every_steps:,} step{'s' * (every_steps > 1)}"]
    seconds = [] if every_s is None else [f"{every_s:g} s"]
    if not steps + seconds:
        return "its beginning (checkpoint.every_s and every_steps are null)"
    return f"its newest checkpoint (one every {' and every '.join(steps + seconds)})"


def _of_rows(job: Job) -> str:
    which = "every row" if job.data.mix is None else "every row of a source"
    epochs = "an epoch" if job.data.mix is None else "an epoch of that source"
    skipped = "; rows that cannot be used are left out, and counted" if job.data.on_error == "skip" else ""
    return f"{which} is used once in {epochs}, whatever is lost: raytrain audit checks it{skipped}"


def _of_bits(job: Job, inexact: str) -> str:
    if job.reduction == "exact":
        return "equal bits on any number of workers, whatever is lost (reduction: exact)"
    if job.parallel.overlaps:
        return (
            "results depend on the number of replicas, and on losses: gradients belong to older weights "
            "(parallel.schedule: pipedream)"
        )
    rounding = "rounding" if job.compression == "none" else f"the rounding of compression: {job.compression}"
    equal = f"equal results on any number of workers, to {rounding}"
    why = inexact or _refused(job)
    if why:
        return f"{equal}; equal bits are not offered: {why}"
    without = "" if job.compression == "none" else ", without compression,"
    return f"{equal}; with reduction: exact{without} equal bits"


def _refused(job: Job) -> str:
    """Return why the job cannot have `reduction: exact` in place of its own; empty if it can."""
    try:
        replace(job, reduction="exact", compression="none")
    except JobError as error:
        return error.problems[0].what
    return ""
