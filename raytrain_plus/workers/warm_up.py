"""Make a worker's first step before it joins a group, so that it holds nobody up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.step.build import own_share, whole_steps
from raytrain_plus.workers.messages import WHOLE
from raytrain_plus.workers.preparation.prepared import Prepared

FIRST_STEP_S = 300.0
"""Maximum seconds of a first step and of an evaluation: they compile, open files, and have no earlier step as a
measure."""


def warm_up(prepared: Prepared, control: Control) -> None:
    """Make one step alone, and compile the evaluation if layers are compiled; no state is held afterwards."""
    if prepared.plan.job.parallel.by_layer:
        # It has measured the layers, which amounts to a step, and has no state that it could lose.
        return
    state = prepared.own.state
    control.set_limit(FIRST_STEP_S)
    control.enter("preparing")
    with prepared.feeds.batches((0,), 0, stream=False) as feed:
        batches = feed.get(0, FIRST_STEP_S)
        context = StepContext(world=SoloWorld(), control=Control(), wait_s=FIRST_STEP_S)
        own_share(prepared.plan.job, state)
        steps = whole_steps(state)
        steps.run(0, batches.shards, context)
    evaluation = prepared.feeds.evaluation(WHOLE.stage) if prepared.plan.job.compile else None
    if evaluation is not None:
        shards = prepared.plan.job.data.shards

        def first(shard: int) -> Iterator[Microbatch]:
            return itertools.islice(evaluation.batches(shard), 1)

        evaluate(state, steps.passes, first, (0,), context, shards=shards, step=-1)
    state.discard()
