"""Open a run's folder: claim it, and write what a run begins with."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from raytrain_plus.controller.event_loop import Host
from raytrain_plus.controller.record.journal import Beginning
from raytrain_plus.controller.record.listeners import Listeners
from raytrain_plus.controller.record.run_record import RunRecord
from raytrain_plus.controller.run import Run
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.controller.succession import Succession
from raytrain_plus.data.sources.source import READING
from raytrain_plus.errors import RunError, StorageError
from raytrain_plus.observe.trackers.listened import CalledTask, Listened
from raytrain_plus.runs.folder import LEFT, TASK, claim
from raytrain_plus.runs.history import Past
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
    try:
        fence = claim(
            run, fresh=order.fresh, claims=None if order.past is None else order.past.claims, controller=host.name
        )
        run.hold(fence.claim)
        beginning = beginning_of(order, host)
        record.open(fence, beginning, listeners(listened_of(order, run), host.node, host.actor))
        source = {"sha256": order.task_sha256, "modules": dict(order.task_modules)}
        run.write(TASK, [json.dumps(source, indent=1).encode() + b"\n"])
    except StorageError as failure:
        raise RunError(f"the run cannot start in {run.where}: {outage_of(failure, run)}") from failure


def continue_run(left: Succession, run: Run, listeners: Callable[[Listened, str, Any], Listeners]) -> None:
    """Go on with the record of a run that another controller has opened.

    `listeners`: see `open_run`. Raises `RunError` if the storage does not take it.
    """
    run.folder.hold(left.fence.claim)
    beginning = beginning_of(run.order, run.host)
    try:
        run.record.adopt(
            left.fence,
            beginning,
            listeners(listened_of(run.order, run.folder), run.host.node, run.host.actor),
            left.charter,
            {name: report.records for name, report in left.reports.items()},
        )
        adopted = [member for member in left.charter.group.seats if member in left.reports]
        run.record.journal.adopted(beginning.node, adopted)
        # Some may have left a state that is about to be an old one.
        run.folder.remove(LEFT)
    except StorageError as failure:
        raise RunError(f"the run cannot go on in {run.folder.where}: {outage_of(failure, run.folder)}") from failure


def record_of(order: RunOrder, run: Claimed, unix: Callable[[], float]) -> RunRecord:
    """Return the record of this run; `unix` returns Unix seconds."""
    plan = order.plan
    rows, epochs = plan.data.rows, plan.job.epochs
    end = None if epochs is None else (plan.steps, epochs * rows)
    return RunRecord(run, plan.job.data.batch_size, rows, end, order.past or Past(), unix)


def beginning_of(order: RunOrder, host: Host) -> Beginning:
    """Return what the run's folder says of its beginning."""
    dataset = {**order.plan.data.describe(), **({} if order.older else {READING: 2})}
    return Beginning(order.job_yaml, order.versions, dataset, host.cluster, host.name, host.node)


def listened_of(order: RunOrder, run: Claimed) -> Listened:
    """Return what the listeners of the run in this folder are to do."""
    plan = order.plan
    called = CalledTask(
        task=str(plan.job.task),
        pickled_task=plan.pickled_task,
        roots=plan.roots,
        args=plan.job.args,
        total_steps=plan.steps,
        batch_size=plan.job.data.batch_size,
        rows=plan.data.rows,
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
