"""Decide what happens to a step with complete sums: apply it, recompute it, or refuse it. Pure.

A step is fit if its exact sums fit their grids and every sum is finite. A step with non-finite sums is recomputed once,
with a check after each shard (`fault_search`). If its sums are still not finite, nothing of it is applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SKIPPED_IN_A_ROW = 10
"""Consecutive skipped steps under `elastic.on_nonfinite: skip` at which the run stops."""

LOSS = "loss/"
"""Key among the squared norms that stands for the loss. No parameter has a slash in its name."""
BUFFER = "buffer/"
"""Prefix among the squared norms of a buffer whose sum is not finite."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """The first gradient of a step that is not finite."""

    shard: int
    chunk: int
    """Index of the chunk of layers that has the parameter."""
    parameter: str


@dataclass(frozen=True, slots=True)
class SumStatus:
    """What one stage, or all stages of a replica together, know of a step's sums."""

    settled: bool
    """Exact sums fit their grids; other sums are always settled."""
    squares: Mapping[str, float] = field(default_factory=dict)
    """Squared norm of each parameter's gradient, tied parameters once; NaN for anything else that is not finite."""
    fault: Fault | None = None
    """Known after the step was computed with a check after each shard."""

    @property
    def fit(self) -> bool:
        """Whether the step may be applied."""
        return self.settled and math.isfinite(gradient_norm(self.squares))

    def plain(self) -> tuple[Any, ...]:
        """Return the values as plain types for another process; `from_plain` reads them."""
        fault = None if self.fault is None else (self.fault.shard, self.fault.chunk, self.fault.parameter)
        return self.settled, dict(self.squares), fault


def from_plain(values: Sequence[Any]) -> SumStatus:
    """Return the `SumStatus` that `SumStatus.plain` encoded."""
    settled, squares, fault = values
    return SumStatus(settled, squares, None if fault is None else Fault(*fault))


def merged(statuses: Sequence[SumStatus]) -> SumStatus:
    """Return what all stages of a replica know together.

    A fault spreads from its layer to all earlier layers: of the first faulty shard, the last chunk has the cause.
    """
    faults = [one.fault for one in statuses if one.fault is not None]
    return SumStatus(
        all(one.settled for one in statuses),
        {name: value for one in statuses for name, value in one.squares.items()},
        min(faults, key=lambda fault: (fault.shard, -fault.chunk), default=None),
    )


def gradient_norm(squares: Mapping[str, float]) -> float:
    """Return the global norm.

    It is added in the order of names, so it does not depend on the partition of the model.
    """
    total = sum(squares[name] for name in sorted(squares))
    return math.sqrt(total) if total >= 0 else math.nan


def overflows(squares: Mapping[str, float]) -> bool:
    """Return whether a parameter's gradient is not finite.

    >>> overflows({"a": 1.0, "buffer/b": math.nan}), overflows({"a": math.inf})
    (False, True)
    """
    return any(
        not (math.isfinite(square) or name == LOSS or name.startswith(BUFFER)) for name, square in squares.items()
    )


def of_step(step: int, squares: Mapping[str, float]) -> dict[str, float]:
    """Return the squared norms under names that include the step; `squares_of` is the inverse."""
    return {f"{step}/{name}": square for name, square in squares.items()}


def squares_of(step: int, squares: Mapping[str, float]) -> dict[str, float]:
    """Return the squared norms of one step under their own names."""
    return {name.partition("/")[2]: square for name, square in squares.items() if name.startswith(f"{step}/")}


def why_refused(step: int, bad_shards: Sequence[int], status: SumStatus, *, searched: bool) -> str:
    """Return why the step cannot be applied; empty if it can be applied or must be recomputed first.

    `bad_shards`: shards whose loss is not finite. `searched`: each shard was checked while the sums were computed.
    """
    if bad_shards:
        which = f"shard {bad_shards[0]}" if len(bad_shards) == 1 else f"shards {', '.join(map(str, bad_shards))}"
        return (
            f"the loss of step {step} is not finite in {which}; the step was not applied. Usual causes: "
            "a learning rate that is too high, a division by zero or log(0) in the loss, bad values in the data"
        )
    if status.fault is not None:
        return (
            f"the gradient of step {step} is not finite in shard {status.fault.shard}, first in the parameter "
            f"'{status.fault.parameter}', although the loss is finite; the step was not applied. Usual causes: the "
            "derivative of sqrt, norm or pow at 0, torch.where around an infinite branch, a learning rate that is too "
            "high"
        )
    bad = [name for name, value in status.squares.items() if not math.isfinite(value)]
    if not searched or status.fit or not (status.settled or bad):
        return ""
    # Each gradient can be finite while only their sum is not.
    of_parameters = [name for name in bad if not name.startswith(BUFFER)] or ([] if bad else [_largest(status.squares)])
    name = (of_parameters or bad)[-1]
    if name.startswith(BUFFER):
        return (
            f"the buffer '{name.removeprefix(BUFFER)}' would not be finite after step {step}, although loss and "
            "gradients are finite; the step was not applied"
        )
    return (
        f"the gradient of step {step} is not finite in the parameter '{name}', although it is finite in each shard: "
        "the sum exceeds the range of its dtype; the step was not applied"
    )


def _largest(squares: Mapping[str, float]) -> str:
    return max(squares, key=lambda name: squares[name])
