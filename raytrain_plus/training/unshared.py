"""What each worker has for itself of a model and its task: attributes, generators, buffers that are not persistent.

No other worker gets them, and no checkpoint holds them. A trial notices what a step changes of them.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from raytrain_plus.errors import TaskError
from raytrain_plus.task import Task
from raytrain_plus.torch_compat import write_count
from raytrain_plus.training.remarks import attributes_changed
from raytrain_plus.training.transient import Transient

DEPTH = 4
"""How deep objects are looked into."""
LARGE = 10_000
"""More items or numbers than these are not looked at one by one."""
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


class Unshared:
    """What a model and its task keep beside parameters and persistent buffers."""

    def __init__(self, task: Task, module: nn.Module) -> None:
        """Note it, before any forward pass."""
        self._attributes = {"task": Attributes(task), "model": Attributes(module)}
        self._transient = Transient(module)

    def remarks(self) -> list[str]:
        """Return remarks on what has changed. Raises `TaskError` if it has drawn random numbers."""
        for whose, one in self._attributes.items():
            for name in one.drawn():
                raise TaskError(
                    f"a step draws from the generator '{name}' of the {whose}, from which a worker that joins later "
                    "draws other numbers",
                    expected="torch's own generator, which a run sets by step, shard and microbatch",
                    remedy="call torch.rand, np.random.rand or random.random without a generator of your own",
                )
        found = [f"'{name}' of the {whose}" for whose, one in self._attributes.items() for name in one.changed()]
        return [attributes_changed(found).text] if found else []

    def check_transient(self, outputs: Callable[[], list[torch.Tensor]]) -> None:
        """Raise `TaskError` if `outputs` differ with and without the buffers that forward passes have made.

        Such buffers are not persistent. `outputs` must return the same bits for the same buffers.
        """
        grown = self._transient.grown()
        if not grown:
            return
        found = outputs()
        with self._transient.as_built():
            again = outputs()
        if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(found, again, strict=True)):
            raise TaskError(
                f"the model computes something else without the buffer '{grown[0]}', which a forward pass has made and "
                "is not persistent; a worker that joins later does not have it",
                expected="a buffer that depends on the shape of the batch alone",
                remedy="if it depends on values, make it persistent and register it in the constructor",
            )


class Attributes:
    """Compares what an object keeps now with what it kept before."""

    def __init__(self, root: object) -> None:
        """Note what `root` keeps: a task, or a module with all in it."""
        self._root = root
        # The values are held, too: a new object might have the identity of one that is gone.
        self._before = {name: (value, _said(value, DEPTH)) for name, value in _kept(root)}

    def changed(self) -> list[str]:
        """Return the names of what is another value now, without generators."""
        return [name for name, value in self._differing() if not _is_generator(value)]

    def drawn(self) -> list[str]:
        """Return the names of the generators from which random numbers have been drawn."""
        return [name for name, value in self._differing() if _is_generator(value)]

    def _differing(self) -> Iterator[tuple[str, Any]]:
        found = set[int]()
        for name, value in _kept(self._root):
            _, before = self._before.get(name, (None, None))
            # Modules may share an object, such as their configuration.
            if id(value) not in found and _differs(before, _said(value, DEPTH)):
                if not isinstance(value, _PLAIN):
                    found.add(id(value))
                yield name, value


def _kept(root: object) -> Iterator[tuple[str, Any]]:
    """Yield the attributes, by name."""
    modules = root.named_modules() if isinstance(root, nn.Module) else [("", root)]
    for place, one in modules:
        for attribute, value in list(vars(one).items()):
            if attribute not in _OF_TORCH:
                yield f"{place}.{attribute}" if place else attribute, value


def _is_generator(value: object) -> bool:
    return isinstance(value, (torch.Generator, *_GENERATORS))


def _differs(before: Any, now: Any) -> bool:
    """Return whether what `_said` has returned tells of a change.

    What was None, or was not there, and is no number now, has been made when it was first needed.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return any(_differs(before.get(name), one) for name, one in now.items())
    if before is None:
        return isinstance(now, tuple) and now[0] in (bool, int, float)
    return bool(before != now)


def _said(value: Any, depth: int) -> Any:
    """Return what can be compared with the same of another time; None for what cannot be looked into."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, torch.Tensor):
        # What belongs to the graph of a step is none of the module's state.
        return None if value.grad_fn is not None else (id(value), write_count(value))
    if isinstance(value, np.ndarray):
        return id(value) if value.size > LARGE or value.dtype == object else (value.shape, value.tobytes())
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, _GENERATORS):
        return pickle.dumps(value)
    if not depth or isinstance(value, (type, ModuleType, nn.Module)) or callable(value):
        return None
    if isinstance(value, (Mapping, Sequence, Set, deque)) and len(value) > LARGE:
        return len(value)
    if isinstance(value, Mapping):
        return [(_said(key, depth - 1), _said(one, depth - 1)) for key, one in value.items()]
    if isinstance(value, (Sequence, deque)):
        return [_said(one, depth - 1) for one in value]
    if isinstance(value, Set):
        return sorted(map(repr, value))
    held = getattr(value, "__dict__", None)
    return None if held is None else {name: _said(one, depth - 1) for name, one in held.items()}
