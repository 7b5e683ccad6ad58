"""Buffers that are not persistent and that a module makes, or makes larger, by itself: masks, tables of positions.

Each worker has its own, and one that joins later has none. So a module must compute the same bits with and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn

from raytrain_plus.torch_compat import buffers_of, transient_buffers

_COPIED = (dict, list, set)
"""The types of attributes that a forward pass changes in place."""


class Transient:
    """Compares such buffers with those that a module was built with."""

    def __init__(self, module: nn.Module) -> None:
        """Note what is there before any forward pass."""
        self._modules = dict(module.named_modules())
        self._attributes = {place: _copied(vars(one)) for place, one in self._modules.items()}
        self._buffers = {
            place: {name: None if value is None else value.clone() for name, value in transient_buffers(one).items()}
            for place, one in self._modules.items()
        }

    def grown(self) -> list[str]:
        """Return the names of the buffers that have appeared, or have another shape."""
        return [f"{place}.{name}".lstrip(".") for place in self._modules for name in self._grown_in(place)]

    def _grown_in(self, place: str) -> Iterator[str]:
        for name, value in transient_buffers(self._modules[place]).items():
            before = self._buffers[place].get(name)
            if value is not None and (before is None or before.shape != value.shape):
                yield name

    @contextmanager
    def as_built(self) -> Iterator[None]:
        """Put the modules that have such buffers back, while the context is open, into the form that they were in."""
        found = {place: one for place, one in self._modules.items() if any(self._grown_in(place))}
        present = {place: dict(vars(one)) for place, one in found.items()}
        try:
            for place, one in found.items():
                others = {name: value for name, value in buffers_of(one).items() if name not in transient_buffers(one)}
                _put(one, _copied(self._attributes[place]))
                buffers_of(one).update({**self._buffers[place], **others})
            yield
        finally:
            for place, one in found.items():
                _put(one, present[place])


def _copied(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy(value) if type(value) in _COPIED else value for name, value in attributes.items()}


def _put(module: nn.Module, attributes: dict[str, Any]) -> None:
    vars(module).clear()
    vars(module).update(attributes)
