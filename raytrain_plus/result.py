"""Define the result of a run, returned in Python and saved as `result.json`, and how the run resumes. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import InputError
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.json_text import json_text

RESULT = "result.json"
"""Name of the file in a run's folder."""
_SHAPE = has.object_of(
    name=has.text,
    status=has.one_of("finished", "stopped", "failed"),
    exit_code=has.whole(0, 255),
    path=has.text,
    steps=has.whole(0),
    samples=has.whole(0),
)
_ERROR = has.object_of(what=has.text, where=has.text, remedy=has.text)
"""An error as `--json` prints it."""
_IF_THERE = {
    "metrics": has.table_of(has.number_or_nonfinite),
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
    "error": has.maybe(lambda value: has.text(value) if isinstance(value, str) else _ERROR(value)),
    "skipped": has.whole(0),
    "rows_skipped": has.whole(0),
    "show": has.maybe(has.text),
    "trained_steps": has.maybe(has.whole(0)),
    "trained_samples": has.maybe(has.whole(0)),
    "ended": has.maybe(has.number(0, 1e12)),
    "saved_step": has.maybe(has.whole(0)),
    "unsaved": has.maybe(has.text),
    "stopped_early": has.maybe(has.text),
    "model_step": has.maybe(has.whole(-1)),
    "model_metrics": has.table_of(has.number_or_nonfinite),
    "profile": has.maybe(has.table_of(has.anything)),
}
"""Shapes of the fields that earlier versions did not write."""
_REMEDY = "move the file away; the run then counts as not ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How a run ended, and its totals.

    A run that was resumed had several processes. Times, speeds and copies are those of the last one; steps, samples,
    recoveries, skipped steps and skipped rows are those of the whole run.
    """

    name: str
    status: str
    """`finished`, `stopped` (by a signal, at a step boundary) or `failed`."""
    exit_code: int
    """0 finished, 1 failed, 130 and 143 stopped by SIGINT and SIGTERM."""
    path: Path | str
    """The run's folder: a path, or an address if `storage` is one."""
    steps: int
    """Number of committed steps."""
    samples: int
    """Number of rows in the committed steps."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last evaluation, and `train_loss`, the loss of the last committed step. With `early_stop` the
    exported model is an earlier state: its metrics are `model_metrics`."""
    state_sha256: str | None = None
    """SHA-256 hash of parameters, persistent buffers and optimizer state at the end; None if unknown."""
    recoveries: int = 0
    """Number of worker losses that the whole run recovered from."""
    stall_s: float = 0.0
    """Total seconds that these recoveries cost."""
    goodput: float = 1.0
    """1 - (stalled + recomputed) / time after the first step of this process."""
    data_wait: float = 0.0
    """Share of the step time of this process spent waiting for data, without the first second."""
    setup_s: float | None = None
    """Seconds from Ray being ready to the end of the first step; None if the run made no step."""
    seconds: float = 0.0
    """Seconds from the end of the first step of this process to the end of its last."""
    bubble: float | None = None
    """Share of their time that pipeline stages spent waiting for each other; None without pipeline stages."""
    copies: int = 0
    """Number of copies of state that only one worker held into another worker's memory."""
    copy_s: float = 0.0
    """Total seconds that those copies delayed the steps."""
    error: str | None = None
    """Why a failed run ended; None for other runs."""
    skipped: int = 0
    """Committed steps that changed nothing because their sums were not finite (`elastic.on_nonfinite: skip`)."""
    rows_skipped: int = 0
    """Rows that were left out of the committed steps because they cannot be used (`data.on_error: skip`)."""
    show: str | None = None
    """The text that `Task.show` returned."""
    trained_steps: int | None = None
    """Number of steps that this process of the run trained; 0 if the run had finished before. None: unknown."""
    trained_samples: int | None = None
    """Number of rows in these steps; None: unknown."""
    ended: float | None = None
    """When the run ended, in Unix seconds; None if an older version wrote the result."""
    saved_step: int | None = None
    """The step of the newest complete checkpoint at the end, counted from 0 like `step` in events and checkpoints; None
    if there is none."""
    unsaved: str | None = None
    """Why the state that a stopped run ended with was not saved; None if it was, and for other runs."""
    stopped_early: str | None = None
    """Why a finished run ended before its last step, such as `loss has not improved since step 30` (`early_stop`); None
    for other runs. The model is then the best one: see `model_step`."""
    model_step: int | None = None
    """The step after which the exported model was taken, counted from 0 like `step` in events and checkpoints: the
    last one, or with `early_stop` that of the best evaluation. -1: the untrained model; None: no model was exported."""
    model_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the evaluation of the exported model; empty if that state was not evaluated."""
    profile: Mapping[str, Any] | None = None
    """Where the time of profiled steps went, as in `profile/summary.json`; None if this process profiled none."""

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        tables = {"metrics": dict(self.metrics), "model_metrics": dict(self.model_metrics)}
        return {**asdict(self), "path": str(self.path), **tables}

    def save(self, run: Folder) -> None:
        """Write `result.json` into the run's folder, whole or not at all."""
        run.write(RESULT, [json_text(self.to_json(), indent=2).encode() + b"\n"])

    @classmethod
    def load(cls, run: Folder) -> Result | None:
        """Return the result in a run's folder, or None if the run has not ended.

        The error may be a text, as `save` writes it, or an object, as `--json` prints it.

        Raises `InputError` if the file is damaged or not a result of this version.
        """
        try:
            values = read_object(run, RESULT, _REMEDY)
        except FileNotFoundError:
            return None
        wrong = _misfit(values)
        if wrong:
            what = f"not a valid result for this version: {wrong}"
            raise InputError(what, where=f"{run.where}/{RESULT}", remedy=_REMEDY)
        # NaN and infinities are saved as text.
        tables = {
            table: {name: float(value) for name, value in values.get(table, {}).items()}
            for table in ("metrics", "model_metrics")
        }
        error = values.get("error")
        if error is not None and not isinstance(error, str):
            error = str(InputError(error["what"], where=error["where"], remedy=error["remedy"]))
        return cls(**{**values, **tables, "path": run.path or run.address, "error": error})


