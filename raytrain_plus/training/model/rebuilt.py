"""Name frozen weights by a digest of their values, where every worker builds them alike: see `Task.rebuilt`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from raytrain_plus.errors import InputError, TaskError, listed
from raytrain_plus.state.named import bytes_of, dtype_name
from raytrain_plus.task import Task
from raytrain_plus.training.model.given_weights import fits

WHERE = "Task.rebuilt"
THREADS = 4
"""Weights whose digests are computed at the same time."""

Named = Iterable[tuple[str, torch.Tensor]]


def patterns_of(task: Task) -> Sequence[str]:
    """Return the patterns of the weights that the task names by digest. Raises `TaskError` for anything else."""
    found = task.rebuilt()
    if isinstance(found, str) or not all(isinstance(one, str) for one in found):
        raise TaskError("rebuilt() returns no list of patterns", where=WHERE, expected='a list, such as ["backbone.*"]')
    return tuple(found)


def rebuilt_weights(task: Task, named: Named) -> dict[str, str]:
    """Return the digest of each frozen weight that the task names so, given weights as `model` or `layers` build them.

    Weights without values, as under the meta device, have none.
    """
    if not (patterns := patterns_of(task)):
        return {}
    found = {
        name: value for name, value in named if not value.requires_grad and not value.is_meta and fits(name, patterns)
    }
    # Other threads hash while one does: a large model takes seconds.
    with ThreadPoolExecutor(THREADS, thread_name_prefix="digest") as pool:
        return dict(zip(found, pool.map(weight_sha256, found.values()), strict=True))


def weight_sha256(value: torch.Tensor) -> str:
    """Return SHA-256 over dtype NUL shape NUL little-endian bytes."""
    digest = hashlib.sha256(f"{dtype_name(value.dtype)}\0{','.join(map(str, value.shape))}\0".encode())
    digest.update(bytes_of(value.cpu()).numpy().data)
    return digest.hexdigest()


def check_rebuilt(task: Task, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise `TaskError` for a pattern that fits none of the model's frozen weights."""
    frozen = [name for name, value in named if not value.requires_grad]
    for pattern in patterns_of(task):
        if not any(fits(name, [pattern]) for name in frozen):
            raise TaskError(
                f"'{pattern}' fits no frozen weight of the model",
                where=WHERE,
                expected=f"names such as {listed(frozen)}, in which * stands for any text" if frozen else "",
                remedy="correct the pattern, or freeze the weights: requires_grad_(False)",
            )


def check_same(model: Mapping[str, torch.Tensor], rebuilt: Mapping[str, str], where: str) -> None:
    """Raise `InputError` if a model, given by name, has other values of a frozen weight that is known by its digest."""
    for name, digest in rebuilt.items():
        if weight_sha256(model[name]) != digest:
            raise InputError(
                f"the weight '{name}' of the model is not the one with which it was trained, and the run has not saved "
                "that one",
                where=where,
                expected=f"the values with the SHA-256 {digest[:16]}...",
                remedy="build the model from the same files as the run did",
            )
