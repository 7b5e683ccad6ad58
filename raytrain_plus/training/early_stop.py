"""Decide when a run ends because its held-out metric no longer improves. Pure.

The decision is a function of the evaluations that count, in the order of their steps: every worker makes it at the same
boundary, and the controller makes it again from the run's events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from raytrain_plus.job.settings import EarlyStop


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the evaluations so far say."""

    best: int | None
    """The step with the best value, the first of equal ones; None if no value is a finite number."""
    over: int | None
    """The step after which the run ends; None while it may improve."""


def verdict(rule: EarlyStop, evaluated: Mapping[int, Mapping[str, float]]) -> Verdict:
    """Return the verdict on evaluations: step -> metrics. The untrained state, of step -1, does not count.

    >>> rule = EarlyStop(metric="loss", patience=2)
    >>> losses = {-1: 0.0, 9: 1.0, 19: 0.5, 29: 0.5, 39: 0.7, 49: 0.1}
    >>> verdict(rule, {step: {"loss": loss} for step, loss in losses.items()})
    Verdict(best=19, over=39)
    """
    sign = 1 if rule.mode == "min" else -1
    best: tuple[float, int] | None = None
    worse = 0
    for step in sorted(step for step in evaluated if step >= 0):
        value = sign * float(evaluated[step].get(rule.metric, math.nan))
        if math.isfinite(value) and (best is None or value < best[0]):
            best, worse = (value, step), 0
        else:
            worse += 1
        if worse >= rule.patience:
            return Verdict(None if best is None else best[1], step)
    return Verdict(None if best is None else best[1], None)


class Stopping:
    """The evaluations of a run, as a worker follows them; without a rule the run never ends early."""

    def __init__(self, rule: EarlyStop | None, evaluated: Mapping[int, Mapping[str, float]]) -> None:
        self._rule = rule
        self._evaluated = dict(evaluated)
        self._verdict = self._found()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the evaluation of the state after `step`; no metrics: it was not evaluated."""
        if metrics:
            self._evaluated[step] = metrics
            self._verdict = self._found()

    @property
    def over(self) -> bool:
        """Whether the run ends now."""
        return self._verdict.over is not None

    def keeps(self, step: int) -> bool:
        """Return whether the state after `step` is the best so far, which must be saved."""
        return step in self._evaluated and self._verdict.best == step

    def _found(self) -> Verdict:
        return Verdict(None, None) if self._rule is None else verdict(self._rule, self._evaluated)
