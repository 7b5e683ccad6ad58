"""Judge the evaluations of a run: which state is the best, and whether the run ends because none improves. Pure.

The decision is a function of the evaluations that count, in the order of their steps: every worker makes it at the same
boundary, and the controller makes it again from the run's events.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from raytrain_plus.job.settings import EarlyStop, KeepBest

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationVerdict:
    """What the evaluations so far say."""

    best: int | None
    """The step with the best value, the first of equal ones; None if no value is a finite number."""
    over: int | None
    """The step after which the run ends; None while it may improve."""


def verdict(rule: EarlyStop | KeepBest, evaluated: Mapping[int, Metrics]) -> EvaluationVerdict:
    """Return the verdict on evaluations: step -> metrics. The untrained state, of step -1, does not count.

    >>> rule = EarlyStop(metric="loss", patience=2)
    >>> losses = {-1: 0.0, 9: 1.0, 19: 0.5, 29: 0.5, 39: 0.7, 49: 0.1}
    >>> verdict(rule, {step: {"loss": loss} for step, loss in losses.items()})
    EvaluationVerdict(best=19, over=39)
    """
    sign = 1 if rule.mode == "min" else -1
    patience = rule.patience if isinstance(rule, EarlyStop) else math.inf
    best: tuple[float, int] | None = None
    worse = 0
    for step in sorted(step for step in evaluated if step >= 0):
        value = sign * float(evaluated[step].get(rule.metric, math.nan))
        if math.isfinite(value) and (best is None or value < best[0]):
            best, worse = (value, step), 0
        else:
            worse += 1
        if worse >= patience:
            return EvaluationVerdict(None if best is None else best[1], step)
    return EvaluationVerdict(None if best is None else best[1], None)


class Evaluations:
    """The evaluations up to a worker's state, judged; without a rule no state is the best, and the run never ends."""

    def __init__(self, rule: EarlyStop | KeepBest | None, known: Mapping[int, Metrics]) -> None:
        """Begin before any step.

        `known`: the metrics of the evaluations that were reported, by step. Steps that are computed again are among
        them: their evaluations count once the state has reached them.
        """
        self._rule = rule
        self._ahead = deque(sorted(known.items()))
        self._evaluated: dict[int, Metrics] = {}
        self._verdict = EvaluationVerdict(None, None)

    def reach(self, step: int, metrics: Metrics) -> None:
        """Follow the state to the one after `step`; `metrics`: of the evaluation made there, if one was."""
        before = len(self._evaluated)
        while self._ahead and self._ahead[0][0] <= step:
            at, known = self._ahead.popleft()
            self._evaluated[at] = known
        if metrics:
            self._evaluated[step] = metrics
        if self._rule is not None and len(self._evaluated) > before:
            self._verdict = verdict(self._rule, self._evaluated)

    def metrics(self, step: int) -> Metrics:
        """Return the metrics of the state after `step`; empty if it was not evaluated."""
        return self._evaluated.get(step, {})

    @property
    def over(self) -> bool:
        """Whether the run ends now."""
        return self._verdict.over is not None

    def is_best(self, step: int) -> bool:
        """Return whether the state after `step` is the best so far, which must be saved."""
        return self._verdict.best == step
