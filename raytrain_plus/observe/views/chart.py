"""Draw a run as an SVG chart of bounded size: its progress, its loss, and its workers over time. Pure.

The points of many steps are thinned as they arrive: once there are more than `ROOM`, neighbours are joined into one
(mean, lowest, highest). The newest step stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.run_progress import after_step, event_text, plural
from raytrain_plus.observe.views.thinned import Thinned

TOLD = 4
"""Maximum incidents close together that are described; the rest are counted."""

_WIDTH, _HEIGHT, _LEFT, _RIGHT = 640, 312, 52, 616
_BAR, _LOSS, _LEGEND, _SIGNS, _WORKERS = 26, (56, 178), 224, 237, (248, 287)
"""Vertical positions: the bar, the loss (top, bottom), the signs' legend, the signs, the workers (top, bottom)."""
_CURVE, _DOTS, _LINE = "#4c8dca", "#f58518", "#54a24b"
_NEAR = 10.0
"""Pixels between two signs below which they are joined."""

SIGNS = {
    "lost": ("lost worker", "#e45756", "M-3.5-3.5L3.5 3.5M-3.5 3.5L3.5-3.5"),
    "resumed": ("resumption", "#b279a2", "M-3-3H3V3H-3Z"),
    "drain": ("drain", "#f58518", "M-4-3H4L0 4Z"),
    "rescaled": ("rescale", "#4c8dca", "M0-4.5L4.5 0L0 4.5L-4.5 0Z"),
}
"""Kinds of incidents, the most severe first: name, colour, path of the sign."""

_UNITS = ((1, "s"), (60, "min"), (3600, "h"), (86400, "d"))
_TIMES = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Seconds between two marks of a time axis."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Values close together: mean position, first position, count, and the values' mean, minimum, maximum and last."""

    at: float
    first: float
    count: int
    mean: float
    low: float
    high: float
    last: float

    def join(self, later: _Span) -> _Span:
        count = self.count + later.count
        share = later.count / count
        return _Span(
            at=self.at + share * (later.at - self.at),
            first=self.first,
            count=count,
            mean=self.mean + share * (later.mean - self.mean),
            low=min(self.low, later.low),
            high=max(self.high, later.high),
            last=later.last,
        )


def _one(at: float, value: float) -> _Span:
    return _Span(at, at, 1, value, value, value, value)


@dataclass(frozen=True, slots=True)
class _Mark:
    """Incidents close together; `kind`: the most severe kind, `told`: the first descriptions, `count`: of all."""

    at: float
    kind: str
    told: tuple[str, ...]
    count: int = 1

    def join(self, later: _Mark) -> _Mark:
        kind = min(self.kind, later.kind, key=list(SIGNS).index)
        return _Mark(self.at, kind, (*self.told, *later.told)[:TOLD], self.count + later.count)

    def words(self) -> str:
        more = self.count - len(self.told)
        return "\n".join([*self.told, *([f"and {more:,} more"] if more > 0 else [])])


