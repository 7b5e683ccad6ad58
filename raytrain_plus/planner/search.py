"""Search for the fastest choice that fits, for each number of workers: all of them are bounded, the promising computed.

A choice is computed only if a bound on its seconds is below the second best found so far, so the result is that of
computing all. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from raytrain_plus.job.settings import Job
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel.pipeline.memory import Misfit
from raytrain_plus.planner.cost import ChoiceCost, CostModel, mfu
from raytrain_plus.planner.layer_profile import ModelProfile
from raytrain_plus.planner.plan_table import NoPlan, PlanTable, SizePlan, choice_text
from raytrain_plus.planner.space import Choice, FreeSettings, forms, free_settings, shapes
from raytrain_plus.storage.size_text import size_text

USABLE = 0.9
"""The share of a worker's memory that a plan uses; the rest is for what is not counted, such as an allocator's gaps."""
ALIKE = 0.01
"""The relative difference of two times below which they are called equal."""

Room = Callable[[int], float]
"""Returns the bytes of memory of each worker, if there are so many."""
Found = tuple[tuple[float | int, ...], Choice, ChoiceCost]
"""The order of choices, from the best one on; the choice, and what it costs."""


def plan_sizes(
    job: Job,
    profile: ModelProfile,
    sizes: Sequence[int],
    room: Room,
    *,
    rows: int | None = None,
    dollars_per_hour: float | None = None,
) -> PlanTable:
    """Return the plans of a job for these numbers of workers, in ascending order.

    `rows`: those of an epoch. `dollars_per_hour`: the price of a worker. Without them, an epoch has no price.
    """
    search = PlanSearch(job, profile, room)
    found: list[SizePlan | NoPlan] = []
    for workers in sorted(set(sizes)):
        best = search.best(workers)
        if not best:
            found.append(NoPlan(workers, search.missing(workers)))
            continue
        _, choice, cost = best[0]
        per_s, used = job.data.batch_size / cost.time.total, choice.shape.size
        utilisation = dollars = None
        if profile.operations is not None and profile.peak is not None:
            utilisation = mfu(profile.operations * per_s, 1.0, used, profile.peak)
        if rows is not None and dollars_per_hour is not None:
            dollars = rows / per_s / 3600 * used * dollars_per_hour
        found.append(
            SizePlan(
                workers=workers,
                choice=choice,
                cost=cost,
                reason=search.reason(workers, choice, cost),
                runner_up=_runner_up(best),
                samples_per_s=per_s,
                mfu=utilisation,
                dollars=dollars,
            )
        )
    return PlanTable(tuple(map(_with_enough(found), found)))


def _with_enough(found: Sequence[SizePlan | NoPlan]) -> Callable[[SizePlan | NoPlan], SizePlan | NoPlan]:
    """Return what adds to the reason of a size that cannot work which one can."""
    enough = next((row.workers for row in found if isinstance(row, SizePlan)), None)

    def add(row: SizePlan | NoPlan) -> SizePlan | NoPlan:
        if isinstance(row, SizePlan) or enough is None or row.workers > enough:
            return row
        return replace(row, missing=f"{row.missing}; it fits on {enough} workers")

    return add


def _runner_up(best: Sequence[Found]) -> str:
    if len(best) == 1:
        return ""
    (_, _, first), (_, choice, second) = best
    slower = second.time.total / first.time.total - 1
    return f"{choice_text(choice)}: {'as fast' if slower < ALIKE else f'{100 * slower:.0f} % slower'}"


@dataclass(slots=True)
class PlanSearch:
    """The best choices for growing numbers of workers."""

    job: Job
    profile: ModelProfile
    room: Room
    costs: CostModel = field(init=False)
    _settings: dict[bool, dict[FreeSettings, Job]] = field(init=False)
    """By whether the model is in several stages: the settings, and the job with them."""
    _best: list[Found] = field(init=False, default_factory=list)
    """The best two for `_reached` workers."""
    _reached: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.costs = CostModel(self.job, self.profile)
        self._settings = {staged: free_settings(self.job, self.profile, staged=staged) for staged in (False, True)}

    def choices(self, fewest: int, most: int) -> Iterator[Choice]:
        """Yield all choices that use so many workers, whether they fit or not."""
        for shape in shapes(self.job, self.profile, most):
            if shape.size < fewest:
                continue
            for settings, asked in self._settings[shape.stages > 1].items():
                # The state of so few replicas is not divided.
                divided = settings.sharded == "none" or shape.replicas > self.job.parallel.holders
                if divided and forms(asked, shape, len(self.profile.layers)):
                    yield Choice(shape, settings)

    def order(self, choice: Choice, cost: ChoiceCost) -> tuple[float | int, ...]:
        """Return the order of choices: the fastest, of the fewest workers, of the simplest settings first."""
        shape = choice.shape
        simple = list(self._settings[shape.stages > 1]).index(choice.settings)
        return (cost.time.total, shape.size, shape.stages, shape.tensor_ranks, simple)

    def best(self, workers: int) -> list[Found]:
        """Return the two best choices of at most so many workers; none if none fits. Ask for growing numbers."""
        bounded = [
            (self.costs.least_s(choice), number, choice)
            for number, choice in enumerate(self.choices(self._reached + 1, workers))
            if self.costs.least_bytes(choice) <= self._room(choice.shape)
        ]
        for least_s, _, choice in sorted(bounded, key=lambda one: one[:2]):
            if len(self._best) == 2 and least_s > self._best[1][0][0]:
                break
            cost = self.costs.of(choice, self._room(choice.shape))
            if not isinstance(cost, Misfit):
                self._best = sorted([*self._best, (self.order(choice, cost), choice, cost)], key=lambda one: one[0])[:2]
        self._reached = max(self._reached, workers)
        return list(self._best)

    def missing(self, workers: int) -> str:
        """Return why no choice of at most so many workers fits."""
        smallest = min(self.choices(1, workers), key=self.costs.least_bytes, default=None)
        if smallest is None:
            return f"no shape of at most {workers} workers is allowed: {self.job.parallel.schedule} needs more stages"
        cost = self.costs.of(smallest, math.inf)
        assert not isinstance(cost, Misfit)
        need, room = cost.memory, self._room(smallest.shape)
        kinds = sorted(need.kinds.items(), key=lambda kind: -kind[1])
        most = " and ".join(f"{size_text(size)} of {kind}" for kind, size in kinds[:2])
        return (
            f"a worker needs {size_text(need.total)} ({most}) even with {choice_text(smallest)}, and a plan may use "
            f"{size_text(int(room))} of its memory"
        )

    def reason(self, workers: int, choice: Choice, cost: ChoiceCost) -> str:
        """Return why this choice is the best of so many workers, in a sentence."""
        shape, settings = choice.shape, choice.settings
        found = []
        if shape.stages > 1:
            found.append(self._against("whole replicas", Choice(self._replicas(workers), self._plain(choice)), cost))
        if settings.sharded != "none":
            found.append(self._against("without sharding", self._with(choice, sharded="none"), cost))
        if settings.recompute != "none":
            found.append(self._against("without recomputation", self._with(choice, recompute="none"), cost))
        if settings.offload != "none":
            found.append(self._against("without offload", self._with(choice, offload="none"), cost))
        if shape.size < workers:
            found.append(self._fewer(workers, shape))
        return "; ".join(found) or "the simplest settings fit, and every other choice is slower"

    def _fewer(self, workers: int, shape: Shape) -> str:
        width = shape.stages * shape.tensor_ranks
        if shape.replicas == self.job.data.shards and workers - shape.size >= width:
            return f"data.shards = {self.job.data.shards} gives no more replicas work"
        return f"more than {shape.size} worker{'s' * (shape.size > 1)} would make no step faster"

    def _against(self, what: str, other: Choice, cost: ChoiceCost) -> str:
        found = self.costs.of(other, self._room(other.shape))
        if isinstance(found, Misfit):
            return f"{what}, a worker would need {size_text(found.bytes)}, and a plan may use {size_text(found.room)}"
        slower = found.time.total / cost.time.total - 1
        return f"{what}, a step would be {f'{100 * slower:.0f} % longer' if slower >= ALIKE else 'as long'}"

    def _replicas(self, workers: int) -> Shape:
        """Return the shape of as many replicas of one worker as are useful; of one, if weights are cut into slices."""
        one_stage = [shape for shape in shapes(self.job, self.profile, workers) if shape.layout == (1, 1)]
        return one_stage[-1] if one_stage else Shape(1)

    def _plain(self, choice: Choice) -> FreeSettings:
        return replace(choice.settings, sharded="none", recompute="none")

    def _with(self, choice: Choice, **settings: object) -> Choice:
        return Choice(choice.shape, replace(choice.settings, **settings))  # type: ignore[arg-type]

    def _room(self, shape: Shape) -> float:
        return USABLE * self.room(shape.size)
