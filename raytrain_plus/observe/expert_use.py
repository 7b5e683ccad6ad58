"""How steps use the experts of a model: their loads, dropped choices and the entropy of their routers. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EVERY_STEP = 10
"""The first steps of a run, each of which is reported."""
PERIOD_S = 1.0
"""Minimum seconds between two later reports."""
SHARE = 0.01
"""The same as a share of the time since the group began to train: a run of days keeps all of its events."""

LayerUses = Mapping[str, Mapping[str, Any]]
"""The fields of an event by layer: see `ExpertUse.fields`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertUse:
    """How a step has used the experts of a layer, over all shards."""

    load: Sequence[int]
    """How many tokens have chosen each expert, dropped ones too."""
    dropped: int
    """The choices that were dropped, because their expert had no room."""
    entropy: float
    """Mean entropy of the router's shares of a token, in nats; the logarithm of the number of experts if even."""
    capacity: float | None
    """See `layers.Experts`."""

    @property
    def choices(self) -> int:
        """The number of all choices: tokens times experts of each."""
        return sum(self.load)

    @property
    def max_vio(self) -> float:
        """How far the largest load exceeds the mean one, as a share of that: 0 if all are equal."""
        return max(self.load) * len(self.load) / self.choices - 1

    def fields(self) -> dict[str, Any]:
        """Return what an event has of it; `dropped` as a share of the choices."""
        return {
            "load": list(self.load),
            "max_vio": self.max_vio,
            "dropped": self.dropped / self.choices,
            "entropy": self.entropy,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsUsed:
    """How an applied step has used the experts of the layers that a worker holds; with stages, those of its own."""

    step: int
    layers: Mapping[str, ExpertUse]

    def fields(self) -> dict[str, Any]:
        """Return the fields of its event."""
        return {"step": self.step, "layers": {name: use.fields() for name, use in self.layers.items()}}


class ExpertReports:
    """Chooses the steps of a generation whose use of experts is reported."""

    def __init__(self, end: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now, by a clock in seconds, in a run that ends before step `end`."""
        self._end = end
        self._clock = clock
        self._began = clock()
        self._next = self._began

    def due(self, step: int) -> bool:
        """Return whether this step is reported; steps come in order."""
        now = self._clock()
        if step >= EVERY_STEP and step + 1 < self._end and now < self._next:
            return False
        self._next = now + max(PERIOD_S, SHARE * (now - self._began))
        return True


class ExpertsReported:
    """What workers have reported, each until its step is committed."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, frozenset[str]], ExpertsUsed] = {}
        self._taken: dict[frozenset[str], int] = {}
        """The newest step of some layers that was taken."""

    def add(self, used: ExpertsUsed) -> None:
        """Add a report, which may come again."""
        self._waiting[used.step, frozenset(used.layers)] = used

    def take(self, committed: int) -> list[ExpertsUsed]:
        """Return what is new of steps up to the highest committed one, in order."""
        found = []
        for step, layers in sorted(self._waiting, key=lambda key: key[0]):
            if step > committed:
                break
            used = self._waiting.pop((step, layers))
            if step > self._taken.get(layers, -1):
                self._taken[layers] = step
                found.append(used)
        return found

    def clear(self) -> None:
        """Forget all: steps are made again."""
        self._waiting.clear()
        self._taken.clear()


def experts_text(layers: LayerUses) -> str:
    """Return the worst of some layers as text; empty without any.

    >>> even, other = {"max_vio": 0.02, "dropped": 0.0}, {"max_vio": 0.214, "dropped": 0.0}
    >>> experts_text({"block0": even, "block2": other})
    'MaxVio 0.21 at most (block2), none dropped'
    >>> experts_text({"block0": {**even, "dropped": 0.031}, "block2": other})
    'MaxVio 0.21 at most (block2), 3.1 % dropped at most'
    >>> experts_text({})
    ''
    """
    if not layers:
        return ""
    name = max(layers, key=lambda name: layers[name]["max_vio"])
    dropped = max(one["dropped"] for one in layers.values())
    lost = f"{100 * dropped:.1f} % dropped at most" if dropped else "none dropped"
    return f"MaxVio {layers[name]['max_vio']:.2f} at most ({name}), {lost}"
