"""Build the lines of the live view in a terminal from a run's progress. Pure."""

from __future__ import annotations

from raytrain_plus.observe.expert_use import experts_text
from raytrain_plus.observe.run_progress import RunProgress, after_step, clock_text, metrics_text, plural, speed_text

EMPTY = "··"
"""What a box shows in place of a lost worker's name."""


def live_lines(progress: RunProgress, width: int) -> list[str]:
    """Return the lines below a run's bar, each of at most `width` characters; those without content are left out.

    The first has the step, which the bar shows too.
    """
    lines = [_position(progress), _figures(progress), _held_out(progress), _experts(progress), _boxes(progress, width)]
    if progress.incident:
        lines.append(f"last incident: {progress.incident}")
    return [line if len(line) <= width else f"{line[: max(0, width - 1)]}…" for line in lines if line]


def _position(progress: RunProgress) -> str:
    parts = [f"step {progress.step:,} of {progress.total:,}"]
    if progress.epoch is not None:
        parts.append(f"epoch {progress.epoch + 1:,}")
    if progress.waiting:
        # The last speed no longer applies.
        parts.append(f"waiting for {progress.waiting}")
    elif not progress.workers:
        parts.append("starting workers")
    elif (left := progress.seconds_left) is not None:
        parts.append(f"{clock_text(left)} left")
    return "  ".join(parts)


def _figures(progress: RunProgress) -> str:
    parts = [] if progress.loss is None else [f"loss {progress.loss:.4f}"]
    if progress.lr:
        parts.append(f"lr {progress.lr}")
    if progress.metrics:
        parts.append(progress.metrics)
    if not progress.waiting and (speed := progress.samples_per_s) is not None:
        parts.append(f"{speed_text(speed)} samples/s")
    return "  ".join(parts)


def _held_out(progress: RunProgress) -> str:
    if not progress.evaluations:
        return ""
    step, metrics = progress.evaluations[-1]
    return f"held out, {after_step(step)}: {metrics_text(metrics)}"


def _experts(progress: RunProgress) -> str:
    text = experts_text(progress.experts)
    return f"experts: {text}" if text else ""


def _boxes(progress: RunProgress, width: int) -> str:
    """Return a box for each worker; their number alone if the boxes have no room."""
    if not progress.places:
        return ""
    boxes = "".join(f"[{EMPTY if name is None else _short(name)}]" for name in progress.places)
    spares = f" and {plural(progress.spares, 'spare')}" if progress.spares else ""
    if len(boxes) + len(spares) <= width:
        return boxes + spares
    missing = progress.places.count(None)
    return plural(len(progress.places) - missing, "worker") + spares + (f", {missing:,} missing" if missing else "")


def _short(worker: str) -> str:
    """Return a worker's name as its box shows it.

    >>> _short("worker-12"), _short("other")
    ('w12', 'other')
    """
    number = worker.removeprefix("worker-")
    return f"w{number}" if number.isdigit() else worker
