"""The training state on its way from one worker to another: taken whole, checked, put in place whole.

A snapshot holds everything that a step changes: parameters, buffers (those that are not persistent, too), the
optimizer's state and settings, the scheduler. The receiver keeps it beside its own state until it is complete and its
hash agrees, and only then swaps it in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from raytrain_plus.errors import TaskError

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker's training state after `step`."""

    step: int
    tensors: Mapping[str, tuple[str, tuple[int, ...], Array]]
    """Name -> (dtype, shape, bytes)."""
    values: bytes
    """What is no tensor, pickled: the optimizer's plain values and settings, the scheduler's state, the grids."""
    digest: str


@dataclass(frozen=True, slots=True)
class Holding:
    """Where a worker keeps its training state."""

    buffers: Mapping[str, torch.Tensor]
    """The committed ones."""
    parameters: Sequence[tuple[str, nn.Parameter]]
    """Those that train."""
    frozen: Sequence[tuple[str, nn.Parameter]]
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scales: dict[str, int]
    """The grids of the next exact sums; empty where sums are not exact."""


def take(step: int, holding: Holding) -> Snapshot:
    """The state after `step`."""
    tensors: dict[str, torch.Tensor] = {
        f"param/{name}": value.detach() for name, value in (*holding.parameters, *holding.frozen)
    }
    tensors |= {f"buffer/{name}": value.detach() for name, value in holding.buffers.items()}
    plain: dict[str, Any] = {}
    on_cpu: list[str] = []
    names = {id(value): name for name, value in holding.parameters}
    for parameter, state in holding.optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                name = f"optim/{names[id(parameter)]}/{key}"
                tensors[name] = value.detach()
                if value.device.type == "cpu":
                    on_cpu.append(name)
            else:
                plain[f"{names[id(parameter)]}/{key}"] = value
    packed = {name: _pack(value) for name, value in tensors.items()}
    values = {
        "optimizer": plain,
        "on_cpu": frozenset(on_cpu),
        "groups": [
            {key: value for key, value in group.items() if key != "params"} for group in holding.optimizer.param_groups
        ],
        "scheduler": None if holding.scheduler is None else holding.scheduler.state_dict(),
        "scales": dict(holding.scales),
    }
    plain_bytes = cloudpickle.dumps(values)
    return Snapshot(step, packed, plain_bytes, digest(step, packed, plain_bytes))


def digest(step: int, tensors: Mapping[str, tuple[str, tuple[int, ...], Array]], values: bytes) -> str:
    """XXH3 (128 bits) over all of it, tensors by name: it guards against damage, not against malice."""
    total = xxhash.xxh3_128(f"{step}\0".encode() + values)
    for name in sorted(tensors):
        dtype, shape, data = tensors[name]
        total.update(f"{name}\0{dtype}\0{shape}\0".encode())
        total.update(data.data)
    return total.hexdigest()


def put(snapshot: Snapshot, holding: Holding) -> None:
    """Swaps a snapshot in. Raises `TaskError` where it is another model's: before anything is changed."""
    values = cloudpickle.loads(snapshot.values)
    targets: dict[str, torch.Tensor] = {
        f"param/{name}": value for name, value in (*holding.parameters, *holding.frozen)
    }
    targets |= {f"buffer/{name}": value for name, value in holding.buffers.items()}
    optim = {name: _parameter_of(name) for name in snapshot.tensors if name.startswith("optim/")}
    given = snapshot.tensors.keys() - optim.keys()
    by_name = dict(holding.parameters)
    differing = sorted((given ^ targets.keys()) | (set(optim.values()) - by_name.keys()))
    if differing:
        raise TaskError(f"the task built another model than on other workers: {differing[:3]}")
    for name, target in targets.items():
        if tuple(target.shape) != snapshot.tensors[name][1]:
            raise TaskError(f"the task built another model than on other workers: {name} has another shape")
    with torch.no_grad():
        for name, target in targets.items():
            _fill(target, snapshot.tensors[name])
    holding.optimizer.state.clear()
    for name, parameter in optim.items():
        packed = snapshot.tensors[name]
        # A step count stays on the CPU where the optimizer keeps it there.
        device = torch.device("cpu") if name in values["on_cpu"] else by_name[parameter].device
        value = torch.empty(packed[1], dtype=getattr(torch, packed[0]), device=device)
        _fill(value, packed)
        holding.optimizer.state[by_name[parameter]][name.rpartition("/")[2]] = value
    for name, value in values["optimizer"].items():
        parameter, _, key = name.rpartition("/")
        holding.optimizer.state[by_name[parameter]][key] = value
    for group, settings in zip(holding.optimizer.param_groups, values["groups"], strict=True):
        group.update(settings)
    if holding.scheduler is not None:
        holding.scheduler.load_state_dict(values["scheduler"])
    holding.scales.clear()
    holding.scales.update(values["scales"])


def _parameter_of(name: str) -> str:
    """The parameter that an optimizer's tensor belongs to."""
    return name.removeprefix("optim/").rpartition("/")[0]


def _pack(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], Array]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _bytes(tensor.detach().cpu().contiguous())


def _bytes(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous tensor on the CPU."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def _fill(target: torch.Tensor, packed: tuple[str, tuple[int, ...], Array]) -> None:
    """Copies packed values into `target`; what came through Ray's object store is neither kept nor written to."""
    dtype, _, data = packed
    if target.device.type == "cpu" and target.is_contiguous() and str(target.dtype) == f"torch.{dtype}":
        np.copyto(_bytes(target), data)
    else:
        target.copy_(torch.from_numpy(np.array(data)).view(getattr(torch, dtype)).reshape(target.shape))
