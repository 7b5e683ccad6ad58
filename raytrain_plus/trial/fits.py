"""Check that the steps of a job fit into a worker's memory, and say which settings would make them fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from raytrain_plus.errors import InputError
from raytrain_plus.job.setting_types import Sharded
from raytrain_plus.job.settings import Job
from raytrain_plus.parallel.per_row import PerRow
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.parallel.sizing import most_workers
from raytrain_plus.parallel.state_bytes import StateSize
from raytrain_plus.storage.size_text import size_text
from raytrain_plus.task import Task
from raytrain_plus.trial.memory_limits import held_memory
from raytrain_plus.trial.state_size import count_state


def fitting_state(job: Job, task: Task, device: torch.device, room: int) -> StateSize | None:
    """Return the size of the state of the job's whole model; None if it is not known.

    `task`: used for nothing else. Raises `InputError` if a worker of the job's largest group has not that much `room`.
    """
    size = None
    # A trial reports the task's mistakes.
    with contextlib.suppress(Exception):
        size = count_state(job, task)
    if size is not None:
        apart = device.type == "cuda"
        check_state_fits(job, size, most_workers(job), held=held_memory(device), room=room, apart=apart)
    return size


def check_state_fits(job: Job, size: StateSize, workers: int, *, held: int, room: int, apart: bool) -> None:
    """Raise `InputError` if the state of each of `workers` workers, beside `held` bytes, needs more than `room` bytes.

    `apart`: see `StateSize.needed`.
    """
    need, free = size.of(job, workers, apart=apart), max(0, room - held)
    if not room or need <= free:
        return
    remedies = (
        f"set {setting}: then it takes about {size_text(smaller)}"
        for setting, other in _smaller(job, size, workers, apart=apart)
        if (smaller := size.of(other, workers, apart=apart)) <= free
    )
    more = "use more workers with" if size.layered else "declare the model's layers (Task.layers) for"
    last = f"{more} parallel.sharded: full, workers with more memory, or a smaller model"
    if job.workers.gpus and not apart:
        last = "try it on a machine with more memory, or leave that to the workers with --no-run"
    raise InputError(
        f"the training state of a worker takes about {size_text(need)} of memory, and {size_text(free)} of "
        f"{size_text(room)} are free",
        where="parallel.sharded",
        expected="a state that fits into the memory of a worker",
        remedy=next(remedies, last),
    )


def _smaller(job: Job, size: StateSize, workers: int, *, apart: bool) -> Iterator[tuple[str, Job]]:
    """Yield settings that make the state of a worker smaller, those that cost least first, and the job with each."""
    shards: tuple[Sharded, ...] = ("none",)
    if workers > 1:
        shards = ("none", "optimizer", "full") if size.layered else ("none", "optimizer")
    for holders in sorted({job.parallel.holders, 1}, reverse=True):
        for offload in ("none", "optimizer") if apart else (job.offload,):
            for sharded in shards:
                parallel = replace(job.parallel, sharded=sharded, holders=holders)
                new = {
                    "parallel.sharded": (sharded, job.parallel.sharded),
                    "parallel.holders": (holders, job.parallel.holders),
                    "offload": (offload, job.offload),
                }
                words = [f"{name} to {value}" for name, (value, before) in new.items() if value != before]
                yield " and ".join(words), replace(job, parallel=parallel, offload=offload)


def check_layers_fit(
    job: Job, layers: Sequence[Layer], held: int, size: StateSize, device: torch.device, room: int
) -> int:
    """Return the bytes that a worker needs if all its microbatches pass a layer before they pass the next one.

    Raises `InputError` if that exceeds `room`.
    """
    workers = most_workers(job)
    kept = sum(layer.activations for layer in layers)
    passes = -(-job.data.shards // workers) * job.parallel.microbatches
    state = held + size.of(job, workers, apart=device.type == "cuda")
    need = state + passes * kept
    if not room or need <= room:
        return need
    raise InputError(
        f"the {passes:,} microbatches of a worker keep {size_text(kept)} each until their backward passes, which with "
        f"the state are about {size_text(need)} of memory, and there are {size_text(room)}",
        where="recompute",
        remedy="set recompute: full, use more workers, or lower data.batch_size",
    )


def check_fits(job: Job, footprint: PerRow, rows: int, room: int) -> None:
    """Raise `InputError` if a step with microbatches of `rows` rows needs more than `room` bytes of memory."""
    need = footprint.at(rows)
    if not room or need <= room:
        return
    most = footprint.most_rows(room)
    raise InputError(
        f"a step with a microbatch of {rows:,} rows needs about {size_text(int(need))} of memory, and there are "
        f"{size_text(room)}",
        where="data.batch_size",
        expected=f"at most {most:,} rows in a microbatch" if most else "a model that fits into memory with one row",
        remedy=_fewer_rows(job, rows, most) if most else "use a larger machine, or a smaller model",
    )


def _fewer_rows(job: Job, rows: int, most: int) -> str:
    """Return how to make microbatches of at most `most` rows."""
    per_shard = job.data.batch_size // job.data.shards
    parts = -(-per_shard // most)
    batch = most * job.data.shards * job.parallel.microbatches
    return (
        f"set parallel.microbatches to {parts:,}, data.shards to at least {-(-job.data.batch_size // most):,}, or "
        f"data.batch_size to at most {batch:,}"
    )
