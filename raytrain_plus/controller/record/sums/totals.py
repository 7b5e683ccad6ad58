"""Add up a run's committed steps to its result. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from raytrain_plus.result import Result

WARM_UP_S = 1.0
"""Steps of a run's first second do not count in its data wait: files open and streams start then."""


class _TotalsRecord(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def rows_skipped(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def waited_s(self) -> float: ...
    @property
    def time(self) -> float: ...


class _Sums(Protocol):
    @property
    def first_step(self) -> int: ...
    @property
    def first_time(self) -> float | None: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def grad_norm(self) -> float | None: ...
    @property
    def time(self) -> float: ...
    @property
    def again_to(self) -> int: ...
    @property
    def again_s(self) -> float: ...
    @property
    def earlier_stall_s(self) -> float: ...


class _Sent(Protocol):
    @property
    def stall_s(self) -> float: ...


class Totals:
    """Running sums over the committed steps: of the whole run, and of this process of it."""

    def __init__(
        self,
        recoveries: int = 0,
        stall_s: float = 0.0,
        skipped: Collection[int] = (),
        rows_skipped: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Begin with the recoveries, their seconds, and the skipped steps and rows of the run's earlier processes.

        `rows_skipped`: step -> the number of its rows that were left out.
        """
        self.steps = 0
        self.samples = 0
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self._skipped = set(skipped)
        self._rows_skipped = dict(rows_skipped)
        self.first_time: float | None = None
        self.last_time = 0.0
        self._warm_s = 0.0
        self._warm_waited_s = 0.0
        self._begin: float | None = None
        self.recoveries = recoveries
        self.stall_s = self._earlier_stall_s = stall_s
        self.again_s = 0.0
        """Seconds of recomputed steps."""
        self.copies = 0
        self.copy_s = 0.0
        self._again_to = -1
        self._first_step = 0
        """The first step of this process of the run."""
        self._first_sample = 0

    def adopt(self, sums: _Sums, committed: int, samples: Callable[[int], int]) -> None:
        """Continue the sums of a dead controller, given those of its events.

        `committed`: the highest committed step in these; `samples` returns the number of rows up to a step. What no
        event tells begins again: the wait for data and the copies.
        """
        self.steps, self.samples = committed + 1, samples(committed)
        self.loss, self.grad_norm = sums.loss, sums.grad_norm
        self.first_time = self._begin = sums.first_time
        self.last_time = sums.time
        self._again_to, self.again_s = sums.again_to, sums.again_s
        self._earlier_stall_s = sums.earlier_stall_s
        self._first_step, self._first_sample = sums.first_step, samples(sums.first_step - 1)

    def back_to(self, step: int, samples: int, made: int) -> None:
        """Continue after `step` and `samples` rows, though steps up to `made` had been committed."""
        if self.first_time is None or step < self._first_step:
            self._first_step, self._first_sample = step + 1, samples
        self.steps, self.samples = step + 1, samples
        self._skipped = {skipped for skipped in self._skipped if skipped <= step}
        self._rows_skipped = {skipped: rows for skipped, rows in self._rows_skipped.items() if skipped <= step}
        self._again_to = max(self._again_to, made)

    def add(self, record: _TotalsRecord) -> None:
        """Count one committed step; steps come in order."""
        self.steps = record.step + 1
        self.samples += record.rows
        self.loss = record.loss
        self.grad_norm = record.grad_norm
        if record.skipped:
            self._skipped.add(record.step)
        if record.rows_skipped:
            self._rows_skipped[record.step] = record.rows_skipped
        self.last_time = record.time
        self.again_s += record.seconds if record.step <= self._again_to else 0.0
        if self.first_time is None or self._begin is None:
            self.first_time = record.time
            self._begin = record.time - record.seconds
        if record.time - self._begin > WARM_UP_S:
            self._warm_s += record.seconds
            self._warm_waited_s += record.waited_s

    def copied(self, sent: Sequence[_Sent]) -> None:
        """Count the copies of one step's state; all members stood still for as long as the slowest."""
        self.copies += 1
        self.copy_s += max(one.stall_s for one in sent)

    def recovered(self, stall_s: float) -> None:
        """Count one recovery, from the last commit before to the first after; recomputed steps lie in between."""
        self.recoveries += 1
        self.stall_s += stall_s

    @property
    def skipped(self) -> int:
        """The number of skipped steps among those that count."""
        return len(self._skipped)

    @property
    def rows_skipped(self) -> int:
        """The number of rows that were left out of the steps that count."""
        return sum(self._rows_skipped.values())

    @property
    def goodput(self) -> float:
        """1 - (stalled + recomputed) / time after the first step, in this process."""
        seconds = 0.0 if self.first_time is None else self.last_time - self.first_time
        stall_s = self.stall_s - self._earlier_stall_s
        return max(0.0, 1 - (stall_s + self.again_s) / seconds) if seconds > 0 else 1.0

    @property
    def data_wait(self) -> float:
        """The share of the steps' time spent waiting for data, without warm-up; 0 if no time was measured."""
        return self._warm_waited_s / self._warm_s if self._warm_s else 0.0

    def result(
        self,
        *,
        name: str,
        status: str,
        path: Path | str,
        metrics: Mapping[str, float],
        state_sha256: str | None,
        error: str | None,
        show: str | None,
        began: float,
        bubble: float | None,
        ended: float,
    ) -> Result:
        """Return the run's result.

        `began`: Unix seconds at which Ray was available; `bubble`: the share of the stages' time spent waiting for one
        another; `ended`: Unix seconds at the end.
        """
        return Result(
            name=name,
            status=status,
            exit_code={"finished": 0, "stopped": 143}.get(status, 1),
            path=path,
            steps=self.steps,
            samples=self.samples,
            metrics={**metrics, **({} if self.loss is None else {"train_loss": self.loss})},
            state_sha256=state_sha256,
            recoveries=self.recoveries,
            stall_s=self.stall_s,
            goodput=self.goodput,
            data_wait=self.data_wait,
            setup_s=None if self.first_time is None else self.first_time - began,
            seconds=0.0 if self.first_time is None else self.last_time - self.first_time,
            bubble=bubble,
            copies=self.copies,
            copy_s=self.copy_s,
            error=error,
            skipped=self.skipped,
            rows_skipped=self.rows_skipped,
            show=show,
            trained_steps=self.steps - self._first_step,
            trained_samples=self.samples - self._first_sample,
            ended=ended,
        )