class Chart:
    """The chart of a run's events so far; its size is always the same."""

    def __init__(self, name: str, total: int) -> None:
        """Prepare the chart of a run of `total` steps."""
        self.name = name
        self._total = total
        self._made = 0
        self._losses = Thinned(_Span.join, 1)
        self._newest: tuple[int, float] | None = None
        self._not_finite = Thinned(_Span.join, 1)
        self._held_out = Thinned(_Span.join, 1)
        self._workers = Thinned(_Span.join, 0.01)
        self._marks = Thinned(_Mark.join, 0.01)
        self._counts = dict.fromkeys(SIGNS, 0)
        self._lost_at = 0.0
        self._members: set[str] = set()
        self._regroups = False
        """Whether the next view results from a loss rather than a rescale."""
        self._began: float | None = None
        self._now = 0.0
        """Seconds for which the run has been running."""

    def add(self, event: RunEvent) -> None:
        """Add one event; events must come in order."""
        kind = event["kind"]
        self._pass(event["time"], kind)
        if kind == "step_committed":
            self._step(event["step"], float(event["loss"]))
        elif kind == "evaluated" and math.isfinite(loss := float(event["metrics"].get("loss", math.nan))):
            at = event["step"] + 1
            self._held_out.add(at, _one(at, loss))
        elif kind == "view_formed":
            self._members = {member["worker"] for member in event["members"]}
            self._regroups = False
            self._have(len(self._members))
        elif kind == "worker_lost":
            self._lost_at = self._now
            self._mark("lost", f"{event['worker']} was lost: {event['cause']}")
            if event["worker"] in self._members:
                self._members.discard(event["worker"])
                self._regroups = True
                self._have(len(self._members))
        elif kind == "recovered":
            # Described at the loss; a recovery is not an incident of its own.
            self._marks.add(self._lost_at, _Mark(self._lost_at, "lost", (f"recovered in {event['stall_s']:.2f} s",)))
        elif kind == "drain_notice":
            self._mark("drain", event_text(event) or "")
        elif kind == "rescaled" and not self._regroups:
            self._mark("rescaled", f"{event['from']} workers before, {event['to']} now")
        elif kind == "resumed":
            self._go_back(event["step"])
            self._mark("resumed", event_text(event) or "")

    def _pass(self, time: float, kind: str) -> None:
        if self._began is None:
            self._began = time
        if kind == "run_started":
            # No worker trained between two controllers.
            self._began = time - self._now
        # Workers stamp steps and the controller all other events: their clocks may differ a little.
        self._now = max(self._now, time - self._began)

    def _step(self, step: int, loss: float) -> None:
        self._made = step + 1
        if math.isfinite(loss):
            self._newest = step + 1, loss
            self._losses.add(step + 1, _one(step + 1, loss))
        else:
            self._not_finite.add(step + 1, _one(step + 1, 0.0))

    def _have(self, workers: int) -> None:
        self._workers.add(self._now, _one(self._now, workers))

    def _mark(self, kind: str, told: str) -> None:
        self._counts[kind] += 1
        self._marks.add(self._now, _Mark(self._now, kind, (told,)))

    def _go_back(self, step: int) -> None:
        self._made = step + 1
        self._newest = None
        for along in (self._losses, self._not_finite, self._held_out):
            along.cut(step + 1)

    def svg(self) -> str:
        """Return an SVG document of 640 x 312 pixels; its text and lines have the colour of the surrounding text."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
                f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="11" fill="currentColor" '
                'style="max-width:100%">',
                *self._head(),
                *self._loss(),
                *self._group(),
                "</svg>\n",
            ]
        )

    def _head(self) -> Iterator[str]:
        total = max(self._total, self._made)
        share = self._made / total if total else 0.0
        name = self.name if len(self.name) <= 50 else f"{self.name[:49]}…"
        yield _text(_LEFT, 17, name, size=13)
        # Rounded down, so that 100 % means that the last step is made.
        far = f"step {self._made:,} of {total:,}, {math.floor(100 * share)} %" if total else ""
        yield _text(_RIGHT, 17, far, anchor="end")
        wide = _RIGHT - _LEFT
        yield f'<rect x="{_LEFT}" y="{_BAR}" width="{wide}" height="6" rx="3" fill-opacity="0.15"/>'
        yield f'<rect x="{_LEFT}" y="{_BAR}" width="{wide * share:.1f}" height="6" rx="3" fill="{_CURVE}"/>'

    def _loss(self) -> Iterator[str]:
        top, bottom = _LOSS
        x = _scale(0, max(self._total, self._made, 1), _LEFT, _RIGHT)
        values = [span.mean for along in (self._losses, self._held_out) for span in along]
        values += [] if self._newest is None else [self._newest[1]]
        low, high, ticks = _range(values)
        y = _scale(low, high, bottom, top)
        yield _text(_LEFT, top - 7, "loss")
        legend = [(_CURVE, "training")] * bool(values) + [(_DOTS, "held out")] * bool(len(self._held_out))
        yield from _legend([(f'<circle r="3" fill="{color}"/>', words) for color, words in legend], top - 7)
        for tick in ticks if values else ():
            yield _rule(y(tick)) + _text(_LEFT - 6, y(tick) + 4, f"{tick:.6g}", anchor="end")
        yield _rule(bottom, opacity=0.5)
        for tick in _nice(0, max(self._total, self._made, 1), 6, whole=True):
            yield _text(x(tick), bottom + 14, _short(tick), anchor="middle")
        yield _text((_LEFT + _RIGHT) / 2, bottom + 27, "steps", anchor="middle", opacity=0.7)
        spans = list(self._losses)
        if any(span.count > 1 for span in spans):
            # Clipped to the frame: a single outlier must not flatten all other values.
            edge = [(x(span.at), y(min(span.high, high))) for span in spans]
            edge += [(x(span.at), y(max(span.low, low))) for span in reversed(spans)]
            yield f'<path d="{_path(edge)}Z" fill="{_CURVE}" fill-opacity="0.25"/>'
        if len(spans) > 1:
            yield _stroke([(x(span.at), y(span.mean)) for span in spans], _CURVE)
        for span in self._held_out:
            words = f"held out, {after_step(round(span.at) - 1)}: loss {span.mean:.4f}"
            yield _sign(x(span.at), y(span.mean), f'<circle r="3" fill="{_DOTS}"/>', words)
        if self._newest is not None:
            step, loss = self._newest
            words = f"{after_step(step - 1)}: loss {loss:.4f}"
            yield _sign(x(step), y(loss), f'<circle r="3" fill="{_CURVE}"/>', words)
        for span in self._not_finite:
            words = f"{plural(span.count, 'step')} with a loss that is not finite, {after_step(round(span.first) - 1)}"
            yield _sign(x(span.first), top + 6, _drawn("lost"), words)

    def _group(self) -> Iterator[str]:
        top, bottom = _WORKERS
        x = _scale(0, max(self._now, 1.0), _LEFT, _RIGHT)
        spans = list(self._workers)
        most = max((span.high for span in spans), default=1.0)
        y = _scale(0, max(most, 1.0), bottom, top)
        yield _text(_LEFT, _LEGEND, "workers")
        said = [
            (_drawn(kind), plural(count, name)) for kind, (name, _, _) in SIGNS.items() if (count := self._counts[kind])
        ]
        yield from _legend(said, _LEGEND)
        for tick in {0, round(most)} if spans else {0}:
            yield _rule(y(tick), opacity=0.5 if tick == 0 else 0.15)
            yield _text(_LEFT - 6, y(tick) + 4, f"{tick:,}", anchor="end")
        for seconds, words in _time_ticks(max(self._now, 1.0)):
            yield _text(x(seconds), bottom + 14, words, anchor="middle")
        marks = _apart(list(self._marks), x)
        for mark in marks:
            yield (
                f'<line x1="{x(mark.at):.1f}" y1="{_SIGNS + 5}" x2="{x(mark.at):.1f}" y2="{bottom}" '
                f'stroke="{SIGNS[mark.kind][1]}" stroke-opacity="0.6" stroke-dasharray="2 2"/>'
            )
        if spans:
            points = [(x(spans[0].first), y(spans[0].high))]
            for span in spans:
                # Draw minimum and maximum too, so that a worker lost and replaced at once is visible.
                here = x(span.first)
                points += [(here, points[-1][1]), (here, y(span.low)), (here, y(span.high)), (here, y(span.last))]
            yield _stroke([*points, (x(self._now), points[-1][1])], _LINE)
        for mark in marks:
            yield _sign(x(mark.at), _SIGNS, _drawn(mark.kind), mark.words())


def _apart(marks: Sequence[_Mark], x: Callable[[float], float]) -> list[_Mark]:
    """Return the marks, with those that would overlap joined."""
    found: list[_Mark] = []
    for mark in marks:
        if found and x(mark.at) - x(found[-1].at) < _NEAR:
            found[-1] = found[-1].join(mark)
        else:
            found.append(mark)
    return found


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _range(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return start, end and ticks of an axis that holds all values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    ticks = _nice(low, high, 5)
    return min(low, ticks[0]), max(high, ticks[-1]), ticks


def _nice(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Return at most about `most` round numbers from `low` to `high`, 1, 2 or 5 times a power of ten apart.

    >>> _nice(0, 1437, 6, whole=True)
    [0.0, 500.0, 1000.0]
    >>> _nice(0, 3, 6, whole=True)
    [0.0, 1.0, 2.0, 3.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    apart = next(power * times for times in (1, 2, 5, 10, 20) if (high - low) / (power * times) <= most)
    apart = max(apart, 1.0) if whole else apart
    return [number * apart for number in range(math.ceil(low / apart), math.floor(high / apart) + 1)]


def _short(number: float) -> str:
    """Return an integer as text that fits under an axis.

    >>> _short(4000), _short(1_500_000)
    ('4,000', '1.5 M')
    """
    return f"{number:,.0f}" if number < 1e6 else f"{number / 1e6:,.6g} M"


def _time_ticks(end: float) -> list[tuple[float, str]]:
    """Return the ticks of a time axis of `end` seconds.

    >>> _time_ticks(150)
    [(0, '0'), (30, '30 s'), (60, '60 s'), (90, '90 s'), (120, '120 s'), (150, '150 s')]
    """
    apart = next((apart for apart in _TIMES if end / apart <= 6), 86400 * math.ceil(end / 86400 / 6))
    length, word = next((length, word) for length, word in reversed(_UNITS) if apart >= length)
    times = range(0, math.floor(end) + 1, apart)
    return [(at, f"{at / length:g} {word}" if at else "0") for at in times]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _stroke(points: Sequence[tuple[float, float]], color: str) -> str:
    return f'<path d="{_path(points)}" fill="none" stroke="{color}" stroke-width="1.5" stroke-linejoin="round"/>'


def _rule(y: float, opacity: float = 0.15) -> str:
    return f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="currentColor" stroke-opacity="{opacity}"/>'


def _drawn(kind: str) -> str:
    _, color, path = SIGNS[kind]
    return f'<path d="{path}" fill="{color}" stroke="{color}" stroke-width="2" stroke-linejoin="round"/>'


def _sign(x: float, y: float, drawn: str, words: str) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})"><title>{_clean(words)}</title>{drawn}</g>'


def _legend(entries: Sequence[tuple[str, str]], y: float) -> Iterator[str]:
    """Yield the legend's entries, from right to left."""
    x = float(_RIGHT)
    for drawn, words in reversed(entries):
        yield _text(x, y, words, anchor="end")
        x -= 5.8 * len(words) + 9
        yield f'<g transform="translate({x:.1f} {y - 4})">{drawn}</g>'
        x -= 16


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11, opacity: float = 1.0) -> str:
    how = f' text-anchor="{anchor}"' * (anchor != "start") + f' font-size="{size}"' * (size != 11)
    how += f' fill-opacity="{opacity}"' * (opacity < 1)
    return f'<text x="{x:.1f}" y="{y:.1f}"{how}>{_clean(text)}</text>'


def _clean(text: str) -> str:
    """Escape text for XML, which supports no control characters except the line end."""
    return escape("".join(one if one.isprintable() or one == "\n" else " " for one in text))
