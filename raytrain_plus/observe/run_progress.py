"""Accumulate a run's events into its current progress: step, loss, speed, time left. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.storage.outage import outage_text
from raytrain_plus.storage.size_text import size_text

WINDOW_S = 10.0
"""Approximate seconds of steps over which the speed is averaged."""
SHORT = 40
"""Maximum characters of a step's metrics in its line; longer ones are left out."""


@dataclass(slots=True)
class RunProgress:
    """The current progress of a run. `total`: the number of its steps."""

    total: int
    step: int = 0
    """Committed steps."""
    loss: float | None = None
    workers: int = 0
    collective: str = ""
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step after which, metrics), in order."""
    metrics: str = ""
    """The metrics of the newest step, as text."""
    lr: str = ""
    """The learning rate of the newest step, as text; empty if it is not known."""
    experts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """The newest use of the experts of each layer that has any: see `expert_use.ExpertUse.fields`."""
    waiting: str = ""
    """The condition that the run waits for; empty while it trains."""
    epoch: int | None = None
    """The epoch of the newest step, counted from 0."""
    places: list[str | None] = field(default_factory=list)
    """The members of the group; None for one that was lost and is not replaced."""
    spares: int = 0
    recoveries: int = 0
    """The recoveries among the events."""
    steps_lost: int = 0
    """Committed steps that these recoveries lost."""
    waits: list[float] = field(default_factory=list)
    """Seconds of each recovery that waited for a replacement, because `workers.min` forbids fewer workers."""
    enough: int | None = None
    """The `workers.min` with which none of them would have waited; None with stages, which need certain numbers."""
    incident: str = ""
    """The newest loss of a member and what it cost, in words."""
    _recent: deque[tuple[int, float]] = field(default_factory=deque)
    """(rows, seconds) of the latest steps. Seconds are the steps' own, so evaluations between them do not count."""
    _recent_s: float = 0.0
    _first_of_view: bool = True
    _members: list[str] = field(default_factory=list)
    _lost: list[str] = field(default_factory=list)
    """Losses of members that have not been reported yet."""
    _in_incident: list[str] = field(default_factory=list)
    """Members that were lost since the last recovery, each with the cause, in words."""
    _moved_bytes: int = 0
    """Bytes of the state that members took from others when the newest group formed."""
    _recovering: bool = False
    _waited: bool = False
    """Whether the recovery that is in progress waits for a replacement."""
    _staged: bool = False
    _told_repartitioned: bool = False
    _outages: set[tuple[str, str]] = field(default_factory=set)
    """(place, error) of each storage that does not accept writes now."""

    def add(self, event: RunEvent) -> str | None:
        """Add one event; return the line to show for it, if any.

        A loss gets one line, once it is recovered from or has to wait. A planned change gets one line too.
        """
        kind = event["kind"]
        if kind == "step_committed":
            self.step, self.loss, self.waiting = event["step"] + 1, float(event["loss"]), ""
            self.metrics, self.lr = metrics_text(event.get("metrics", {})), rate_text(event.get("lr", []))
            self.epoch = event["epoch"]
            self._time(event["samples"], event["seconds"])
            if event.get("skipped"):
                return f"step {event['step'] + 1} was skipped: its loss or gradient is not finite"
            return None
        if kind == "view_formed":
            told = [self._view(event), self._repartitioned(event)]
            return "; ".join(filter(None, told)) or None
        if kind == "worker_lost":
            what = f"{event['worker']} (pid {event['pid']}) was lost: {event['cause']}"
            if event["worker"] not in self._members:
                return what
            self._lost.append(what)
            self._recovering = True
            self._moved_bytes = 0
            self._place_lost(event["worker"], event["cause"])
            self.waiting = "the recovery from a lost worker"
            return None
        if kind == "waiting":
            self.waiting = event["for"]
            if self._recovering:
                self._waits_for_replacement()
            return "; ".join([*self._untold(), f"waiting for {event['for']}"])
        if kind == "saving":
            text = saving_text(event["step"], event["written"], event["total"], event["per_s"])
            self.waiting = f"the storage: {text}"
            # Most runs are saved before anybody asks.
            return text if event["total"] else None
        if kind == "recovered":
            return self._recovered(event)
        if kind == "run_finished":
            # Losses without a recovery are still unreported.
            return "; ".join(self._untold()) or None
        if kind == "rescaled" and not self._recovering:
            # A request, not a loss: the places that are empty now are given up.
            self.places = [name for name in self.places if name is not None]
        elif kind == "experts":
            self.experts |= event["layers"]
        elif kind == "evaluated":
            self.evaluations.append((event["step"], event["metrics"]))
        elif kind == "storage_failed":
            self._outages.add((event["place"], event["error"]))
        elif kind == "storage_recovered":
            self._outages.discard((event["place"], event["error"]))
        elif kind == "checkpoint_failed" and any(error in event["error"] for _, error in self._outages):
            # The outage that caused it already has a line.
            return None
        return event_text(event)

    def _recovered(self, event: RunEvent) -> str:
        """Count a recovery, and return its line."""
        self._recovering = False
        self.recoveries += 1
        self.steps_lost += event["steps_lost"]
        if self._waited:
            self._waited = False
            self.waits.append(event["stall_s"])
        self.incident = f"{'; '.join(self._in_incident) or event['cause']}; {_cost(event)}"
        self._in_incident.clear()
        causes = self._untold() or [event["cause"]]
        steps = f"{plural(event['steps_lost'], 'step')} lost"
        if event["steps_recomputed"]:
            steps += f", {plural(event['steps_recomputed'], 'step')} recomputed"
        who = f"{len(event['kept'])} kept, {len(event['replaced'])} replaced"
        copied = _copied(self._moved_bytes, event["phases"].get("transfer", 0.0))
        return f"recovered in {event['stall_s']:.2f} s: {'; '.join(causes)}; {steps}; {who}{copied}"

    def _untold(self) -> list[str]:
        lost, self._lost = self._lost, []
        return lost

    def _place_lost(self, worker: str, cause: str) -> None:
        """Empty the place of a lost member, and begin or continue the words on its loss."""
        self.places = [None if name == worker else name for name in self.places]
        self._in_incident.append(f"{worker} lost: {cause}")
        self.incident = "; ".join(self._in_incident)

    def _waits_for_replacement(self) -> None:
        """Note how many workers are left in a recovery that waits for more."""
        self._waited = True
        left = sum(name is not None for name in self.places)
        self.enough = None if self._staged or not left else min(left, self.enough or left)

    def _take_places(self) -> None:
        """Let the members of a new view take the places of lost ones first; a planned departure closes its place."""
        places = [name for name in self.places if name is None or name in self._members]
        for name in self._members:
            if name in places:
                continue
            if None in places:
                places[places.index(None)] = name
            else:
                places.append(name)
        self.places = places

    def _view(self, event: RunEvent) -> str | None:
        before, self._members = self._members, [member["worker"] for member in event["members"]]
        self.workers, self.collective, self.waiting = len(self._members), event["collective"], ""
        self.spares = len(event["spares"])
        self._moved_bytes = event.get("moved_bytes", 0)
        self._staged = any(member["stage"] for member in event["members"])
        self._take_places()
        self._recent.clear()
        self._recent_s = 0.0
        self._first_of_view = True
        if not before:
            return _ready(event)
        if self._recovering or set(before) == set(self._members):
            # The line of the recovery covers this change.
            return None
        came = [f"{name} joined" for name in self._members if name not in before]
        went = [f"{name} left" for name in before if name not in self._members]
        return f"{plural(self.workers, 'worker')} now: {', '.join([*came, *went])}"

    def _repartitioned(self, event: RunEvent) -> str | None:
        """Return that `parallel.partition` is not used, once for the run."""
        if not event.get("repartitioned") or self._told_repartitioned:
            return None
        self._told_repartitioned = True
        stages = plural(1 + max(member["stage"] for member in event["members"]), "stage")
        return f"parallel.partition is for more than {stages}, so the platform partitions the layers"

    def _time(self, rows: int, seconds: float) -> None:
        if self._first_of_view:
            # The first step of a group opens files and fills caches, so its speed is not representative.
            self._first_of_view = False
            return
        self._recent.append((rows, seconds))
        self._recent_s += seconds
        while len(self._recent) > 1 and self._recent_s - self._recent[0][1] >= WINDOW_S:
            self._recent_s -= self._recent.popleft()[1]

    @property
    def samples_per_s(self) -> float | None:
        """Rows per second over the latest steps; None before the second step of a group."""
        if self._recent_s <= 0:
            return None
        return sum(rows for rows, _ in self._recent) / self._recent_s

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the last step at the current speed; None before the second step of a group."""
        if self._recent_s <= 0:
            return None
        return self._recent_s / len(self._recent) * max(0, self.total - self.step)

    def line(self) -> str:
        """Return the progress as one line of text."""
        parts = [f"step {self.step}/{self.total}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if 0 < len(self.metrics) <= SHORT:
            parts.append(self.metrics)
        if self.lr:
            parts.append(f"lr {self.lr}")
        if self.waiting:
            # Placed first, so that a narrow screen does not truncate it. The last speed no longer applies.
            return "  ".join([*parts, f"waiting for {self.waiting}"])
        if not self.workers:
            return "  ".join([*parts, "starting workers"])
        if (speed := self.samples_per_s) is not None:
            parts.append(f"{speed_text(speed)} samples/s")
        parts.append(plural(self.workers, "worker"))
        if (left := self.seconds_left) is not None:
            parts.append(f"{clock_text(left)} left")
        return "  ".join(parts)


def _cost(event: RunEvent) -> str:
    """Return what a recovery cost, in words."""
    lost, recomputed = event["steps_lost"], event["steps_recomputed"]
    steps = f"{plural(lost, 'step')} lost" if lost else "no step lost"
    return f"back after {event['stall_s']:.2f} s, {steps}" + (f", {recomputed:,} recomputed" if recomputed else "")


def _copied(moved: int, seconds: float) -> str:
    """Return how much of the state a recovery copied between workers, and how fast; empty if nothing."""
    if not moved:
        return ""
    return f"; {size_text(moved)} of state copied" + (f" at {size_text(int(moved / seconds))}/s" if seconds > 0 else "")


def speed_text(per_s: float) -> str:
    """Return a speed with its significant digits.

    >>> speed_text(0.25), speed_text(117.3), speed_text(12345.6)
    ('0.25', '117', '12,346')
    """
    return f"{per_s:.2g}" if per_s < 10 else f"{per_s:,.0f}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> plural(1, "worker"), plural(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def clock_text(seconds: float) -> str:
    """Return a duration as minutes and seconds, or as hours and minutes.

    >>> clock_text(75), clock_text(7260)
    ('1:15', '2:01 h')
    """
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 60}:{whole % 60:02d}"


def saving_text(step: int, written: int, total: int, per_s: float | None) -> str:
    """Return how far the last writes of a run are, given bytes and bytes per second; a first hundredth tells no pace.

    >>> saving_text(30, 120_000_000, 270_000_000, 12e6)
    'saving the state after step 31: 120.0 of 270.0 MB written, 12.0 MB/s, 0:12 left'
    >>> saving_text(30, 0, 270_000_000, None)
    'saving the state after step 31: 0.0 of 270.0 MB written'
    >>> saving_text(30, 0, 0, None)
    'saving the state after step 31'
    >>> saving_text(30, 2_000, 270_000_000, 1e3)
    'saving the state after step 31: 0.0 of 270.0 MB written'
    >>> saving_text(30, 270_000_000, 270_000_000, 12e6)
    'saving the state after step 31: 270.0 of 270.0 MB written; completing the checkpoint'
    """
    if not total:
        return f"saving the state {after_step(step)}"
    line = f"saving the state {after_step(step)}: {written / 1e6:,.1f} of {total / 1e6:,.1f} MB written"
    if written >= total:
        return f"{line}; completing the checkpoint"
    if not per_s or 100 * written < total:
        return line
    return f"{line}, {per_s / 1e6:,.1f} MB/s, {clock_text((total - written) / per_s)} left"


def event_text(event: RunEvent) -> str | None:
    """Return the line for an event that is shown independent of earlier events, or None."""
    kind = event["kind"]
    if kind == "evaluated":
        return f"held out, {after_step(event['step'])}: {metrics_text(event['metrics'])}"
    if kind == "drain_notice":
        return f"node {event['node'][:12]} will leave"
    if kind == "checkpoint_failed":
        return f"the checkpoint after step {event['step'] + 1} failed: {event['error']}"
    if kind == "controller_started":
        return _replaced(len(event["adopted"]))
    if kind == "noted":
        text: str = event["text"]
        return text
    if kind == "storage_failed":
        text = outage_text(event["place"], event["error"], event["wanted"], event["free"])
        return f"cannot write to {text}; training continues"
    if kind == "storage_recovered":
        return f"can write to {event['place']} again after {event['seconds']:.0f} s ({event['error']})"
    if kind == "resumed":
        rates = ", with the task's learning rates" if event.get("fresh_rates") else ""
        return _resumed(event["step"], event["checkpoint"]) + rates
    return None


def _replaced(adopted: int) -> str | None:
    """Return that a controller has taken over so many workers, if it has: the first one of a run finds none."""
    train = "trains" if adopted == 1 else "train"
    return f"the controller was replaced; {plural(adopted, 'worker')} {train} on" if adopted else None


def _resumed(step: int, checkpoint: str | None) -> str:
    if checkpoint is not None:
        return f"resumed from the checkpoint {after_step(step)}"
    # No checkpoint was read: workers still held the state, or it was built again.
    return "restarted from the initial state" if step < 0 else f"returned to the state {after_step(step)}"


def _ready(event: RunEvent) -> str:
    members = event["members"]
    hosted = sorted({len(member["shards"]) for member in members}, reverse=True)
    stages, ranks, count = (1 + max(member.get(axis, 0) for member in members) for axis in _AXES)
    # The members of one replica together hold the model once; its stages hold parts of it.
    parameters = f"{sum(member['params'] for member in members if not member['replica']):,} parameters"
    if ranks > 1:
        # They all have what is not cut.
        parameters = f"up to {max(member['params'] for member in members):,} parameters each"
    of = f"{stages} stages" * (stages > 1) + " of " * (min(stages, ranks) > 1) + f"{ranks} workers" * (ranks > 1)
    replicas = f" in {plural(count, 'replica')} of {of}" * bool(of)
    return (
        f"{plural(len(members), 'worker')} ready{replicas}, {' or '.join(map(str, hosted))} shards each; "
        f"{parameters}; collective: {event['collective']}"
    )


_AXES = ("stage", "tensor_rank", "replica")
"""Fields of a view's member: its coordinates in the shape of the group."""


def after_step(step: int) -> str:
    """Return after which step metrics were evaluated, as text.

    >>> after_step(-1), after_step(99)
    ('untrained', 'after step 100')
    """
    return "untrained" if step < 0 else f"after step {step + 1}"


def rate_text(lr: Any) -> str:
    """Return the learning rate of a step's event, a number or one for each parameter group; empty if there is none.

    >>> rate_text(0.0005), rate_text([3e-05, 3e-05]), rate_text([0.1, 0.001, 0.01]), rate_text([])
    ('0.0005', '3e-05', '0.001 to 0.1', '')
    """
    rates = sorted(map(float, lr if isinstance(lr, list) else [lr]))
    texts = [f"{rate:.3g}" for rate in rates]
    return " to ".join(dict.fromkeys(texts[:1] + texts[-1:]))


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return metrics as one line of text."""
    return ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
