"""Open a run's folder: claim it, and write what a run begins with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from raytrain_plus.controller.event_loop import Host
from raytrain_plus.controller.record.journal import Beginning
from raytrain_plus.controller.record.listeners import Listeners
from raytrain_plus.controller.record.run_record import RunRecord
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.data.sources.source import READING
from raytrain_plus.errors import RunError, StorageError
from raytrain_plus.job.task_loader import run_facts
from raytrain_plus.observe.trackers.listened import CalledTask, Listened
from raytrain_plus.runs.folder import TASK, claim
from raytrain_plus.state.stored.manifest import FOLDER as CHECKPOINTS
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.outage import outage_of


def open_run(
    order: RunOrder, run: Claimed, record: RunRecord, host: Host, listeners: Callable[[Listened, str, Any], Listeners]
) -> None:
    """Claim the run's folder and open it.

    `listeners` prepares those that hear of the run, on a node and for the controller's actor. Raises `RunError` if the
    storage does not take what a run begins with.
    """
    plan = order.plan
    try:
        fence = claim(run, fresh=order.fresh, claims=None if order.past is None else order.past.claims)
        run.hold(fence.claim)
        dataset = {**plan.data.describe(), **({} if order.older else {READING: 2})}
        beginning = Beginning(order.job_yaml, order.versions, dataset, host.cluster, host.name)
        record.open(fence, beginning, listeners(listened_of(order, run), host.node, host.actor))
        source = {"sha256": order.task_sha256, "modules": dict(order.task_modules)}
        run.write(TASK, [json.dumps(source, indent=1).encode() + b"\n"])
    except StorageError as failure:
        raise RunError(f"the run cannot start in {run.where}: {outage_of(failure, run)}") from failure


def listened_of(order: RunOrder, run: Claimed) -> Listened:
    """Return what the listeners of the run in this folder are to do."""
    plan = order.plan
    called = CalledTask(
        task=str(plan.job.task),
        pickled_task=plan.pickled_task,
        roots=plan.roots,
        args=plan.job.args,
        facts=run_facts(plan.job, plan.steps, plan.data.rows),
        checkpoints=run.inside(CHECKPOINTS).address,
    )
    return Listened(
        folder=run.address,
        claim=run.claim,
        job_yaml=order.job_yaml,
        trackers=plan.job.trackers,
        task=called if order.callbacks else None,
        roots=plan.roots,
        environment=order.environment,
    )
