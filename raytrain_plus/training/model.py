"""The model as the platform holds it: built under its random keys, with its layers' names and its device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy as shallow
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.task import Task
from raytrain_plus.training.randomness import random_key, set_random_key


@dataclass(frozen=True, slots=True)
class Built:
    """A model, or a run of its layers, and their names in order (none where the task did not say them)."""

    module: nn.Module
    layers: tuple[str, ...]


def build_model(task: Task, seed: int, device: torch.device) -> Built:
    """Builds the task's model on `device`, each layer under the key (seed, 'init', layer name).

    A task that does not say its layers is built whole under the empty layer name; a plain `nn.Sequential` has its
    modules as layers. Values are drawn on the CPU, so they do not depend on the device. Raises `TaskError` where what
    comes back is no module.
    """
    layers = task.layers()
    if layers is not None:
        return _built(layers, tuple(layers), seed, device)
    module = _whole(task, seed)
    return Built(module.to(device), tuple(_children(module)))


def build_chunks(task: Task, seed: int, device: torch.device, chunks: Sequence[Sequence[str]]) -> tuple[Built, ...]:
    """Builds these runs of the model's layers, by name, and no others: the same as in the whole model.

    Raises `TaskError` where the task does not say its layers.
    """
    layers = task.layers()
    if layers is not None:
        return tuple(_built(layers, names, seed, device) for names in chunks)
    children = _children(_whole(task, seed))
    if not children:
        raise _no_layers()
    _check_apart(children)
    return tuple(
        Built(nn.Sequential(OrderedDict((name, children[name]) for name in names)).to(device), tuple(names))
        for names in chunks
    )


def layer_names(task: Task, seed: int) -> tuple[str, ...]:
    """The names of the model's layers, in order; what has to be built for it holds no values, where that is possible.

    Raises `TaskError` where the task does not say them.
    """
    layers = task.layers()
    if layers is not None:
        return tuple(layers)
    try:
        with torch.device("meta"):
            names = tuple(_children(task.model()))
    except Exception:
        # Of a model that reads its values from a file, say.
        names = tuple(_children(_whole(task, seed)))
    if not names:
        raise _no_layers()
    return names


def _no_layers() -> TaskError:
    return TaskError(
        "a model that does not say its layers cannot be cut into stages",
        where="parallel.pipeline",
        expected="layers(), or a model() that is an nn.Sequential with each module in it once",
    )


def _built(
    layers: Mapping[str, Callable[[], nn.Module]], names: Sequence[str], seed: int, device: torch.device
) -> Built:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for name in names:
        set_random_key(random_key(seed, "init", name))
        parts[name] = layers[name]()
        _check_module(parts[name], f"layers()['{name}']")
    module = nn.Sequential(parts)
    if len(names) == len(layers):
        _check_module(module, "model()")
    return Built(module.to(device), tuple(names))


def _whole(task: Task, seed: int) -> nn.Module:
    set_random_key(random_key(seed, "init", ""))
    module = task.model()
    _check_module(module, "model()")
    return module


def _check_apart(children: Mapping[str, nn.Module]) -> None:
    """Raises `TaskError` where two layers share a tensor: on two stages each would have one of its own."""
    owners: dict[int, str] = {}
    for name, child in children.items():
        for own, value in (*child.named_parameters(), *child.named_buffers()):
            other = owners.setdefault(id(value), name)
            if other != name:
                raise TaskError(
                    f"'{name}.{own}' is a tensor of the layer '{other}', too, and could be on another stage",
                    where="parallel.pipeline",
                    expected="layers that share no parameter and no buffer",
                )


def _children(module: nn.Module) -> dict[str, nn.Module]:
    """The modules of a plain sequence, by name; none where it is anything else, or has one of them twice."""
    if type(module) is not nn.Sequential:
        return {}
    children = dict(module.named_children())
    return children if len(children) == len(module) else {}


def _check_module(value: Any, source: str) -> None:
    if not isinstance(value, nn.Module):
        raise TaskError(f"{source} returned {type(value).__name__}", expected="a torch.nn.Module")
    if source == "model()" and not any(parameter.requires_grad for parameter in value.parameters()):
        raise TaskError("the model has no parameter to train", expected="at least one that requires a gradient")
    for name, part in value.named_modules():
        for attribute, held in vars(part).items():
            # What is computed from parameters (as weight_norm does) is no state of its own.
            if isinstance(held, torch.Tensor) and held.grad_fn is None:
                where = f"{name}.{attribute}" if name else attribute
                raise TaskError(
                    f"{source}: '{where}' is a plain tensor, which no other worker sees",
                    expected="parameters and buffers alone",
                    remedy=f"self.register_buffer('{attribute}', ..., persistent=False)",
                )


def to_device(batch: Any, device: torch.device, copy: bool = False) -> Any:
    """`batch` with every tensor in it on `device`; with `copy`, none of them the same.

    Dicts, lists and tuples are searched; what is of another kind is moved by its own `to`, where it has one.
    """
    if device.type == "cpu" and not copy:
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True, copy=copy)
    if hasattr(batch, "to"):
        # Of a kind of its own, such as a tokenizer's, that knows how to move itself.
        return (deepcopy(batch) if copy else batch).to(device)
    if isinstance(batch, dict):
        moved = {key: to_device(value, device, copy) for key, value in batch.items()}
        if type(batch) is dict:
            return moved
        made = shallow(batch)
        made.update(moved)
        return made
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, copy) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device, copy) for value in batch)
    return batch
