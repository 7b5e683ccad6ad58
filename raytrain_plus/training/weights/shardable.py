"""Find out which weights a task's optimizer changes alike in parts: rows of them, or only whole ones.

AdamW, SGD, RMSprop and Adagrad treat each value of a weight by itself, so rows can be changed by different workers.
Others need a whole weight, such as Adafactor, which keeps sums over rows and columns. Nothing is assumed: the optimizer
makes some steps on small copies of the weights, divided and not, and the bits are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.generators import set_random_key
from raytrain_plus.task import Task
from raytrain_plus.training.model.randomness import random_key
from raytrain_plus.training.weights.optimizer import build_optimizer, takes_model

STEPS = 3
ROWS = 7
"""The rows of a copy; a number that vector instructions do not divide evenly."""
LONG = 67
"""The values of a copy of a weight with one dimension."""
LARGE = 2**18
"""The values of a copy from which on it has few of the weight's middle dimensions, too, such as a stack of experts."""


@dataclass(frozen=True, slots=True)
class Division:
    """How the optimizer's state can be divided."""

    undivided: frozenset[str]
    """The weights that are changed alike only as a whole."""
    state_bytes: Mapping[str, int]
    """The bytes of each weight's optimizer state: of a row, or of the whole if it is undivided."""


def divide(
    task: Task,
    named: Iterable[tuple[str, nn.Parameter]],
    *,
    on_host: bool = False,
    model: nn.Module | None = None,
) -> Division:
    """Return how the state of the task's optimizer can be divided among workers.

    `named`: the trained parameters; each is looked at before the next one is asked for, and not kept. `on_host`:
    whether the optimizer runs in the host's memory, wherever they are. `model`: see `ask_for_optimizer`. Raises
    `TaskError` if a weight's change depends on other weights: then it cannot be divided at all; and for a weight whose
    name could be that of a tensor in the optimizer's state.
    """
    copies, wholes = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, value in named:
        copy = _copy(value)
        copies[name], wholes[name] = copy.cpu() if on_host else copy, torch.empty_like(value, device="meta")
        if "/" in name:
            raise TaskError(
                f"the parameter '{name}' has a name that a sharded state cannot have",
                where="parallel.sharded",
                expected="names without a slash",
                remedy="rename its module, or use sharded: none",
            )
    if not copies:
        # A stage may have frozen weights only, and a task need not make an optimizer of none.
        return Division(frozenset(), {})
    device = next(iter(copies.values())).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return _divided(task, copies, wholes, model)


def optimizer_bytes(
    task: Task, named: Iterable[tuple[str, nn.Parameter]], model: nn.Module | None = None
) -> dict[str, int]:
    """Return the bytes of the state that the task's optimizer keeps of each whole parameter, after a few steps.

    `named`: the model's parameters, which may be without values. Errors of the optimizer propagate.
    """
    trained = {name: value for name, value in named if value.requires_grad}
    shapes = {name: _few(value) for name, value in trained.items()}
    with torch.random.fork_rng([]):
        copies = {
            name: _gradient(name, 0, torch.empty(shapes[name], dtype=one.dtype), 0) for name, one in trained.items()
        }
        _, state = _changed(task, {name: [value] for name, value in copies.items()}, model)
        return {
            name: _bytes_of(state[name]) // max(1, copies[name].numel()) * value.numel()
            if _by_rows(state[name], copies[name])
            else _whole_bytes(task, name, torch.zeros(value.shape, dtype=value.dtype), model)
            for name, value in trained.items()
        }


