"""Complete the record of a run whose workers have ended because no controller came back, from what they have left.

They stopped at one step boundary, and each wrote what the record may lack and its share of that state: see
`workers.states.leftover`. Afterwards the run resumes as any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from raytrain_plus.controller.checkpoints.checkpointing import manifest_of
from raytrain_plus.controller.event_loop import Host
from raytrain_plus.controller.opening import beginning_of, record_of
from raytrain_plus.controller.record.run_record import RunRecord
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.controller.succession import continued
from raytrain_plus.errors import CheckpointError, RunError, StepsLost, StorageError
from raytrain_plus.membership.group_state import Group, Limits
from raytrain_plus.membership.view import form_view
from raytrain_plus.runs.folder import LEFT, Fence
from raytrain_plus.runs.history import Past, load_history
from raytrain_plus.state.stored.checkpoint import commit, find_checkpoint_fault
from raytrain_plus.state.stored.manifest import manifest_bytes
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import outage_of
from raytrain_plus.workers.messages import Charter, Written
from raytrain_plus.workers.states.leftover import Leftover, leftovers

log = logging.getLogger(__name__)

Leftovers = Mapping[str, Leftover]
"""What workers have left, by their names."""


def completed(order: RunOrder, limits: Limits, host: Host, unix: Callable[[], float]) -> RunOrder:
    """Return the order to resume a run from all that its last workers have made; unchanged if they left nothing.

    `limits`: of the job; `unix`: returns Unix seconds. Raises `RunError` if the storage fails, or does not take it.
    """
    past = order.past
    if past is None or order.fresh:
        return order
    run = open_folder(order.plan.folder)
    try:
        if not run.files(LEFT):
            return order
        left, folder = usable(leftovers(run), past), Claimed(run)
        fence = Fence(run, past.claims, host.name)
        folder.hold(fence.claim)
        if left:
            try:
                _complete(folder, fence, order, past, left, limits, host, unix)
            except (OSError, RunError):
                raise
            except Exception as error:
                # Files that stayed would fail each later start, too.
                log.warning(
                    "the last state cannot be used, so the run resumes from its newest checkpoint: %s",
                    error,
                    exc_info=not isinstance(error, CheckpointError),
                )
        folder.remove(LEFT)
        return continued(order, load_history(run))
    except StorageError as failure:
        raise RunError(f"the run cannot resume in {run.where}: {outage_of(failure, run)}") from failure


def usable(left: Leftovers, past: Past) -> Leftovers:
    """Return what the members of the run's newest generation have left; nothing if the run has gone on without them."""
    newest = max((one.last.number for one in left.values()), default=-1)
    # Without its `view_formed`, nobody knows who made the steps of that generation. A checkpoint of workers that are in
    # no generation has a higher number.
    if past.formed != newest or any(number > newest for number, _ in past.resumptions):
        return {}
    return {name: one for name, one in left.items() if one.last.number == newest}


def shares_of(left: Leftovers) -> list[Written]:
    """Return the shares of the last state in the order of their writers; none unless all have written theirs."""
    shares = sorted((one.written for one in left.values() if one.written is not None), key=lambda told: told.writer)
    together = {(told.step, told.generation, told.writers) for told in shares}
    complete = len(together) == 1 and [told.writer for told in shares] == [*range(shares[0].writers)]
    return shares if complete else []


def _complete(
    folder: Claimed,
    fence: Fence,
    order: RunOrder,
    past: Past,
    left: Leftovers,
    limits: Limits,
    host: Host,
    unix: Callable[[], float],
) -> None:
    last = next(iter(left.values())).last
    group = Group(limits=limits, generation=last.generation, shape=last.shape, seats=last.seats, again=last.again)
    charter = Charter(group=group, number=last.number, first_step=last.first_step, partitions={})
    record = record_of(order, folder, unix)
    try:
        for one in left.values():
            record.reports.joined(one.location)
        records = {name: one.records for name, one in left.items()}
        try:
            record.adopt(fence, beginning_of(order, host), None, charter, records)
        except StepsLost as lost:
            # Nothing is written yet. The run resumes from its newest checkpoint.
            log.warning("what the workers have left does not complete the record: %s", lost)
            return
        record.journal.settle()
        _publish(folder, order, past, charter, record, shares_of(left), unix)
        record.journal.settle()
    finally:
        record.journal.close()


def _publish(
    run: Folder,
    order: RunOrder,
    past: Past,
    charter: Charter,
    record: RunRecord,
    shares: Sequence[Written],
    unix: Callable[[], float],
) -> None:
    """Make the shares of the last state a checkpoint, unless there is a complete one of it.

    Raises `CheckpointError` if they cannot be one.
    """
    if not shares or shares[0].step > record.committed:
        log.warning("the last state is not complete, so the run resumes from its newest checkpoint")
        return
    group = charter.group
    if any(one.step == shares[0].step and one.manifest is not None for one in past.found):
        return
    view = form_view(group.generation, group.seats, group.shape, group.limits.sizes.shards)
    manifest = manifest_of(order, record, view.members, shares)
    manifest_bytes(manifest)
    if fault := find_checkpoint_fault(run, manifest):
        raise CheckpointError(fault)
    commit(run, manifest)
    record.saved(manifest.step, unix() - manifest.time, manifest.stall_s, manifest.name)
