"""Compute the metrics that a live run exports for monitoring, by gauge and tags. Pure.

Sums are gauges too: Ray keeps a counter while its node lives and would show runs that ended long ago, whereas a gauge
disappears when it is no longer set. The sums of workers only rise while they are exported, so `rate()` works on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raytrain_plus.observe.gpu_use import GpuUse
from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.run_progress import RunProgress

OF_RUN: dict[str, str] = {
    "raytrain_steps": "Committed steps",
    "raytrain_samples_per_second": "Rows per second over the steps of the last 10 s or so; 0 while the run waits",
    "raytrain_loss": "Loss of the newest committed step",
    "raytrain_grad_norm": "Global norm of the newest committed step's gradient, before clipping",
    "raytrain_steps_skipped": "Steps skipped because sums were not finite, in the whole run",
    "raytrain_generation": "Number of the view; rises with each change of the group",
    "raytrain_workers": "Workers in the group",
    "raytrain_spares": "Ready workers on standby",
    "raytrain_waiting": "1 while the run waits, also for the recovery from a loss; 0 while it trains",
    "raytrain_recoveries": "Recoveries from losses, in the whole run",
    "raytrain_stall_seconds": "Total time of recoveries, each from the last commit before it to the first after it",
    "raytrain_goodput": "1 - (stalled + recomputed) / time after the first step since it began or was resumed",
    "raytrain_checkpoint_timestamp_seconds": "Unix time of the state in the newest complete checkpoint",
    "raytrain_checkpoint_seconds": "Time from copying the state of the newest checkpoint to its completion",
    "raytrain_checkpoint_stall_seconds": "Time for which the newest checkpoint delayed the training",
    "raytrain_checkpoints_failed": "Failed checkpoints, since the run began or was last resumed",
}
"""Gauges of a run with their descriptions."""

OF_WORKER: dict[str, str] = {
    "raytrain_step_seconds": "Time in steps",
    "raytrain_data_wait_seconds": "Part of the time in steps spent waiting for data",
    "raytrain_reduce_seconds": "Part of the time in steps spent waiting for other workers' parts of the sums",
}
"""Gauges of each member of the group: sums over the steps that it has made. All have the tags worker and stage."""

OF_GPU: dict[str, str] = {
    "raytrain_gpu_utilisation": "Share of the time in which the worker's GPU computed, by its driver: 0 to 1",
    "raytrain_gpu_memory_bytes": "Memory in use on the worker's GPU, by all processes",
    "raytrain_gpu_power_watts": "Power that the worker's GPU draws",
}
"""Gauges of each member's GPU, read every few seconds, with the same tags; CPU workers have none."""

GaugeValues = Mapping[tuple[str, tuple[str, ...]], float]
"""Values by (gauge, tag values); the tag values are worker and stage for `OF_WORKER` and `OF_GPU`, else none."""


class _Totals(Protocol):
    @property
    def steps(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def grad_norm(self) -> float | None: ...
    @property
    def skipped(self) -> int: ...
    @property
    def recoveries(self) -> int: ...
    @property
    def stall_s(self) -> float: ...
    @property
    def goodput(self) -> float: ...


class _GaugeRecord(Protocol):
    @property
    def seconds(self) -> float: ...
    @property
    def waited_s(self) -> float: ...
    @property
    def reduce_s(self) -> float: ...


@dataclass(slots=True)
class _Worked:
    """The time that a member spent in steps, in seconds, and the newest reading of its GPU."""

    stage: str
    step_s: float = 0.0
    waited_s: float = 0.0
    reduce_s: float = 0.0
    gpu: GpuUse | None = None


class Gauges:
    """Follow a run's events and compute the values of its gauges."""

    def __init__(self, totals: _Totals) -> None:
        """Begin before any event; `totals`: the run's totals, which the caller keeps up to date."""
        self._totals = totals
        self._progress = RunProgress(total=0)
        self._generation = self._spares = self._failed = 0
        self._saved: tuple[float, float] | None = None
        """Duration and stall of the newest checkpoint, in seconds."""
        self._members: dict[str, _Worked] = {}

    def add(self, event: RunEvent) -> None:
        """Add one event."""
        self._progress.add(event)
        self._generation = event["generation"]
        if event["kind"] == "view_formed":
            self._spares = len(event["spares"])
            before, self._members = self._members, {}
            for member in event["members"]:
                worked = before.get(member["worker"]) or _Worked("")
                worked.stage = str(member["stage"])
                self._members[member["worker"]] = worked
        elif event["kind"] == "checkpoint_saved":
            self._saved = event["seconds"], event["stall_s"]
        elif event["kind"] == "checkpoint_failed":
            self._failed += 1

    def adopt(self, members: Sequence[Mapping[str, Any]], generation: int) -> None:
        """Begin with these members, as `view_formed` has them; another controller has told that event."""
        view = {"members": members, "spares": [], "collective": "", "moved_bytes": 0}
        self.add({"kind": "view_formed", "generation": generation, **view})

    def worked(self, worker: str, record: _GaugeRecord) -> None:
        """Add a member's record of a step, committed or not: its time is spent in any case."""
        worked = self._members.get(worker)
        if worked is not None:
            worked.step_s += record.seconds
            worked.waited_s += record.waited_s
            worked.reduce_s += record.reduce_s

    def gpu(self, worker: str, use: GpuUse) -> None:
        """Add a reading of a member's GPU."""
        worked = self._members.get(worker)
        if worked is not None:
            worked.gpu = use

    def values(self, checkpoint: float | None) -> GaugeValues:
        """Return the values of the gauges, without those that have no value now.

        `checkpoint`: the Unix time of the state in the newest complete checkpoint, if there is one. The viewer computes
        the age: an exported age would stand still until the next export.
        """
        totals, progress = self._totals, self._progress
        speed = 0.0 if progress.waiting else progress.samples_per_s
        took, stall_s = self._saved or (None, None)
        of_run: dict[str, float | None] = {
            "raytrain_steps": totals.steps,
            "raytrain_samples_per_second": speed,
            "raytrain_loss": totals.loss,
            "raytrain_grad_norm": totals.grad_norm,
            "raytrain_steps_skipped": totals.skipped,
            "raytrain_generation": self._generation,
            "raytrain_workers": progress.workers,
            "raytrain_spares": self._spares,
            "raytrain_waiting": 1 if progress.waiting else 0,
            "raytrain_recoveries": totals.recoveries,
            "raytrain_stall_seconds": totals.stall_s,
            "raytrain_goodput": totals.goodput,
            "raytrain_checkpoint_timestamp_seconds": checkpoint,
            "raytrain_checkpoint_seconds": took,
            "raytrain_checkpoint_stall_seconds": stall_s,
            "raytrain_checkpoints_failed": self._failed,
        }
        found: dict[tuple[str, tuple[str, ...]], float] = {
            (name, ()): float(value) for name, value in of_run.items() if value is not None
        }
        for worker, worked in self._members.items():
            tags = (worker, worked.stage)
            found["raytrain_step_seconds", tags] = worked.step_s
            found["raytrain_data_wait_seconds", tags] = worked.waited_s
            found["raytrain_reduce_seconds", tags] = worked.reduce_s
            if worked.gpu is not None:
                of_gpu = {
                    "raytrain_gpu_utilisation": worked.gpu.utilisation,
                    "raytrain_gpu_memory_bytes": worked.gpu.memory_bytes,
                    "raytrain_gpu_power_watts": worked.gpu.power_w,
                }
                found |= {(name, tags): float(value) for name, value in of_gpu.items() if value is not None}
        return found
