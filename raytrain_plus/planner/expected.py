"""Forecast the steps per second of one worker and of a job's largest group, and whether more workers pay. Pure."""

from __future__ import annotations

from raytrain_plus.job.settings import Job
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel.per_row import PerRow
from raytrain_plus.parallel.pipeline.memory import Misfit
from raytrain_plus.parallel.state_bytes import StateSize
from raytrain_plus.planner.cost import CostModel, StepTime
from raytrain_plus.planner.layer_profile import STEP_S, LayerPasses, LayerProfile, LinkSpeed, ModelProfile
from raytrain_plus.planner.space import Choice, FreeSettings, own_recompute

PAYS = 1.1
"""How much faster steps of more workers must be to pay."""


def expected_steps(
    job: Job, state: StateSize, shard_s: float, replicas: int, *, link: LinkSpeed, cores: float
) -> tuple[str, ...]:
    """Return what to expect of a job whose workers hold whole models, all on this machine, in sentences.

    `shard_s`: seconds of a shard's passes, with what it costs beside them. `replicas`: those of the largest group.
    `cores`: those of this machine, in those that a worker uses.
    """
    mode = own_recompute(job)
    passes = LayerPasses(PerRow(shard_s / job.parallel.microbatches, 0.0), PerRow(0.0, 0.0))
    layer = LayerProfile("model", state, {"none": passes, mode: passes}, PerRow(0.0, 0.0))
    profile = ModelProfile(layers=(layer,), layered=True, link=link, step_s=STEP_S, on_one=1 << 20, cores=cores)
    costs = CostModel(job, profile)

    def time(count: int) -> StepTime:
        settings = FreeSettings(job.parallel.sharded, mode, job.offload, job.parallel.schedule)
        found = costs.of(Choice(Shape(count), settings), float("inf"))
        assert not isinstance(found, Misfit)
        return found.time

    alone, most = time(1), time(replicas)
    first = f"expected, if all workers are on this machine: {_rate(alone)} with 1 worker"
    if replicas == 1:
        return (first,)
    first += f", {_rate(most)} with {replicas}"
    gain = alone.total / most.total
    if gain >= PAYS:
        return (first,)
    few = next((count for count in range(2, replicas) if alone.total / time(count).total >= PAYS), 0)
    beside = most.sums + most.rest
    why = f"their sums and the rest of a step take {1000 * beside:.1f} of {1000 * most.total:.1f} ms"
    if replicas > cores and beside < most.compute:
        why = f"{replicas} share {cores:g} core{'s' * (cores != 1)}"
    best = f"; {few} would" if few else "; one is as fast here"
    return first, f"warning: {replicas} workers do not pay on this machine: {why}{best}"


def _rate(time: StepTime) -> str:
    return f"{1 / time.total:,.2g} steps/s" if time.total > 0.1 else f"{1 / time.total:,.0f} steps/s"
