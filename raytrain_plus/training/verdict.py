"""Decide what becomes of a step whose sums are complete: apply it, compute it again, or refuse it. Pure.

A step is fit when its exact sums fit their grids and every sum is finite. Sums that are not finite are computed once
more, and each shard is checked on the way (`fault_search`); if they stay so, nothing of the step is applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SKIPPED_IN_A_ROW = 10
"""Steps in a row that `elastic.on_nonfinite: skip` may meet; with the last of them the run stops."""

LOSS = "loss/"
"""Among squared norms: stands for the loss. No parameter has a slash in its name."""
BUFFER = "buffer/"
"""Among squared norms: the prefix of a buffer whose sum is not finite."""


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """The first gradient of a step that is not finite."""

    shard: int
    chunk: int
    """Number of the chunk of layers that has the parameter."""
    parameter: str


@dataclass(frozen=True, slots=True)
class Said:
    """What a stage, or all stages of a replica together, know of a step's sums."""

    settled: bool
    """Exact sums fit their grids; other sums always do."""
    squares: Mapping[str, float] = field(default_factory=dict)
    """Squared norm of each parameter's gradient, tied parameters once; what else is not finite stands there as NaN."""
    fault: Fault | None = None
    """Known once the step was computed with a check after each shard."""

    @property
    def fit(self) -> bool:
        """Whether the step may be applied."""
        return self.settled and math.isfinite(gradient_norm(self.squares))

    def plain(self) -> tuple[Any, ...]:
        """Return it as plain values, for another process: `from_plain` reads them."""
        fault = None if self.fault is None else (self.fault.shard, self.fault.chunk, self.fault.parameter)
        return self.settled, dict(self.squares), fault


def from_plain(values: Sequence[Any]) -> Said:
    """Return what `Said.plain` gave."""
    settled, squares, fault = values
    return Said(settled, squares, None if fault is None else Fault(*fault))


def merged(said: Sequence[Said]) -> Said:
    """Return what all stages of a replica know together.

    A fault spreads from its layer to all layers before it: of the first faulty shard, the last chunk has the cause.
    """
    faults = [one.fault for one in said if one.fault is not None]
    return Said(
        all(one.settled for one in said),
        {name: value for one in said for name, value in one.squares.items()},
        min(faults, key=lambda fault: (fault.shard, -fault.chunk), default=None),
    )


def gradient_norm(squares: Mapping[str, float]) -> float:
    """Return the global norm; added in the order of names, so that it does not depend on how the model is split."""
    total = sum(squares[name] for name in sorted(squares))
    return math.sqrt(total) if total >= 0 else math.nan


def of_step(step: int, squares: Mapping[str, float]) -> dict[str, float]:
    """Return squared norms under names that tell them from those of other steps: `squares_of` undoes it."""
    return {f"{step}/{name}": square for name, square in squares.items()}


def squares_of(step: int, squares: Mapping[str, float]) -> dict[str, float]:
    """Return those of one step, by their own names."""
    return {name.partition("/")[2]: square for name, square in squares.items() if name.startswith(f"{step}/")}


def why_refused(step: int, bad_shards: Sequence[int], said: Said, *, searched: bool) -> str:
    """Return why nothing of the step can be applied; empty if it can be, or if it is to be computed again first.

    `bad_shards`: those whose loss is not finite. `searched`: each shard was checked while the sums were computed.
    """
    if bad_shards:
        which = f"shard {bad_shards[0]}" if len(bad_shards) == 1 else f"shards {', '.join(map(str, bad_shards))}"
        return (
            f"the loss of step {step} is not finite in {which}; nothing of this step was applied. "
            "Usual causes: a learning rate too high, a division by zero or log(0) in the loss, bad values in the data"
        )
    if said.fault is not None:
        return (
            f"the gradient of step {step} is not finite in shard {said.fault.shard}, first in the parameter "
            f"'{said.fault.parameter}', though the loss is; nothing of this step was applied. Usual causes: the "
            "derivative of sqrt, norm or pow at 0, torch.where around an infinite branch, a learning rate too high"
        )
    bad = [name for name, value in said.squares.items() if not math.isfinite(value)]
    if not searched or said.fit or not (said.settled or bad):
        return ""
    # Each one may be finite, and only their sum not.
    of_parameters = [name for name in bad if not name.startswith(BUFFER)] or ([] if bad else [_largest(said.squares)])
    name = (of_parameters or bad)[-1]
    if name.startswith(BUFFER):
        return (
            f"the buffer '{name.removeprefix(BUFFER)}' would not be finite after step {step}, though loss and gradient "
            "are; nothing of this step was applied"
        )
    return (
        f"the gradient of step {step} is not finite in the parameter '{name}', though it is in each shard: their sum "
        "exceeds the range of its type; nothing of this step was applied"
    )


def _largest(squares: Mapping[str, float]) -> str:
    return max(squares, key=lambda name: squares[name])
