"""Define the group's state machine as a table: (phase, event) -> action and possible next phases. Pure.

`step(group, event)` looks up the rule and returns the new group and the commands for the shell. Every event has a rule
in every phase, even if it comes late, twice or out of order. Messages of another generation and of unknown workers
change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import (
    Group,
    Limits,
    NewestState,
    Phase,
    WorkerStatus,
    free,
    holds,
    members_in,
    newest_state,
    preparing,
    recallable,
    rescaled,
    shape_for,
    suspects,
    unfinished,
    wants_change,
    with_worker,
    without,
)
from raytrain_plus.membership.mesh import Shape, Stage, stages_of
from raytrain_plus.membership.owners import Owners, balanced, kept, segments
from raytrain_plus.membership.pieces import Pieces, union
from raytrain_plus.membership.placement import placed
from raytrain_plus.membership.sizes import FRUITLESS, STARVED_STEPS, backoff_s
from raytrain_plus.membership.view import form_view

Outcome = tuple[Group, list[e.Command]]

_TOO_LONG = " took too long"
_AGAIN = "again: "
"""How the fault of memory that ran out a second time begins."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An action, and the phases that can follow it."""

    act: Callable[[Group, Any], Outcome]
    leads: tuple[Phase, ...]


def begin(limits: Limits, durable: int = -1) -> Outcome:
    """Return a group that requests its first workers and resumes from the checkpoint of step `durable`, if any."""
    return _staff(Group(limits=limits, committed=durable, durable=durable))


def step(group: Group, event: e.Event) -> Outcome:
    """Return the group after `event`, and the commands to carry out, in order."""
    generation = getattr(event, "generation", group.generation)
    worker = getattr(event, "worker", None)
    if generation != group.generation or (worker is not None and worker not in group.workers):
        return group, []
    return TABLE[group.phase, type(event)].act(group, event)


# Actions


def _staff(group: Group) -> Outcome:
    """Request the workers that the group lacks."""
    limits = group.limits
    staying = sum(not worker.leaving for worker in group.workers.values())
    missing = limits.sizes.useful + limits.spares - staying
    if missing <= 0:
        return group, []
    names = tuple(f"worker-{group.named + index}" for index in range(missing))
    workers = {**group.workers, **{name: WorkerStatus("coming") for name in names}}
    return replace(group, workers=workers, named=group.named + missing), [
        e.Start(names, backoff_s(max(group.fruitless, group.stillborn))),
    ]


def _settle(group: Group) -> Outcome:
    """Decide what follows once nobody is inside: close, form the next view, or wait for workers."""
    if members_in(group):
        return group, []
    if late := unfinished(group):
        return _finish(group, late)
    best = newest_state(group)
    if group.failure:
        return _close(group)
    if group.stopping or _ended(group, best):
        return _close(group)
    if best is None or best.step < group.committed:
        return _go_back(group)
    if not _enough(group):
        group = _wanted_again(group)
    if not _enough(group):
        return _gather(group)
    return _join(group, best)


def _wanted_again(group: Group) -> Group:
    """Keep the workers that were to leave only because fewer were requested."""
    for name, worker in group.workers.items():
        if worker.unwanted:
            group = with_worker(group, name, leaving=False, unwanted=False)
    return group


def _ended(group: Group, best: NewestState | None) -> bool:
    # A worker that has a copy of a stage, and is the only one, first loads it as a member.
    return group.finished and best is not None and best.step == group.ended_at and not best.copied


def _finish(group: Group, late: tuple[str, ...]) -> Outcome:
    """Make workers apply the step that others have applied: they are inside again until they have done so."""
    step = group.workers[late[0]].ready
    assert step is not None
    for name in late:
        group = with_worker(group, name, state="in")
    return replace(group, phase=Phase.LEAVE), [e.Finish(late, step, group.generation)]


def _go_back(group: Group) -> Outcome:
    """Fall back to the newest available state: nobody alive holds the one after the last committed step."""
    made = max(group.committed, group.again)
    group = replace(group, committed=group.durable, finished=False)
    best = newest_state(group)
    if best is not None and best.step >= group.committed:
        # Copies are older by a few steps, and of the same history: nothing of it is undone.
        return _settle(replace(group, committed=best.step, again=made if best.copied else -1))
    # What is read is divided evenly.
    group = _forget(replace(group, again=-1, broken=False), group.committed)
    group, read = _restore(group)
    group, gathered = _gather(group)
    return group, [*read, *gathered]


def _forget(group: Group, step: int) -> Group:
    """Discard what idle workers hold of later steps: recomputed, these may differ in their last bits."""
    for name, worker in group.workers.items():
        copies = frozenset(copy for copy in worker.copies if copy[0] <= step)
        if copies != worker.copies:
            group = with_worker(group, name, copies=copies)
        if worker.state == "idle" and worker.holds is not None and worker.holds > step:
            group = with_worker(group, name, holds=None, stage=None)
    return group


