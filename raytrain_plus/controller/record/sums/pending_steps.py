"""Gather what only some members know of a step until it is committed, and return it with the step. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from raytrain_plus.training.exchange.step_records import StepRecord


class PendingSteps:
    """Fed with each member's record of a step; asked once, when the step is committed."""

    def __init__(self) -> None:
        self._waited: dict[int, float] = {}
        self._lr: dict[int, tuple[float, ...]] = {}

    def add(self, record: StepRecord) -> None:
        """Add a member's record of a step that is not committed."""
        # In a model of several stages, those that read no data do not wait for it.
        self._waited[record.step] = max(record.waited_s, self._waited.get(record.step, 0.0))
        # A stage that trains nothing has no learning rate; all others have the same.
        if record.lr:
            self._lr[record.step] = record.lr

    def whole(self, record: StepRecord) -> StepRecord:
        """Return the record of a committed step with what all its members reported; forget the step."""
        waited_s = self._waited.pop(record.step, record.waited_s)
        return replace(record, waited_s=waited_s, lr=self._lr.pop(record.step, record.lr))

    def clear(self) -> None:
        """Forget all steps."""
        self._waited.clear()
        self._lr.clear()


def optional_fields(record: StepRecord) -> dict[str, Any]:
    """Return the optional fields of the step's event, without those that it does not have."""
    fields = {name: value for name in ("skipped", "rows_skipped", "metrics") if (value := getattr(record, name))}
    if record.lr:
        fields["lr"] = record.lr[0] if len(record.lr) == 1 else list(record.lr)
    return fields
