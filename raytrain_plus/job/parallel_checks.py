"""Check how a job divides its steps among workers, stages and microbatches, and what its schedule supports. Pure.

`job.value_checks` says to which settings each check belongs.
"""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_plus.job.setting_types import Problem


def sizes(maximum: int | None, minimum: int) -> Problem:
    """Return what is wrong with workers.max with this workers.min."""
    if maximum is None or maximum >= minimum:
        return None
    return f"{maximum} is less than workers.min = {minimum}", f"{minimum} or more", ""


def shard_room(minimum: int, shards: int, pipeline: int, tensor: int, experts: int) -> Problem:
    """Return what is wrong with this workers.min: every worker needs a shard."""
    most = shards * pipeline * max(tensor, experts)
    if minimum <= most:
        return None
    named = {"pipeline": pipeline, "tensor": tensor, "experts": experts}
    of = "".join(f" and parallel.{name} = {count}" for name, count in named.items() if count > 1)
    return (
        f"{minimum} workers for data.shards = {shards}{of}: some would be idle",
        f"at most {most}",
        "raise data.shards",
    )


def one_replica(maximum: int | None, minimum: int, pipeline: int) -> Problem:
    """Return what is wrong with workers.max with these stages: together the workers must hold them all."""
    most = minimum if maximum is None else maximum
    if most >= pipeline:
        return None
    return f"{most} workers are fewer than the {pipeline} stages of parallel.pipeline", f"{pipeline} or more", ""


def tensor(tensor: int, schedule: str, sharded: str, compiles: bool) -> Problem:
    """Return what is wrong with parallel.tensor with these settings."""
    return _sliced("tensor slices", "parallel.tensor: 1", tensor, schedule, sharded, compiles)


def experts(experts: int, schedule: str, sharded: str, compiles: bool) -> Problem:
    """Return what is wrong with parallel.experts with these settings."""
    return _sliced("slices of experts", "parallel.experts: 1", experts, schedule, sharded, compiles)


def _sliced(what: str, without: str, slices: int, schedule: str, sharded: str, compiles: bool) -> Problem:
    if slices < 2 or slices & (slices - 1):
        return None
    if schedule in ("pipedream", "zero-bubble"):
        why = f"{schedule} does not support {what}: its stages interleave passes in orders of their own"
        return why, f"{without}, or another schedule", ""
    if sharded == "full":
        why = f"the weights of {what} are not sharded: each worker holds only those of its own slices already"
        return why, f"sharded: optimizer, or {without}", ""
    if compiles:
        why = "layers that are cut into slices exchange sums while they compute, which compiled layers cannot do"
        return why, f"compile: false, or {without}", ""
    return None


def same_slices(experts: int, tensor: int) -> Problem:
    """Return what is wrong with parallel.experts beside parallel.tensor: the same workers host both."""
    if 1 in (experts, tensor) or experts == tensor:
        return None
    what = f"{experts} slices of experts and {tensor} slices of weights cannot be hosted on the same workers"
    return what, f"{tensor}, or 1 for one of both", ""


def pipedream(
    schedule: str, pipeline: int, reduction: str, clip_norm: float | None, minimum: int, on_nonfinite: str
) -> Problem:
    """Return what is wrong with the settings beside the schedule pipedream, if it is chosen."""
    if schedule != "pipedream":
        return None
    if pipeline == 1:
        return "the pipedream schedule needs at least two stages", "parallel.pipeline of 2 or more", ""
    if reduction == "exact":
        what = "pipedream does not support reduction: exact; its results depend on how far each stage is"
        return what, "reduction: ring, or another schedule", ""
    if clip_norm is not None:
        what = "pipedream does not support clip_norm, which needs the gradients of all stages at the same step"
        return what, "no clip_norm, or another schedule", ""
    if on_nonfinite == "skip":
        what = "pipedream does not support on_nonfinite: skip; its stages apply a step one by one, not together"
        return what, "on_nonfinite: stop, or another schedule", ""
    if minimum < pipeline:
        what = f"workers.min = {minimum} lets the run repartition the model, which pipedream does not support"
        return what, f"workers.min of at least parallel.pipeline = {pipeline}", ""
    return None