def _restore(group: Group) -> Outcome:
    """Have every stage read from the newest checkpoint that is neither held nor being read."""
    commands: list[e.Command] = []
    stages = _read_stages(group) if group.durable >= 0 else []
    for stage in stages:
        group, reads = _read_stage(group, stage, stages)
        commands += reads
    # Once each stage has a reader, others can read what is left of the rows.
    for stage in stages if group.limits.rows else ():
        group, reads = _read_rows(group, stage, stages)
        commands += reads
    return group, commands


def _read_stages(group: Group) -> list[Stage]:
    """Return the stages in which a checkpoint is read: those of the group that the workers can form."""
    busy = sum(worker.state == "restoring" and not worker.leaving for worker in group.workers.values())
    shape = shape_for(group, len(free(group)) + busy)
    return stages_of(*(group.limits.sizes.layouts[0] if shape is None else shape.layout))


def _read_stage(group: Group, stage: Stage, stages: Sequence[Stage]) -> Outcome:
    """Have one of the `stages` read by a worker unless one has it; of a sharded state, a share of its rows."""
    able = _able_to_read(group, stages)
    if _readers(group, stage) or not able:
        return group, []
    owned = _share(group, stage, group.limits.rows_of(stage), stages) if group.limits.rows else None
    return _read(group, able[0], stage, owned)


def _read_rows(group: Group, stage: Stage, stages: Sequence[Stage]) -> Outcome:
    """Have the rows of one of the `stages` read, each by one of as many workers as are needed."""
    limits, workers, commands = group.limits, group.workers, list[e.Command]()
    have = {name: limits.owned_rows(stage, workers[name].owned) for name in _readers(group, stage)}
    missing = limits.rows_of(stage) - union(have.values())
    able = _able_to_read(group, stages)
    # If one that read is lost, and no other comes, another reads more.
    again = [name for name in free(group) if workers[name].state == "idle" and name in have and name not in able]
    while missing and (able or again):
        part = _share(group, stage, missing, stages) if able else missing
        name = able.pop(0) if able else again.pop(0)
        group, reads = _read(group, name, stage, union([part, have.get(name, Pieces())]))
        commands += reads
        missing -= part
    return group, commands


def _share(group: Group, stage: Stage, missing: Pieces, stages: Sequence[Stage]) -> Pieces:
    """Return what one reader reads of a stage's missing rows, if there are as many as replicas at least."""
    limits = group.limits
    total = limits.rows_of(stage).size(limits.row_bytes)
    shares = round(missing.size(limits.row_bytes) * limits.sizes.fewest / len(stages) / max(1, total))
    return segments(missing, limits.row_bytes, max(1, shares))[0]


def _read(group: Group, name: str, stage: Stage, owned: Pieces | None) -> Outcome:
    group = with_worker(group, name, state="restoring", holds=None, stage=stage, owned=owned)
    return group, [e.Restore(name, group.durable, stage, owned)]


def _readers(group: Group, stage: Stage) -> list[str]:
    """Return the workers that read this stage of the newest checkpoint, or have it."""
    return [
        name
        for name, worker in group.workers.items()
        if worker.stage == stage
        and (worker.state == "restoring" or (worker.state == "idle" and worker.holds == group.durable))
    ]


