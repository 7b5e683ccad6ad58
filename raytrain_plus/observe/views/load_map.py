"""Draw the loads of experts over the steps of a run as SVG of bounded size: experts down, steps across. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.run_progress import plural
from raytrain_plus.observe.views.thinned import Thinned

ROWS = 64
"""Maximum rows of all layers that are drawn; of more experts, neighbours share a row, which has the largest load."""
_WIDTH, _LEFT, _RIGHT = 640, 52, 616
"""As in the chart of the run, below which it stands: both have the same steps across."""
_MORE, _LESS = "#e45756", "#4c8dca"
_LEVELS = 4
"""Shades of each colour: the last one is for four times the even load, or more, and for a quarter of it, or less."""


@dataclass(frozen=True, slots=True)
class _Column:
    """Steps close together: the first one, their number, and the mean load of each expert over the even one."""

    step: int
    count: int
    loads: Sequence[float]

    def join(self, later: _Column) -> _Column:
        count = self.count + later.count
        share = later.count / count
        loads = [one + share * (other - one) for one, other in zip(self.loads, later.loads, strict=True)]
        return _Column(self.step, count, loads)


class LoadMap:
    """The loads of a run's experts so far: a map for each of the layers with the largest MaxVio."""

    def __init__(self, total: int) -> None:
        """Begin without any, in a run of `total` steps."""
        self._total = total
        self._made = 0
        self._columns: dict[str, Thinned[_Column]] = {}
        self._newest: dict[str, Mapping[str, Any]] = {}

    def add(self, event: RunEvent) -> None:
        """Add one event; events must come in order."""
        if event["kind"] == "step_committed":
            self._made = event["step"] + 1
        elif event["kind"] == "experts":
            self._newest |= event["layers"]
            for name, use in event["layers"].items():
                load, step = use["load"], event["step"]
                loads = [len(load) * one / sum(load) for one in load]
                self._columns.setdefault(name, Thinned(_Column.join, 1)).add(step, _Column(step, 1, loads))
        elif event["kind"] == "resumed":
            self._made = event["step"] + 1
            for columns in self._columns.values():
                columns.cut(event["step"])

    def svg(self) -> str:
        """Return an SVG document; empty without experts."""
        if not self._columns:
            return ""
        drawn, top, shown = [], 40, self._shown()
        for name in shown:
            experts = len(self._newest[name]["load"])
            drawn.append(_text(_LEFT, top, f"{name}: MaxVio {self._newest[name]['max_vio']:.2f}"))
            drawn += self._map(name, experts, top + 6)
            top += 6 + _rows(experts) * _row_height(experts) + 20
        if more := len(self._columns) - len(shown):
            drawn.append(_text(_LEFT, top, f"{plural(more, 'more layer')} with a smaller MaxVio"))
            top += 14
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" '
                f'viewBox="0 0 {_WIDTH} {top}" font-family="sans-serif" font-size="11" fill="currentColor" '
                'style="max-width:100%">',
                _text(_LEFT, 17, "load of experts over steps; red: more than the even load, blue: less"),
                *drawn,
                "</svg>\n",
            ]
        )

    def _shown(self) -> list[str]:
        """Return the layers that are drawn, in the order of the model: the worst of them, as far as there is room."""
        left, found = ROWS, set[str]()
        for name in sorted(self._newest, key=lambda name: -self._newest[name]["max_vio"]):
            left -= _rows(len(self._newest[name]["load"]))
            if left < 0:
                break
            found.add(name)
        return [name for name in self._columns if name in found]

    def _map(self, name: str, experts: int, top: int) -> Iterator[str]:
        """Yield a layer's map: one path for each shade."""
        columns, end = list(self._columns[name]), max(self._total, self._made, 1)
        rows, height = _rows(experts), _row_height(experts)

        def x(step: int) -> float:
            return _LEFT + (_RIGHT - _LEFT) * step / end

        starts = [*(x(column.step) for column in columns), x(self._made)]
        paths: dict[int, list[str]] = {}
        for row in range(rows):
            own = slice(row * experts // rows, (row + 1) * experts // rows)
            levels = [_level(max(column.loads[own])) for column in columns]
            # Neighbours of one shade are one rectangle.
            for level, run in groupby(range(len(columns)), key=levels.__getitem__):
                places = list(run)
                left, wide = starts[places[0]], starts[places[-1] + 1] - starts[places[0]]
                paths.setdefault(level, []).append(f"M{left:.1f} {top + row * height}h{wide:.1f}v{height}h{-wide:.1f}z")
        for level, found in sorted(paths.items()):
            if level:
                color = _MORE if level > 0 else _LESS
                yield f'<path d="{"".join(found)}" fill="{color}" fill-opacity="{abs(level) / _LEVELS:g}"/>'
        yield (
            f'<rect x="{_LEFT}" y="{top}" width="{_RIGHT - _LEFT}" height="{rows * height}" fill="none" '
            'stroke="currentColor" stroke-opacity="0.3"/>'
        )


def _rows(experts: int) -> int:
    return min(experts, ROWS)


def _row_height(experts: int) -> int:
    """Return the pixels of a row.

    >>> [_row_height(experts) for experts in (8, 16, 64, 256)]
    [8, 8, 2, 2]
    """
    return max(2, min(8, 128 // _rows(experts)))


def _level(load: float) -> int:
    """Return the shade of a load over the even one: two for each doubling, below 0 for less than 1.

    >>> [_level(load) for load in (0.0, 0.5, 0.9, 1.0, 1.1, 1.5, 2.0, 8.0)]
    [-4, -2, 0, 0, 0, 1, 2, 4]
    """
    return -_LEVELS if load <= 0 else max(-_LEVELS, min(_LEVELS, round(2 * math.log2(load))))


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape("".join(one if one.isprintable() else " " for one in text))}</text>'
