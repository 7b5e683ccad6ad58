"""What a run says at its end. Pure."""

from __future__ import annotations

from raytrain_plus.observe.standing import Standing, clock_text
from raytrain_plus.result import Result


def summary(result: Result, standing: Standing | None) -> list[str]:
    """The last lines of a run: how it ended, what it reached, where everything lies, and what to do next."""
    lines = [_head(result), *_held_out(result, standing)]
    if result.steps:
        lines.append(
            f"  data     {100 * result.data_wait:.1f} % of step time was spent waiting for it; "
            f"setup took {result.setup_s or 0:.1f} s"
        )
    if result.show:
        lines += ["", "  the model says:", *(f"    {line}" for line in result.show.splitlines()), ""]
    lines += [
        f"  folder   {result.path}",
        f"  model    {result.path / 'model.safetensors'}" if result.status == "finished" else "",
        f"  events   {result.path / 'events.ndjson'}",
        f"  curves   tensorboard --logdir {result.path / 'tensorboard'}",
    ]
    return [line for number, line in enumerate(lines) if line or (number and lines[number - 1])]


def _head(result: Result) -> str:
    speed = f", {result.samples / result.seconds:,.0f} samples/s" if result.seconds > 0 else ""
    took = f" in {clock_text(result.seconds)}" if result.seconds else ""
    return f"{result.name} {result.status}: {result.steps} steps, {result.samples:,} samples{took}{speed}"


def _held_out(result: Result, standing: Standing | None) -> list[str]:
    if standing is None or not standing.evaluations:
        return []
    (_, first), (_, last) = standing.evaluations[0], standing.evaluations[-1]
    untrained = standing.evaluations[0][0] < 0 and len(standing.evaluations) > 1
    return [
        f"  held out {name} {float(first[name]):.4f} untrained -> {float(value):.4f} trained"
        if untrained and name in first
        else f"  held out {name} {float(value):.4f}"
        for name, value in last.items()
    ]
