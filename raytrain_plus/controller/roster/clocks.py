"""The workers' clocks, compared with the controller's. Pure."""

from __future__ import annotations

from dataclasses import replace

from raytrain_plus.training.exchange.step_records import StepRecord


class Clocks:
    """How far each worker's clock is behind the controller's, in seconds."""

    def __init__(self) -> None:
        self._offsets: dict[str, float] = {}

    def record_start(self, worker: str) -> None:
        """Record that a worker's process has started; its clock counts as ours until it is read."""
        self._offsets[worker] = 0.0

    def read(self, worker: str, clock_s: float, asked: float, answered: float) -> None:
        """Record a worker's clock: `clock_s`, read between the times `asked` and `answered`; all in Unix seconds."""
        # One machine has one clock; between machines this is accurate to the duration of the call.
        offset = (asked + answered) / 2 - clock_s
        self._offsets[worker] = offset if abs(offset) > answered - asked else 0.0

    def offset(self, worker: str) -> float:
        """Return the seconds to add to a time of that worker."""
        return self._offsets[worker]

    def ours(self, worker: str, record: StepRecord) -> StepRecord:
        """Return the worker's record with its time converted to the controller's clock."""
        offset_s = self._offsets[worker]
        return replace(record, time=record.time + offset_s) if offset_s else record
