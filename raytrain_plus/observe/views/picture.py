"""Draw one step of a pipeline as SVG, and export it for trace viewers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Protocol


class _Action(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def microbatch(self) -> int: ...


class _Bar(Protocol):
    @property
    def action(self) -> _Action: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


Bars = Mapping[tuple[int, int], Sequence[_Bar]]
"""The passes of each model replica and stage, with times in seconds since the first one began.

Keys: (index of the replica, stage).
"""

KINDS = {
    "F": ("forward", "#4c78a8"),
    "B": ("backward", "#f58518"),
    "I": ("backward, for the input", "#eca35c"),
    "W": ("backward, for the weights", "#b279a2"),
}
_LEFT, _WIDTH, _ROW, _GAP, _TOP = 110, 1000, 22, 10, 44
_TICKS = 8


def svg(bars: Bars, title: str) -> str:
    """Return the step as an SVG document: a row for each stage, time from left to right, numbered microbatches."""
    whole = max((bar.end for row in bars.values() for bar in row), default=0.0) or 1.0
    rows, at, replica_before = [], _TOP, -1
    for (replica, stage), row in sorted(bars.items()):
        at += _GAP * (replica_before not in (-1, replica))
        replica_before = replica
        rows.append(_text(_LEFT - 8, at + 15, f"replica {replica}, stage {stage}", anchor="end"))
        for bar in row:
            rows.append(_box(bar, at, whole))
        at += _ROW
    height = at + 34
    seconds = [whole * number / _TICKS for number in range(_TICKS + 1)]
    axis = [
        f'<line x1="{_x(s, whole):.1f}" y1="{_TOP - 4}" x2="{_x(s, whole):.1f}" y2="{at}" stroke="#ddd"/>'
        + _text(_x(s, whole), at + 16, f"{1000 * s:.0f} ms", anchor="middle")
        for s in seconds
    ]
    used = [kind for kind in KINDS if any(bar.action.kind == kind for row in bars.values() for bar in row)]
    legend, x = [], float(_LEFT)
    for kind in used:
        name, color = KINDS[kind]
        legend.append(f'<rect x="{x:.0f}" y="24" width="11" height="11" fill="{color}"/>{_text(x + 16, 34, name)}')
        x += 40 + 6.5 * len(name)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 40}" height="{height}" '
            'font-family="sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="white"/>',
            _text(_LEFT, 16, title, size=13),
            *legend,
            *axis,
            *rows,
            "</svg>\n",
        ]
    )


def _x(seconds: float, whole: float) -> float:
    return _LEFT + _WIDTH * seconds / whole


def _box(bar: _Bar, at: int, whole: float) -> str:
    name, color = KINDS[bar.action.kind]
    left, width = _x(bar.start, whole), _WIDTH * (bar.end - bar.start) / whole
    told = (
        f"{name} of microbatch {bar.action.microbatch}, chunk {bar.action.chunk}: {1000 * (bar.end - bar.start):.2f} ms"
    )
    box = (
        f'<rect x="{left:.2f}" y="{at}" width="{max(width, 0.5):.2f}" height="{_ROW - 3}" fill="{color}" '
        f'stroke="white" stroke-width="0.5"><title>{escape(told)}</title></rect>'
    )
    label = str(bar.action.microbatch)
    if width > 7 * len(label) + 2:
        box += _text(left + width / 2, at + 14, label, anchor="middle", fill="white")
    return box


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, fill: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(text)}</text>'
    )


def trace(bars: Bars) -> dict[str, Any]:
    """Return the step in the Trace Event Format of chrome://tracing and Perfetto.

    A model replica is a process, a stage a thread.
    """
    events: list[dict[str, Any]] = []
    for (replica, stage), row in sorted(bars.items()):
        where = {"pid": replica, "tid": stage}
        events.append({"name": "process_name", "ph": "M", **where, "args": {"name": f"replica {replica}"}})
        events.append({"name": "thread_name", "ph": "M", **where, "args": {"name": f"stage {stage}"}})
        events += [
            {
                "name": f"{bar.action.kind}{bar.action.microbatch}",
                "cat": KINDS[bar.action.kind][0],
                "ph": "X",
                "ts": round(1e6 * bar.start, 3),
                "dur": round(1e6 * (bar.end - bar.start), 3),
                **where,
                "args": {"microbatch": bar.action.microbatch, "chunk": bar.action.chunk},
            }
            for bar in row
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
