"""What a run comes back with, in Python and as `result.json`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from raytrain_plus.errors import InputError
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.json_text import json_text

RESULT = "result.json"
"""The file's name in a run's folder."""
_SHAPE = has.object_of(
    name=has.text,
    status=has.one_of("finished", "stopped", "failed"),
    exit_code=has.whole(0, 255),
    path=has.text,
    steps=has.whole(0),
    samples=has.whole(0),
)
_IF_THERE = {
    "metrics": has.table_of(has.figure),
    "state_sha256": has.maybe(has.text),
    "recoveries": has.whole(0),
    "stall_s": has.number(0, 1e12),
    "goodput": has.number(),
    "data_wait": has.number(),
    "setup_s": has.maybe(has.number(0, 1e12)),
    "seconds": has.number(0, 1e12),
    "bubble": has.maybe(has.number()),
    "copies": has.whole(0),
    "copy_s": has.number(0, 1e12),
    "error": has.maybe(has.text),
    "skipped": has.whole(0),
    "show": has.maybe(has.text),
}
"""What earlier versions did not write."""
_REMEDY = "move the file away; the run then counts as one that has not ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The end of a run."""

    name: str
    status: str
    """`finished`, `stopped` (by a signal, at a step boundary) or `failed`."""
    exit_code: int
    """0 finished, 1 failed, 130 and 143 stopped by SIGINT and SIGTERM."""
    path: Path | str
    """The run's folder: a path, or the address where `storage` is one."""
    steps: int
    """Committed steps."""
    samples: int
    """Rows in the committed steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The last evaluation's figures, and `train_loss`, the last committed step's."""
    state_sha256: str | None = None
    """Hash of parameters, persistent buffers and optimizer state at the end."""
    recoveries: int = 0
    """Workers' losses that the run recovered from."""
    stall_s: float = 0.0
    """Seconds that those cost, together."""
    goodput: float = 1.0
    """1 - (stalled + recomputed) / time after the first step."""
    data_wait: float = 0.0
    """Share of step time spent waiting for data, the first second left out."""
    setup_s: float | None = None
    """Seconds from Ray being there to the first step made."""
    seconds: float = 0.0
    """From the first step made to the last."""
    bubble: float | None = None
    """Where the model was in stages: the share of their time in which they waited for one another."""
    copies: int = 0
    """How often the state, where workers held parts of it alone, was copied into others' memory."""
    copy_s: float = 0.0
    """Seconds for which those copies held the steps up, together."""
    error: str | None = None
    """What ended a failed run."""
    skipped: int = 0
    """Committed steps that changed nothing, because their sums were not finite (`elastic.on_nonfinite: skip`)."""
    show: str | None = None
    """What the task had to show."""

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return {**asdict(self), "path": str(self.path), "metrics": dict(self.metrics)}

    def save(self, run: Folder) -> None:
        """Writes `result.json` into the run's folder, whole or not at all."""
        run.write(RESULT, [json_text(self.to_json(), indent=2).encode() + b"\n"])

    @classmethod
    def load(cls, run: Folder) -> Result | None:
        """The result in a run's folder, or None where the run has not ended.

        Raises `InputError` where there is one that this version does not write.
        """
        try:
            values = read_object(run, RESULT, _REMEDY)
        except FileNotFoundError:
            return None
        wrong = _misfit(values)
        if wrong:
            what = f"it holds no result that this version writes: {wrong}"
            raise InputError(what, where=f"{run.where}/{RESULT}", remedy=_REMEDY)
        # What is not finite stands there as text.
        metrics = {name: float(value) for name, value in values.get("metrics", {}).items()}
        return cls(**{**values, "path": run.path or run.address, "metrics": metrics})


def _misfit(values: Mapping[str, Any]) -> str:
    wrong = ((name, shape(values[name])) for name, shape in _IF_THERE.items() if name in values)
    unknown = values.keys() - {entry.name for entry in fields(Result)}
    if unknown:
        return f"there is {min(unknown)!a}, which is no part of one"
    return _SHAPE(values) or next((f"{name}: {what}" for name, what in wrong if what), "")
