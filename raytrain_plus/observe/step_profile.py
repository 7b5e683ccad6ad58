"""Where the time of profiled steps goes: a worker's phases become a table. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Phase = Literal["forward", "backward", "exposed", "optimizer", "data", "stages", "rest"]
"""What a training thread does in a step. Each moment of a step belongs to one phase.

`exposed`: it waits for sums; `data`: for batches; `stages`: for the other stages of its replica. `rest`: all else, such
as clearing gradients, their norms, and the report of the step.
"""
PHASES: tuple[Phase, ...] = ("forward", "backward", "exposed", "optimizer", "data", "stages", "rest")

CONVENTION = "counted matrix products, convolutions and attention, forward and backward, without recomputation"
"""Which operations of a model count in its MFU."""

_DENSE_16_BITS = {
    # The PCIe version is as fast.
    r"\bA100\b": 312e12,
    r"\bH100\b.*\bHBM3\b": 989.5e12,
    r"\bH200\b": 989.5e12,
    r"\bB200\b": 2250e12,
}
"""Patterns in the names of NVIDIA's GPUs -> floating-point operations per second in 16 bits, without sparsity."""
_SLOWER = re.compile(r"\b(PCIe|NVL|MIG)\b")
"""In the names of versions and parts of these GPUs that are slower, but for the A100."""
_SHARE = {"bf16": 1.0, "fp16": 1.0, "bf16-params": 1.0, "tf32": 0.5}
"""For each precision of a job, its speed as a share of that in 16 bits."""


class Change(NamedTuple):
    """The begin of a phase."""

    time: float
    phase: Phase


class Sum(NamedTuple):
    """A sum under way from the time when it was submitted to the time when it was seen to have ended."""

    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """A profiled step of one worker. Of steps that overlap, the mean of those made together."""

    step: int
    """The last one of the steps."""
    count: int = 1
    """How many steps were made together."""
    seconds: float
    phases: Mapping[Phase, float]
    """Seconds of each phase; together they are `seconds`."""
    hidden_s: float
    """See `hidden_s`."""
    of: ProfiledWorker


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledWorker:
    """A worker that is profiled."""

    seat: int
    device: str
    """The name of its device."""
    trace: str
    """The name of its trace in the run's folder."""
    operations: int | None
    """Floating-point operations of its part of a step, see `CONVENTION`; None if they could not be counted."""
    peak: float | None
    """Operations per second that its device can make; None if that is not known."""
    no_mfu: str = ""
    """Why one of these is not known."""


def phase_seconds(changes: Sequence[Change], end: float) -> dict[Phase, float]:
    """Return the seconds of each phase between the first change and `end`.

    >>> phase_seconds([Change(0.0, "data"), Change(1.0, "forward"), Change(3.0, "data")], 3.5)
    {'data': 1.5, 'forward': 2.0}
    """
    found: dict[Phase, float] = {}
    ends = [change.time for change in changes[1:]] + [end]
    for change, until in zip(changes, ends, strict=True):
        found[change.phase] = found.get(change.phase, 0.0) + until - change.time
    return found


def hidden_s(changes: Sequence[Change], end: float, sums: Iterable[Sum]) -> float:
    """Return for how many seconds, up to the end of the last backward pass, at least one sum was under way.

    >>> passes = [Change(0.0, "backward"), Change(5.0, "exposed")]
    >>> hidden_s(passes, 9.0, [Sum(1.0, 2.0), Sum(1.5, 3.0), Sum(4.5, 8.0)])
    2.5
    """
    ends = [change.time for change in changes[1:]] + [end]
    last = max((until for change, until in zip(changes, ends, strict=True) if change.phase == "backward"), default=0.0)
    seconds, covered = 0.0, -math.inf
    for begin, until in sorted(sums):
        begin, until = max(begin, covered), min(until, last)
        if until > begin:
            seconds, covered = seconds + until - begin, until
    return seconds