def _divided(
    task: Task, copies: Mapping[str, torch.Tensor], wholes: Mapping[str, torch.Tensor], model: nn.Module | None
) -> Division:
    """Return the same, given small copies of the parameters, and their shapes."""
    whole, state = _changed(task, {name: [value] for name, value in copies.items()}, model)
    rows, _ = _changed(task, {name: _cut(value) for name, value in copies.items()}, model)
    undivided = frozenset(
        name
        for name, value in copies.items()
        if not (_same(whole[name], rows[name]) and _by_rows(state[name], value)) or not value.dim()
    )
    # Each worker's optimizer has other weights, whole ones and rows.
    names = list(copies)
    for part in (names[::2], names[1::2]) if len(names) > 1 else (names,):
        some = {name: [copies[name]] if name in undivided else _cut(copies[name])[:1] for name in part}
        found, _ = _changed(task, some, model)
        for name in part:
            if not _same(whole[name][: len(found[name])] if found[name].dim() else whole[name], found[name]):
                raise TaskError(
                    f"the optimizer's update of '{name}' depends on other parameters, so its state cannot be sharded",
                    where="parallel.sharded",
                    expected="an optimizer that treats each weight by itself, without random numbers",
                    remedy="use another optimizer, such as torch.optim.AdamW, or sharded: none",
                )
    sizes = {
        name: _bytes_of(state[name]) // max(1, copies[name].numel()) * wholes[name][:1].numel()
        for name in names
        if name not in undivided
    }
    for name in undivided:
        sizes[name] = _whole_bytes(task, name, torch.zeros_like(wholes[name], device=copies[name].device), model)
    return Division(undivided, sizes)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """Return a small copy of a weight, with the values of its first rows."""
    few = tuple(slice(size) for size in _few(value))
    return value.detach()[few].clone(memory_format=torch.contiguous_format)


def _few(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a small copy of a weight."""
    if not value.dim():
        return ()
    few = min(len(value), ROWS if value.dim() > 1 else LONG), *value.shape[1:]
    if value.dim() < 3 or math.prod(few) <= LARGE:
        return few
    return (*(min(size, ROWS) for size in few[:-1]), few[-1])


def _cut(value: torch.Tensor) -> list[torch.Tensor]:
    """Return a weight's rows in up to three parts."""
    if not value.dim() or len(value) < 2:
        return [value]
    first, second = max(1, len(value) // 3), max(2, len(value) // 2)
    return [part for part in (value[:first], value[first:second], value[second:]) if len(part)]


def _changed(
    task: Task, parts: Mapping[str, Sequence[torch.Tensor]], model: nn.Module | None
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, object]]]:
    """Return the weights after some steps of an optimizer that has these parts of them, and the first parts' state."""
    set_random_key(random_key("division"))
    made = {name: [nn.Parameter(part.clone()) for part in of] for name, of in parts.items()}
    pairs = [(name, part) for name, of in made.items() for part in of]
    if model is not None and takes_model(task):
        # It may look for the parameters of any module, as in a run; of the others there are no rows.
        device = pairs[0][1].device
        pairs += [
            (name, nn.Parameter(torch.zeros((0, *value.shape[1:])[: value.dim()], dtype=value.dtype, device=device)))
            for name, value in model.named_parameters()
            if value.requires_grad and name not in made
        ]
    optimizer = build_optimizer(task, pairs, model)
    for step in range(STEPS):
        for name, of in made.items():
            at = 0
            for part in of:
                part.grad = _gradient(name, step, part, at)
                at += part.numel()
        optimizer.step()
    weights = {
        name: torch.cat([p.detach() for p in of]) if of[0].dim() else of[0].detach() for name, of in made.items()
    }
    return weights, {name: dict(optimizer.state.get(of[0], {})) for name, of in made.items()}


def _gradient(name: str, step: int, part: torch.Tensor, at: int) -> torch.Tensor:
    """Return values that depend on the weight's name, the step, and the place in the weight alone."""
    numbers = torch.arange(at, at + part.numel(), dtype=torch.float64, device=part.device)
    values = torch.sin(numbers * 1.37 + step + len(name)) * (1.0 + numbers % 5)
    return values.reshape(part.shape).to(part.dtype)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))


def _by_rows(state: Mapping[str, object], value: torch.Tensor) -> bool:
    """Return whether an optimizer's state of a weight is one value for each of the weight, or one for all."""
    return all(one.shape == value.shape or not one.dim() for one in state.values() if isinstance(one, torch.Tensor))


def _whole_bytes(task: Task, name: str, value: torch.Tensor, model: nn.Module | None) -> int:
    """Return the bytes of the optimizer's state of this whole weight."""
    return _bytes_of(_changed(task, {name: [value]}, model)[1][name])


def _bytes_of(state: Mapping[str, object]) -> int:
    """Return the bytes of the tensors of an optimizer's state of a weight, without single numbers."""
    return sum(one.nbytes for one in state.values() if isinstance(one, torch.Tensor) and one.dim())