def _able_to_read(group: Group, stages: Sequence[Stage]) -> list[str]:
    """Return the idle workers that are to keep nothing that they have of the newest checkpoint in these `stages`.

    Those of another partition may read: else nobody might be left to read what is missing. So may those that have some
    rows of a stage, as far as the workers are needed to read the other stages.
    """
    limits, workers, kept, holds_some = group.limits, group.workers, set[str](), set[str]()
    idle = [name for name in free(group) if workers[name].state == "idle"]
    reading = [name for name, worker in workers.items() if worker.state == "restoring"]
    most = max(1, len({*idle, *reading}) // len(stages))
    for stage in stages:
        left, count = limits.pieces(stage), 0
        held = {name: limits.owned_rows(stage, workers[name].owned) for name in _readers(group, stage)}
        sizes = {name: rows.size(limits.row_bytes) for name, rows in held.items()}
        holds_some |= held.keys()
        for name in sorted(sizes, key=lambda name: (workers[name].state == "idle", -sizes[name])):
            has = limits.held(stage, workers[name].owned) & left
            if has and count < most:
                kept.add(name)
                left, count = left - has, count + 1
    return sorted((name for name in idle if name not in kept), key=holds_some.__contains__)


def _gather(group: Group) -> Outcome:
    # Workers lost while others trained say nothing about those that start now.
    stillborn = group.stillborn if group.phase is Phase.GATHER else 0
    group, started = _staff(replace(group, phase=Phase.GATHER, stillborn=stillborn))
    group, kept = _keep(group)
    return group, [*started, *kept, _wait(group)]


def _keep(group: Group) -> Outcome:
    """Request a checkpoint of the newest state if all holders of one of its stages will leave with their nodes."""
    best = newest_state(group)
    if best is None or best.copied or not any(group.workers[name].leaving for name, _ in best.donors):
        return group, []
    if best.step < group.committed or best.step <= max(group.durable, group.kept):
        return group, []
    return replace(group, kept=best.step), [e.Keep(best.step)]


def _enough(group: Group, wait_for_preparing: bool = True) -> bool:
    """Return whether enough workers are ready for the next view.

    `wait_for_preparing`: whether the first view also waits for workers that are preparing or expected.
    """
    count = len(free(group))
    if count < group.limits.sizes.fewest or shape_for(group, count) is None:
        return False
    # A group that has trained continues with the ready workers; those still preparing join later and stop nobody.
    if not wait_for_preparing or group.generation >= 0:
        return True
    return not preparing(group) and count >= group.limits.expected


def _join(group: Group, best: NewestState) -> Outcome:
    limits = group.limits
    group = _forget(group, best.step)
    able = free(group)
    shape = shape_for(group, len(able))
    assert shape is not None, "there are enough"
    holding = {
        name: stage.index
        for name in able
        if (stage := group.workers[name].stage) and stage.layout == shape.layout and holds(group, name) == best.step
    }
    nodes = {name: group.workers[name].node for name in able}
    seats = placed(group.seats, group.shape, able, shape, holding, nodes)
    owners = _owners(group, seats, shape, best.step)
    lacks: dict[str, e.Lacks] = {}
    # Sums of a step that was not applied belong to this generation alone.
    workers = {name: replace(worker, ready=None) for name, worker in group.workers.items()}
    for place, name in enumerate(seats):
        worker, stage = workers[name], shape.stage(place)
        if best.step < 0:
            if worker.holds != -1 or worker.stage not in (None, stage):
                lacks[name] = "initial"
        elif (worker.holds, worker.stage) != (best.step, stage):
            lacks[name] = "stage" if worker.holds == best.step else "newer"
        elif owners and worker.owned != owners[name]:
            lacks[name] = "rows"
        workers[name] = replace(worker, state="in", joined=False)
    generation = group.generation + 1
    givers = (*seats, *(name for name, _ in best.donors))
    stale = bool(owners) and best.step >= 0 and not all(workers[one].complete for one in givers)
    incomplete = stale or (bool(owners) and best.step >= 0 and bool(lacks))
    group = replace(
        group,
        owners=owners,
        phase=Phase.JOIN,
        generation=generation,
        shape=shape,
        seats=seats,
        workers=workers,
        recalled=False,
        committed=max(group.committed, best.step),
        # If steps are recomputed in the same history, nothing of them is undone.
        durable=group.durable if best.step < group.again else min(group.durable, best.step),
    )
    view = form_view(generation, seats, shape, limits.sizes.shards)
    join = e.Join(
        view,
        best.step + 1,
        best.donors,
        lacks,
        again=best.step < group.again,
        owners=owners,
        incomplete=incomplete,
        stale=stale,
    )
    return group, [join]


def _owners(group: Group, seats: Sequence[str], shape: Shape, step: int) -> Owners:
    """Return the rows whose optimizer's state each member is to hold; empty if that is not sharded.

    The members that hold the same stage share its rows. After a failure they keep what they have, so that nothing moves
    while the training stands still.
    """
    limits, workers = group.limits, group.workers
    if not limits.rows:
        return {}
    held = {
        name: limits.owned_rows(worker.stage, worker.owned)
        for name in seats
        if step >= 0 and (worker := workers[name]).holds == step and worker.stage is not None
    }
    nodes = {name: workers[name].node for name in seats}
    found: dict[str, Pieces] = {}
    for ring in shape.lines("replica"):
        rows, names = limits.rows_of(shape.stage(ring[0])), [seats[seat] for seat in ring]
        if group.broken and step >= 0:
            found |= kept(rows, limits.row_bytes, names, held)
        else:
            found |= balanced(rows, limits.row_bytes, names, limits.holders, nodes, held, by_layer=limits.by_layer)
    return {name: found[name] for name in seats}


def _close(group: Group) -> Outcome:
    best = newest_state(group)
    if group.generation < 0 or (group.committed < 0 and (best is None or best.step < 0)):
        return _end(group)
    if best is None or best.step < group.committed:
        if not (group.stopping or group.failure):
            return _go_back(group)
        if best is None or not best.copied or best.step < group.durable:
            return _end(group, _all_lost(group))
        group = replace(group, committed=best.step)
    if best.copied and not group.recalled and (able := recallable(group, best)):
        return _recall(group, best.step, able)
    # A run that is stopped may end with an earlier state than the one that some member has finished with.
    finished = group.finished and best.step == group.ended_at
    return replace(group, phase=Phase.CLOSE, leads=best.donors, finished=finished), [e.HandOver(best.donors, best.step)]


def _recall(group: Group, step: int, able: tuple[str, ...]) -> Outcome:
    """Have copies loaded so that the state can be kept: these workers are inside again until they have done so."""
    for name in able:
        group = with_worker(group, name, state="in", holds=None, ready=None)
    return replace(group, phase=Phase.LEAVE, recalled=True), [e.Recall(able, step, group.generation)]


def _all_lost(group: Group) -> str:
    of = "the state" if group.shape.layout == (1, 1) else "a part of the state"
    return f"every worker that held {of} after step {group.committed} was lost"


def _end(group: Group, unsaved: str = "") -> Outcome:
    """End the run; `unsaved` says why the model could not be exported, if it could not."""
    status: Literal["finished", "stopped", "failed"] = "stopped"
    if group.failure or (unsaved and not group.stopping):
        status = "failed"
    elif group.finished and not unsaved:
        status = "finished"
    return replace(group, phase=Phase.END), [e.End(status, group.failure or unsaved)]


def _break(group: Group) -> Outcome:
    """Leave the broken world: what follows is decided once all members are out."""
    same = group.fruitless_at == group.committed
    for name in suspects(group):
        group = with_worker(group, name, leaving=True)
    group = replace(
        group,
        failures=group.failures + 1,
        fruitless=group.fruitless + 1 if same else 1,
        fruitless_at=group.committed,
        unformed=group.unformed + (group.phase is Phase.JOIN),
        broken=bool(group.limits.rows),
        phase=Phase.LEAVE,
    )
    limit = group.limits.max_failures
    if group.stopping or group.failure:
        # The run ends anyway.
        limit = None
    elif limit is not None and group.failures > limit:
        group = replace(group, failure=f"more failures than elastic.max_failures = {limit}{_last(group)}")
    elif group.fruitless > FRUITLESS:
        group = replace(group, failure=f"{FRUITLESS} failures in a row with no step between them{_last(group)}")
    inside = members_in(group)
    if inside:
        return group, [e.Interrupt(inside, group.generation)]
    return _settle(group)


def _last(group: Group) -> str:
    return f"; the last one: {group.cause}" if group.cause else ""


def _run(group: Group) -> Outcome:
    """Start training in the formed world, and do what was deferred until now."""
    group = replace(group, phase=Phase.TRAIN, unformed=0, broken=False)
    for name in members_in(group):
        group = with_worker(group, name, proved=True)
    commands: list[e.Command] = [e.Formed()]
    for name, worker in list(group.workers.items()):
        # A worker that is already back from the last step may be the only one that holds its stage.
        if worker.state != "idle" or name in group.seats:
            continue
        if worker.leaving:
            group = without(group, name)
            commands.append(e.Dismiss(name))
        elif worker.holds == -1:
            group = with_worker(group, name, state="warming_up", holds=None)
            commands.append(e.WarmUp(name))
    group, started = _staff(group)
    group, paused = _review(group)
    return group, [*commands, *started, *paused]


def _review(group: Group) -> Outcome:
    """Pause a training group that should stop or change."""
    if not members_in(group):
        return _settle(group)
    if not _enough(group, wait_for_preparing=False):
        group = _wanted_again(group)
    if group.stopping or wants_change(group):
        return replace(group, phase=Phase.PAUSE), [e.Pause(group.generation)]
    return group, []


def _wait(group: Group) -> e.Wait:
    return e.Wait(len(free(group)), group.limits.sizes.fewest)


# Rules


def _nothing(group: Group, event: Any) -> Outcome:
    return group, []


def _up(group: Group, event: e.Up) -> Outcome:
    if group.workers[event.worker].state != "coming":
        return group, []
    return with_worker(group, event.worker, state="up", node=event.node), []


def _ready(group: Group, event: e.Ready) -> Outcome:
    state = group.workers[event.worker].state
    # A worker in a warm-up step, or reading a checkpoint, has lost the initial state: this report is outdated.
    late = (state == "warming_up" and event.holds is not None) or (state == "restoring" and event.holds == -1)
    if state not in ("coming", "up", "warming_up", "restoring") or late:
        return group, []
    # A worker that starts while others train has yet to prove, by a warm-up step, that it can make a step.
    proved = state == "warming_up" or group.generation < 0
    group = replace(group, stillborn=0 if proved else group.stillborn)
    # State read from a checkpoint that turned out to be unusable does not count.
    void = state == "restoring" and group.workers[event.worker].stage is None
    holds, stage = (None, None) if void else (event.holds, event.stage)
    # Of masters a reader has its own rows only, so its model lacks the weights of the others.
    complete = event.stage is None or event.owned in (None, group.limits.rows_of(event.stage))
    status = {"state": "idle", "holds": holds, "stage": stage, "owned": event.owned, "complete": complete}
    return with_worker(group, event.worker, **status), []


def _ready_gather(group: Group, event: e.Ready) -> Outcome:
    return _settle(_ready(group, event)[0])


def _ready_train(group: Group, event: e.Ready) -> Outcome:
    group = _ready(group, event)[0]
    worker = group.workers[event.worker]
    if worker.state == "idle" and worker.leaving:
        return without(group, event.worker), [e.Dismiss(event.worker)]
    if worker.state == "idle" and worker.holds == -1:
        return with_worker(group, event.worker, state="warming_up", holds=None), [e.WarmUp(event.worker)]
    return _review(group)


def _overwritten(group: Group, event: e.Overwritten) -> Outcome:
    # A state read without a stage does not count: see `_ready`.
    return with_worker(group, event.worker, state="restoring", holds=None, stage=None, owned=None), []


def _joined(group: Group, event: e.Joined) -> Outcome:
    if group.workers[event.worker].state != "in":
        return group, []
    group = with_worker(group, event.worker, joined=True)
    if all(group.workers[name].joined for name in members_in(group)):
        return _run(group)
    return group, []


def _committed(group: Group, event: e.Committed) -> Outcome:
    return replace(group, committed=max(group.committed, event.step)), []


def _saved(group: Group, event: e.Saved) -> Outcome:
    return replace(group, durable=max(group.durable, event.step)), []


def _saved_gather(group: Group, event: e.Saved) -> Outcome:
    group = _saved(group, event)[0]
    if event.step <= group.committed:
        return group, []
    # It was made before the group went back. Its step was committed, and is not made again.
    return _settle(replace(group, committed=event.step))


def _copied(group: Group, event: e.Copied) -> Outcome:
    for name in group.workers:
        copies = frozenset((event.step, stage) for stage in event.copies.get(name, ()))
        group = with_worker(group, name, copies=copies)
    return group, []


def _fitted(group: Group, event: e.Fitted) -> Outcome:
    limits = group.limits
    sizes = replace(limits.sizes, stage_counts=event.stage_counts, unfit=event.unfit)
    limits = replace(limits, sizes=sizes, parts=event.parts, rows=event.rows, row_bytes=event.row_bytes)
    return replace(group, limits=limits), []


def _copy_missing(group: Group, event: e.CopyMissing) -> Outcome:
    return with_worker(group, event.worker, copies=frozenset()), []


def _unreadable(group: Group, event: e.Unreadable) -> Outcome:
    if group.workers[event.worker].state != "restoring":
        return group, []
    group = replace(group, durable=event.durable)
    for name, worker in group.workers.items():
        if worker.state == "restoring":
            group = with_worker(group, name, stage=None)
    return with_worker(group, event.worker, state="idle", holds=None, stage=None), []


def _unreadable_gather(group: Group, event: e.Unreadable) -> Outcome:
    if group.workers[event.worker].state != "restoring":
        return group, []
    return _settle(replace(_unreadable(group, event)[0], committed=event.durable))


def _committed_join(group: Group, event: e.Committed) -> Outcome:
    if event.step <= group.committed:
        return group, []
    # A step of this generation exists, so all have joined, though not all reports of that have arrived.
    return _run(_committed(group, event)[0])


def _out(group: Group, event: e.Left) -> Group:
    held = {
        "holds": event.holds,
        "stage": event.stage,
        "ready": event.ready,
        "owned": event.owned,
        "complete": event.complete,
    }
    copies = group.workers[event.worker].copies
    if event.copy is not None and event.stage is not None:
        # Its own copy counts as long as it lives, though a buddy may not have it yet.
        copies |= {(event.copy, event.stage)}
    group = with_worker(group, event.worker, state="idle", joined=False, copies=copies, **held)
    if event.why == "finished" and event.holds is not None:
        group = replace(group, finished=True, ended_at=event.holds)
    if event.why != "failed":
        return group
    group = replace(group, cause=event.fault)
    if event.final:
        return replace(group, failure=group.failure or event.fault)
    after = group.committed if event.holds is None else event.holds
    if event.exhausted and _is_alone(group, after, event.fault):
        return _fault(with_worker(group, event.worker, leaving=True), after, _AGAIN + event.fault)
    return _fault(group, after, event.fault)


def _is_alone(group: Group, held: int, fault: str) -> bool:
    """Return whether memory has run out a second time in that step, on one member alone that others can do without.

    Its process's memory may be in pieces, or another process may have taken it. If it runs out again on another member,
    or a third time, the step needs too much. The others must not need more than before, or wait for the place that it
    keeps until they have its state.
    """
    limits, staying = group.limits, sum(not worker.leaving for worker in group.workers.values()) - 1
    smaller = shape_for(group, staying) if staying >= limits.sizes.fewest else None
    alike = smaller is not None and smaller.layout == group.shape.layout and not limits.rows
    others = any((at, what) == (held + 1, _AGAIN + fault) for at, what, _ in group.faults)
    return alike and _recurs(group, held, fault) and not others


def _fault(group: Group, held: int, fault: str) -> Group:
    """Record a fault at the step after `held`; the same fault there in an earlier generation ends the run."""
    if _recurs(group, held, fault) and not group.failure:
        return replace(group, failure=fault)
    return replace(group, faults=(*group.faults, (held + 1, fault, group.generation)))


def _recurs(group: Group, held: int, fault: str) -> bool:
    """Return whether this fault came at the step after `held` in an earlier generation."""
    return any((at, what) == (held + 1, fault) and before < group.generation for at, what, before in group.faults)


def _left(group: Group, event: e.Left) -> Outcome:
    if group.workers[event.worker].state != "in":
        return group, []
    group = _out(group, event)
    if event.why in ("failed", "interrupted"):
        # Later interruptions of other members follow from this one, unless a worker was lost.
        return _break(replace(group, cause=event.fault or group.cause))
    return _settle(group)


def _left_leave(group: Group, event: e.Left) -> Outcome:
    worker = group.workers[event.worker]
    # A worker that finishes a step has said before that it could.
    if worker.state != "in" or (worker.ready is not None and event.ready is not None):
        return group, []
    group = _out(group, event)
    if event.fault and group.cause.endswith(_TOO_LONG):
        # This may be why.
        group = replace(group, cause=event.fault)
    return _settle(group)


def _gone(group: Group, event: e.Lost) -> Group:
    born = group.workers[event.worker].state in ("idle", "in")
    if event.starved and event.worker in group.seats:
        group = _starved(group)
    if event.fault and event.worker in group.seats:
        group = _fault(group, group.committed, event.fault)
    return replace(without(group, event.worker), stillborn=group.stillborn + (not born), cause=event.cause)


def _starved(group: Group) -> Group:
    """Record that memory ran out; twice with as many members, within `STARVED_STEPS`, ends the run."""
    members = len(group.seats)
    recent = [one for one in group.starved if group.committed - one[2] < STARVED_STEPS]
    if any(count == members and before < group.generation for count, before, _ in recent) and not group.failure:
        failure = (
            f"memory ran out twice with {members} {'worker' if members == 1 else 'workers'}: use more "
            "parallel.microbatches or data.shards, a smaller data.batch_size, or machines with more memory"
        )
        return replace(group, failure=failure)
    return replace(group, starved=(*recent, (members, group.generation, group.committed)))


def _lost_gather(group: Group, event: e.Lost) -> Outcome:
    group = _gone(group, event)
    if group.stillborn > FRUITLESS:
        failure = f"{FRUITLESS} workers in a row were lost while starting{_last(group)}"
        return _close(replace(group, failure=failure))
    group, started = _staff(group)
    group, settled = _settle(group)
    return group, [*started, *settled]


def _lost_inside(group: Group, event: e.Lost) -> Outcome:
    inside = group.workers[event.worker].state == "in"
    group = _gone(group, event)
    if inside:
        return _break(group)
    if group.phase is not Phase.TRAIN:
        return group, []
    group, started = _staff(group)
    # Others may have waited for it, to join together.
    group, paused = _review(group)
    return group, [*started, *paused]


def _lost_leave(group: Group, event: e.Lost) -> Outcome:
    return _settle(_gone(group, event))


def _lost_close(group: Group, event: e.Lost) -> Outcome:
    group = without(group, event.worker)
    if event.worker not in dict(group.leads):
        return group, []
    return _settle(replace(group, finished=_ended(group, newest_state(group))))


def _notice(group: Group, event: e.Notice) -> Outcome:
    return with_worker(group, event.worker, leaving=True, unwanted=False), []


def _notice_gather(group: Group, event: e.Notice) -> Outcome:
    group, started = _staff(_notice(group, event)[0])
    group, settled = _settle(group)
    return group, [*started, *settled]


def _notice_train(group: Group, event: e.Notice) -> Outcome:
    group = _notice(group, event)[0]
    # A worker that came back from the last step before the others did may be the only one that holds its stage.
    if group.workers[event.worker].state == "idle" and event.worker not in group.seats:
        group = without(group, event.worker)
        group, started = _staff(group)
        return group, [e.Dismiss(event.worker), *started]
    group, started = _staff(group)
    group, paused = _review(group)
    return group, [*started, *paused]


def _rescale(group: Group, event: e.Rescale) -> Outcome:
    """Release surplus workers as if their nodes were leaving; those that hold no state go at once."""
    group = _wanted_again(_rescale_close(group, event)[0])
    limits = group.limits
    staying = [name for name in reversed(tuple(group.workers)) if not group.workers[name].leaving]
    order = {name: place for place, name in enumerate(group.seats)}
    held = ("idle", "restoring", "in")
    # First those that have not started, the last ones first; then those without a seat; then the last seats.
    ranked = sorted(staying, key=lambda name: (group.workers[name].state in held, -order.get(name, len(order))))
    commands: list[e.Command] = []
    for name in ranked[: max(0, len(staying) - limits.sizes.useful - limits.spares)]:
        state = group.workers[name].state
        if state not in held or (group.phase is Phase.TRAIN and state == "idle" and name not in group.seats):
            group = without(group, name)
            commands.append(e.Dismiss(name))
        else:
            group = with_worker(group, name, leaving=True, unwanted=True)
    return group, commands


def _rescale_close(group: Group, event: e.Rescale) -> Outcome:
    """Change the limits only: nobody leaves any more, unless the group trains again."""
    return rescaled(group, event.minimum, event.maximum, event.spares), []


def _rescale_gather(group: Group, event: e.Rescale) -> Outcome:
    group, dismissed = _rescale(group, event)
    group, started = _staff(group)
    group, settled = _settle(group)
    return group, [*dismissed, *started, *settled]


def _rescale_train(group: Group, event: e.Rescale) -> Outcome:
    group, dismissed = _rescale(group, event)
    group, started = _staff(group)
    group, paused = _review(group)
    return group, [*dismissed, *started, *paused]


def _stop(group: Group, event: e.Stop) -> Outcome:
    return replace(group, stopping=True), []


def _stop_gather(group: Group, event: e.Stop) -> Outcome:
    return _settle(replace(group, stopping=True))


def _stop_train(group: Group, event: e.Stop) -> Outcome:
    return _review(replace(group, stopping=True))


def _late_train(group: Group, event: e.Late) -> Outcome:
    if not any(group.workers[name].leaving for name in members_in(group)):
        return group, []
    # Too few stay: better to stop with the state safe than to be cut off within a step.
    return replace(group, phase=Phase.PAUSE), [e.Pause(group.generation)]


def _late_gather(group: Group, event: e.Late) -> Outcome:
    best = newest_state(group)
    if _enough(group, wait_for_preparing=False) and best is not None and best.step >= group.committed:
        return _join(group, best)
    for name, worker in group.workers.items():
        if worker.state == "restoring":
            group, commands = _lost_gather(group, e.Lost(name, f"{name} did not read the checkpoint in time"))
            return group, [e.Dismiss(name), *commands]
    fewest = group.limits.sizes.fewest
    needed = f"{fewest} worker{'s' * (fewest != 1)}"
    fix = f"\n  fix: {event.remedy}" if event.remedy else ""
    why = f"only {len(free(group))} of at least {needed} were available {event.awaited}{_last(group)}{fix}"
    return _close(replace(group, failure=why))


def _late(group: Group, event: e.Late) -> Outcome:
    return _break(replace(group, cause=f"{group.phase.value}{_TOO_LONG}"))


def _stuck(group: Group, event: e.Stuck) -> Outcome:
    what = f"all workers waited for one another in step {group.committed + 1}, twice: the collective makes no progress"
    return _break(replace(_fault(group, group.committed, what), cause="all workers waited for one another"))


def _late_leave(group: Group, event: e.Late) -> Outcome:
    stuck = members_in(group)
    for name in stuck:
        group = without(group, name)
    group, settled = _settle(group)
    return group, [*(e.Dismiss(name) for name in stuck), *settled]


def _late_close(group: Group, event: e.Late) -> Outcome:
    return _end(group, f"{' and '.join(dict(group.leads))} did not export the model in time")


def _handed(group: Group, event: e.Handed) -> Outcome:
    return _end(group)


_G, _J, _T, _P, _L, _C, _E = Phase

TABLE: Mapping[tuple[Phase, type[e.Event]], Rule] = {
    (_G, e.Up): Rule(_up, (_G,)),
    (_G, e.Ready): Rule(_ready_gather, (_G, _J)),
    (_G, e.Joined): Rule(_nothing, (_G,)),
    (_G, e.Committed): Rule(_nothing, (_G,)),
    (_G, e.Left): Rule(_nothing, (_G,)),
    (_G, e.Lost): Rule(_lost_gather, (_G, _J, _L, _C, _E)),
    (_G, e.Notice): Rule(_notice_gather, (_G, _J, _C, _E)),
    (_G, e.Rescale): Rule(_rescale_gather, (_G, _J, _C, _E)),
    (_G, e.Stop): Rule(_stop_gather, (_L, _C, _E)),
    (_G, e.Late): Rule(_late_gather, (_G, _J, _L, _C, _E)),
    (_G, e.Stuck): Rule(_nothing, (_G,)),
    (_G, e.Handed): Rule(_nothing, (_G,)),
    (_G, e.Saved): Rule(_saved_gather, (_G,)),
    (_G, e.Unreadable): Rule(_unreadable_gather, (_G, _J)),
    (_J, e.Up): Rule(_up, (_J,)),
    (_J, e.Ready): Rule(_ready, (_J,)),
    (_J, e.Joined): Rule(_joined, (_J, _T, _P)),
    (_J, e.Committed): Rule(_committed_join, (_J, _T, _P)),
    (_J, e.Left): Rule(_left, (_J, _L, _G, _C, _E)),
    (_J, e.Lost): Rule(_lost_inside, (_J, _L, _G, _C, _E)),
    (_J, e.Notice): Rule(_notice, (_J,)),
    (_J, e.Stop): Rule(_stop, (_J,)),
    (_J, e.Late): Rule(_late, (_L,)),
    (_J, e.Stuck): Rule(_nothing, (_J,)),
    (_J, e.Handed): Rule(_nothing, (_J,)),
    (_T, e.Up): Rule(_up, (_T,)),
    (_T, e.Ready): Rule(_ready_train, (_T, _P)),
    (_T, e.Joined): Rule(_nothing, (_T,)),
    (_T, e.Committed): Rule(_committed, (_T,)),
    (_T, e.Left): Rule(_left, (_T, _J, _L, _G, _C, _E)),
    (_T, e.Lost): Rule(_lost_inside, (_T, _J, _P, _L, _G, _C, _E)),
    (_T, e.Notice): Rule(_notice_train, (_T, _P)),
    (_T, e.Rescale): Rule(_rescale_train, (_T, _P)),
    (_T, e.Stop): Rule(_stop_train, (_P,)),
    (_T, e.Late): Rule(_late_train, (_T, _P)),
    (_T, e.Stuck): Rule(_stuck, (_L,)),
    (_T, e.Handed): Rule(_nothing, (_T,)),
    (_P, e.Up): Rule(_up, (_P,)),
    (_P, e.Ready): Rule(_ready, (_P,)),
    (_P, e.Joined): Rule(_nothing, (_P,)),
    (_P, e.Committed): Rule(_committed, (_P,)),
    (_P, e.Left): Rule(_left, (_P, _J, _L, _G, _C, _E)),
    (_P, e.Lost): Rule(_lost_inside, (_P, _J, _L, _G, _C, _E)),
    (_P, e.Notice): Rule(_notice, (_P,)),
    (_P, e.Stop): Rule(_stop, (_P,)),
    (_P, e.Late): Rule(_late, (_L,)),
    (_P, e.Stuck): Rule(_stuck, (_L,)),
    (_P, e.Handed): Rule(_nothing, (_P,)),
    (_L, e.Up): Rule(_up, (_L,)),
    (_L, e.Ready): Rule(_ready, (_L,)),
    (_L, e.Joined): Rule(_nothing, (_L,)),
    (_L, e.Committed): Rule(_committed, (_L,)),
    (_L, e.Left): Rule(_left_leave, (_L, _J, _G, _C, _E)),
    (_L, e.Lost): Rule(_lost_leave, (_L, _J, _G, _C, _E)),
    (_L, e.Notice): Rule(_notice, (_L,)),
    (_L, e.Stop): Rule(_stop, (_L,)),
    (_L, e.Late): Rule(_late_leave, (_L, _J, _G, _C, _E)),
    (_L, e.Stuck): Rule(_nothing, (_L,)),
    (_L, e.Handed): Rule(_nothing, (_L,)),
    (_C, e.Up): Rule(_up, (_C,)),
    (_C, e.Ready): Rule(_ready, (_C,)),
    (_C, e.Joined): Rule(_nothing, (_C,)),
    (_C, e.Committed): Rule(_committed, (_C,)),
    (_C, e.Left): Rule(_nothing, (_C,)),
    (_C, e.Lost): Rule(_lost_close, (_C, _J, _G, _E)),
    (_C, e.Notice): Rule(_notice, (_C,)),
    (_C, e.Stop): Rule(_stop, (_C,)),
    (_C, e.Late): Rule(_late_close, (_E,)),
    (_C, e.Stuck): Rule(_nothing, (_C,)),
    (_C, e.Handed): Rule(_handed, (_E,)),
    **{(phase, e.Rescale): Rule(_rescale, (phase,)) for phase in (_J, _P, _L)},
    (_C, e.Rescale): Rule(_rescale_close, (_C,)),
    **{(phase, e.Saved): Rule(_saved, (phase,)) for phase in (_J, _T, _P, _L, _C)},
    **{(phase, e.Copied): Rule(_copied, (phase,)) for phase in (_J, _T, _P, _L)},
    **{(phase, e.Copied): Rule(_nothing, (phase,)) for phase in (_G, _C)},
    **{(phase, e.CopyMissing): Rule(_copy_missing, (phase,)) for phase in (_G, _J, _T, _P, _L, _C)},
    (_C, e.Overwritten): Rule(_overwritten, (_C,)),
    **{(phase, e.Overwritten): Rule(_nothing, (phase,)) for phase in (_G, _J, _T, _P, _L)},
    (_G, e.Fitted): Rule(_fitted, (_G,)),
    **{(phase, e.Fitted): Rule(_nothing, (phase,)) for phase in (_J, _T, _P, _L, _C)},
    **{(phase, e.Unreadable): Rule(_unreadable, (phase,)) for phase in (_J, _T, _P, _L, _C)},
    **{(_E, kind): Rule(_nothing, (_E,)) for kind in get_args(e.Event)},
}
"""A rule for every pair of a phase and an event."""


def diagram() -> str:
    """Return the table as a Mermaid state diagram: which event can lead from which phase to which."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, kind), rule in TABLE.items():
        for after in rule.leads:
            if after is not phase:
                arrows.setdefault((phase, after), []).append(kind.__name__)
    lines = ["stateDiagram-v2", "    [*] --> GATHER"]
    lines += [f"    {before.name} --> {after.name}: {', '.join(names)}" for (before, after), names in arrows.items()]
    return "\n".join([*lines, "    END --> [*]"])