def peak_of(device: str, precision: str) -> float | None:
    """Return the operations per second of a device in a job's `precision`; None if they are not known.

    >>> peak_of("NVIDIA H100 80GB HBM3", "bf16"), peak_of("NVIDIA A100-SXM4-40GB", "tf32"), peak_of("cpu", "bf16")
    (989500000000000.0, 156000000000000.0, None)
    """
    share = _SHARE.get(precision)
    for pattern, per_s in _DENSE_16_BITS.items():
        if share is not None and re.search(pattern, device):
            slower = _SLOWER.search(device)
            return None if slower and (slower[0], pattern) != ("PCIe", r"\bA100\b") else share * per_s
    return None


@dataclass(slots=True)
class StepProfile:
    """What the profiled workers of a run have reported."""

    _steps: dict[str, dict[int, Profiled]] = field(default_factory=dict)
    """Worker -> step -> its newest report."""

    def add(self, worker: str, profiled: Profiled) -> None:
        """Add a worker's report of a step; a step that is recomputed replaces the earlier one."""
        self._steps.setdefault(worker, {})[profiled.step] = profiled

    def to_json(self, last_step: int) -> dict[str, Any] | None:
        """Return the table as plain values, without steps after `last_step`; None if nothing was profiled.

        Times are mean milliseconds of a step.
        """
        kept = {
            worker: [steps[step] for step in sorted(steps) if step <= last_step]
            for worker, steps in self._steps.items()
        }
        rows = [_row(worker, steps) for worker, steps in kept.items() if steps]
        if not rows:
            return None
        return {
            "operations": CONVENTION,
            "workers": sorted(rows, key=lambda row: (row["seat"], row["worker"])),
        }


def _row(worker: str, steps: Sequence[Profiled]) -> dict[str, Any]:
    of, count = steps[-1].of, sum(one.count for one in steps)
    seconds = sum(one.seconds * one.count for one in steps) / count
    row: dict[str, Any] = {
        "worker": worker,
        "seat": of.seat,
        "device": of.device,
        "steps": [one.step for one in steps],
        "step_ms": _ms(seconds),
        **{f"{phase}_ms": _mean_ms(steps, phase, count) for phase in PHASES},
        "hidden_ms": _ms(sum(one.hidden_s * one.count for one in steps) / count),
        "operations": of.operations,
        "mfu": None,
        "trace": of.trace,
    }
    if of.operations is None or of.peak is None:
        return {**row, "no_mfu": of.no_mfu}
    return {**row, "mfu": of.operations / (seconds * of.peak)}


def _mean_ms(steps: Sequence[Profiled], phase: Phase, count: int) -> float:
    return _ms(sum(one.phases.get(phase, 0.0) * one.count for one in steps) / count)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 4)


def table(profile: Mapping[str, Any]) -> list[str]:
    """Return what `StepProfile.to_json` returned as lines of text."""
    workers = profile["workers"]
    # The column of stages is for models that have some.
    phases = [phase for phase in PHASES if phase != "stages" or any(row["stages_ms"] for row in workers)]
    phases.insert(phases.index("exposed"), "hidden")  # type: ignore[arg-type]
    head = ["worker", "step", *phases, *["MFU"] * any(row["mfu"] is not None for row in workers)]
    cells = [head]
    for row in workers:
        mfu = [] if "MFU" not in head else ["-" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"]
        cells.append([row["worker"], *(f"{row[f'{name}_ms']:.2f}" for name in ("step", *phases)), *mfu])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [f"  profile  mean milliseconds of {_count(workers)}; the hidden reduction is a part of the passes"]
    for one in cells:
        first, *others = (cell.rjust(width) for cell, width in zip(one, widths, strict=True))
        lines.append("    " + "  ".join([one[0].ljust(len(first)), *others]))
    if "MFU" in head:
        lines.append(f"    MFU: {profile['operations']}")
    return lines + [f"    no MFU: {why}" for why in sorted({row["no_mfu"] for row in workers if "no_mfu" in row})]


def _count(workers: Sequence[Mapping[str, Any]]) -> str:
    steps = {step for row in workers for step in row["steps"]}
    return f"steps {min(steps)} to {max(steps)}" if len(steps) > 1 else f"step {min(steps)}"
