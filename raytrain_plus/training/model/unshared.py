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
from torch.optim.lr_scheduler import LRScheduler

from raytrain_plus.errors import TaskError
from raytrain_plus.task import Task
from raytrain_plus.torch_compat import write_count
from raytrain_plus.training.model.transient import Transient

DEPTH = 4
"""How deep objects are looked into."""
LARGE = 100_000
"""More items or numbers than these, of all attributes together, are not looked at one by one."""
ROUNDING = 1e-3
"""The largest relative difference of outputs whose bits need not be the same."""
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_GLOBAL: tuple[object, ...] = (
    torch.default_generator,
    np.random.get_state.__self__,  # type: ignore[attr-defined]
    random.getstate.__self__,  # type: ignore[attr-defined]
)
"""The generators of the process, which a run seeds."""
_NOT_LOOKED_INTO = (type, ModuleType, nn.Module, torch.optim.Optimizer, LRScheduler)


class Unshared:
    """What a model and its task keep beside parameters and persistent buffers."""

    def __init__(self, module: nn.Module, task: Task | None = None) -> None:
        """Note it, before any forward pass."""
        self._attributes = {"model": Attributes(module)} | ({} if task is None else {"task": Attributes(task)})
        self._transient = Transient(module)

    def changed(self) -> list[str]:
        """Return what has changed, with whose it is. Raises `TaskError` for a generator that was drawn from."""
        for whose, one in self._attributes.items():
            for name in one.drawn():
                raise TaskError(
                    f"a step draws from the generator '{name}' of the {whose}, from which a worker that joins later "
                    "draws other numbers",
                    expected="torch's own generator, which a run sets by step, shard and microbatch",
                    remedy="call torch.rand, np.random.rand or random.random without a generator of your own",
                )
        return [f"'{name}' of the {whose}" for whose, one in self._attributes.items() for name in one.changed()]

    def check_transient(self, outputs: Callable[[], list[torch.Tensor]], *, exact: bool) -> None:
        """Raise `TaskError` if `outputs` differ with and without the buffers that forward passes have made.

        Such buffers are not persistent. `exact`: differences of rounding count, too. Outputs that differ each time have
        other reasons.
        """
        grown = self._transient.grown()
        if not grown:
            return
        found = outputs()
        if not _alike(found, outputs(), exact=exact):
            return
        with self._transient.as_built():
            again = outputs()
        if not _alike(found, again, exact=exact):
            raise TaskError(
                f"the model computes something else without the buffer '{grown[0]}', which a forward pass has made and "
                "is not persistent; a worker that joins later does not have it",
                expected="a buffer that depends on the shape of the batch alone",
                remedy="if it depends on values, make it persistent and register it in the constructor",
            )


def _alike(found: Sequence[torch.Tensor], other: Sequence[torch.Tensor], *, exact: bool) -> bool:
    pairs = [(one.detach().nan_to_num(), two.detach().nan_to_num()) for one, two in zip(found, other, strict=True)]
    return all(torch.equal(*pair) if exact else torch.allclose(*pair, rtol=ROUNDING) for pair in pairs)


class Attributes:
    """Compares what an object keeps now with what it kept before."""

    def __init__(self, root: object) -> None:
        """Note what `root` keeps: a task, or a module with all in it."""
        self._root = root
        look = _Look()
        # The values are held, too: a new object might have the identity of one that is gone.
        self._before = {name: (value, look.at(value)) for name, value in _kept(root)}

    def changed(self) -> list[str]:
        """Return the names of what is another value now, without generators."""
        return [name for name, value in self._differing() if not _is_generator(value)]

    def drawn(self) -> list[str]:
        """Return the names of the generators from which random numbers have been drawn."""
        return [name for name, value in self._differing() if _is_generator(value)]

    def _differing(self) -> Iterator[tuple[str, Any]]:
        found, look = set[int](), _Look()
        for name, value in _kept(self._root):
            _, before = self._before.get(name, (None, None))
            now = look.at(value)
            appeared = before is None and now is not None and _is_generator(value)
            # Modules may share an object, such as their configuration.
            if id(value) not in found and (appeared or _differs(before, now)):
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
    """Return whether what a look has returned tells of a change.

    What was None, or was not there, and is no number now, has been made when it was first needed.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return any(_differs(before.get(name), one) for name, one in now.items())
    if before is None:
        return isinstance(now, tuple) and now[0] in (bool, int, float)
    return bool(before != now)


class _Look:
    """Returns what can be compared with the same of another time; None for what cannot be looked into."""

    def __init__(self) -> None:
        self._left = LARGE

    def at(self, value: Any) -> Any:
        """Return it for a value, whatever its code raises."""
        try:
            return self._said(value, DEPTH)
        except Exception:
            return None

    def _said(self, value: Any, depth: int) -> Any:
        if isinstance(value, float):
            return float, repr(value)
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, torch.Tensor):
            # A parameter is the model's; what belongs to the graph of a step is none of the module's state.
            own = isinstance(value, nn.Parameter) or value.grad_fn is not None
            return None if own else (id(value), write_count(value))
        if isinstance(value, np.ndarray):
            return id(value) if value.size > LARGE or value.dtype == object else (value.shape, value.tobytes())
        if any(value is one for one in _GLOBAL):
            return None
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, _GENERATORS):
            return pickle.dumps(value)
        if not depth or isinstance(value, _NOT_LOOKED_INTO) or callable(value):
            return None
        if isinstance(value, (Mapping, Sequence, Set, deque)):
            if len(value) > self._left:
                return len(value)
            self._left -= len(value)
        if isinstance(value, Mapping):
            return [(self._said(key, depth - 1), self._said(one, depth - 1)) for key, one in value.items()]
        if isinstance(value, (Sequence, deque)):
            return [self._said(one, depth - 1) for one in value]
        if isinstance(value, Set):
            return sorted(map(repr, value))
        held = getattr(value, "__dict__", None)
        return None if held is None else {name: self._said(one, depth - 1) for name, one in held.items()}