def sharded(sharded: str, pipeline: int, schedule: str) -> Problem:
    """Return what is wrong with parallel.sharded with these stages and this schedule."""
    if sharded == "none" or pipeline == 1:
        return None
    if sharded == "full":
        what = f"the weights of a model in {pipeline} stages are not sharded: each stage holds its own part of them"
        return what, "sharded: optimizer, or parallel.pipeline: 1", ""
    if schedule == "pipedream":
        what = "pipedream does not support a sharded optimizer; while a stage sent its new weights, others would wait"
        return what, "sharded: none, or another schedule", ""
    return None


def holders(
    holders: int, sharded: str, maximum: int | None, minimum: int, shards: int, pipeline: int, tensor: int, experts: int
) -> Problem:
    """Return what is wrong with parallel.holders: there cannot be more than workers that share a state."""
    width = max(1, pipeline * max(tensor, experts))
    most = min((minimum if maximum is None else maximum) // width, shards)
    # With fewer workers than stages there is another problem.
    if sharded == "none" or holders <= most or not most:
        return None
    unit = "worker" if width == 1 else "replica"
    if most == 1:
        return f"the state of one {unit} is not sharded", f"sharded: none, or workers.max of {2 * width} or more", ""
    return f"{holders} holders of each row, but there are at most {most} {unit}s", f"at most {most}", ""


TWO_CHUNKS = ("interleaved", "zero-bubble")
"""Schedules with two chunks of layers per stage."""


def partition(partition: Sequence[str] | None, pipeline: int, schedule: str) -> Problem:
    """Return what is wrong with parallel.partition with these stages and this schedule."""
    if partition is None:
        return None
    if pipeline == 1:
        return "a model in one stage has no partition", "parallel.pipeline of 2 or more", ""
    chunks = pipeline * (2 if schedule in TWO_CHUNKS else 1)
    if len(partition) == chunks:
        return None
    names = f"{len(partition)} name{'s' * (len(partition) != 1)}"
    return (
        f"{names} for {pipeline} stages of {schedule}",
        f"{chunks} names: the first layer of each chunk, in order",
        "",
    )


def microbatches(microbatches: int, batch_size: int, shards: int) -> Problem:
    """Return what is wrong with parallel.microbatches with the rows that a shard gives to a step."""
    if min(microbatches, batch_size, shards) < 1 or batch_size % shards or batch_size // shards % microbatches == 0:
        return None
    rows = batch_size // shards
    return f"{microbatches} does not divide the {rows} rows that each shard gives to a step", f"a divisor of {rows}", ""


def collective(collective: str, gpus: float, tensor: int, experts: int, reduction: str) -> Problem:
    """Return what is wrong with collective on these devices and with these slices."""
    if collective != "nccl":
        return None
    if not gpus:
        return "NCCL sums on GPUs, and workers.gpus is 0", "workers.gpus: 1, or another collective", ""
    if max(tensor, experts) > 1 and reduction == "ring":
        what = "the rings of a stage's slices sum the same gradients of what is not cut, and NCCL's may differ in a bit"
        return what, "reduction: exact, or another collective", ""
    return None


def precision(precision: str, schedule: str, gpus: float) -> Problem:
    """Return what is wrong with precision on these devices and with this schedule."""
    if precision == "tf32" and not gpus:
        return "tf32 is a format of GPUs, and workers.gpus is 0", "workers.gpus: 1, or another precision", ""
    if precision == "fp16" and schedule == "pipedream":
        what = "pipedream does not support fp16: a step that overflows is computed again, and it cannot repeat a step"
        return what, "precision: bf16, or another schedule", ""
    return None


def recompute(recompute: str | Sequence[str], schedule: str) -> Problem:
    """Return what is wrong with recompute with this schedule."""
    if schedule != "zero-bubble" or recompute == "none":
        return None
    what = "the zero-bubble schedule makes each backward pass in two parts, and would compute every layer again in both"
    return what, "recompute: none, or another schedule", ""


def compiled(compiles: bool, schedule: str) -> Problem:
    """Return what is wrong with compile with this schedule."""
    if schedule != "zero-bubble" or not compiles:
        return None
    what = "the zero-bubble schedule divides backward passes at their operations, which compiled layers do not show"
    return what, "compile: false, or another schedule", ""