def saved_text(result: Result) -> str | None:
    """Return whether the state that a stopped run ended with was saved, in words; None for other runs.

    Also None for a run of an older version, which did not record it.
    """
    if result.status != "stopped" or (result.steps and result.saved_step is None and result.unsaved is None):
        return None
    if not result.steps and result.saved_step is not None:
        # A resumed run that was stopped before its workers had read the checkpoint.
        return f"no new step was completed; the checkpoint after step {result.saved_step + 1} is complete"
    if not result.steps:
        return "no step was completed: there is no state to save"
    return state_text(result.steps, result.unsaved, result.saved_step)


def state_text(steps: int, why: str | None, saved_step: int | None) -> str:
    """Return whether the state after `steps` steps was saved, in words.

    `why`: why it was not, or None if it was; then the text names the newest complete checkpoint, that after
    `saved_step`.
    """
    if why is None:
        return f"state after step {steps} saved"
    newest = "none" if saved_step is None else f"step {saved_step + 1}"
    return f"state after step {steps} NOT saved: {why}; newest complete: {newest}"


def _misfit(values: Mapping[str, Any]) -> str:
    wrong = ((name, shape(values[name])) for name, shape in _IF_THERE.items() if name in values)
    unknown = values.keys() - {entry.name for entry in fields(Result)}
    if unknown:
        return f"unknown field {min(unknown)!a}"
    return _SHAPE(values) or next((f"{name}: {what}" for name, what in wrong if what), "")


def resume_command(where: Folder | str | Path) -> str:
    """Return the command that resumes the run in a folder, or at a path or address."""
    address = str(where) if isinstance(where, (str, Path)) else where.address
    return f"raytrain resume {shlex.quote(without_credentials(address, whole=True))}"
