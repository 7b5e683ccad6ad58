"""Try a task before a run: one real microbatch through everything that a step and an evaluation do.

A mistake becomes one sentence with the remedy (`mistakes`). Nothing that is made here is kept.
"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.first_rows import first_rows, microbatch_of
from raytrain_plus.data.reading.microbatches import Microbatch, microbatch_rows
from raytrain_plus.data.reading.transform_block import RowReader, without_ids
from raytrain_plus.data.reading.unusable import joined, usable
from raytrain_plus.device_copies import to_device
from raytrain_plus.errors import RaytrainError, TaskError, TrainingError
from raytrain_plus.generators import set_random_key
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import (
    out_of_memory,
    prints_hidden,
    reporting,
    trim_traceback,
    users_frames,
)
from raytrain_plus.parallel.per_row import PerRow
from raytrain_plus.parallel.pipeline.chunk import Chunk
from raytrain_plus.parallel.pipeline.message import classes_of
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.parallel.pipeline.transport import Tensors
from raytrain_plus.parallel.sizing import most_workers, share_of
from raytrain_plus.parallel.state_bytes import StateSize
from raytrain_plus.parallel.wire import gradient_dtype
from raytrain_plus.session.session_task import declared_in
from raytrain_plus.state.holding import MEAN_LOSS, NEW_RULES, NOTHING_ADDED
from raytrain_plus.state.named import dtype_name
from raytrain_plus.task import Task
from raytrain_plus.torch_compat import graph_breaks, has_backward_hooks
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.remarks import attributes_changed, scaled_hooks, stays_in_evaluation, woken
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.added_state import AddedState
from raytrain_plus.training.model.model import parameters_of, pass_names, train_as_built
from raytrain_plus.training.model.randomness import make_deterministic, random_key
from raytrain_plus.training.model.unshared import Unshared
from raytrain_plus.training.model.weights_check import check_files
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.passes.metric_sums import checked, numbers
from raytrain_plus.training.passes.task_loss import TaskLoss, held_out_metrics, task_loss
from raytrain_plus.training.step.build import build_state, initial_sums, own_share, slicing_of, task_of, whole_steps
from raytrain_plus.training.step.step import UNDEFINED, SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import check_hooks, hooked_parameters, inexact_parameter
from raytrain_plus.training.weights.optimizer import build_optimizer, check_own_parameters, takes_model
from raytrain_plus.training.weights.scheduler import build_scheduler
from raytrain_plus.training.weights.step_options import Technique, technique_of
from raytrain_plus.trial.fits import check_fits, check_layers_fit, fitting_state
from raytrain_plus.trial.footprint import measure_footprint
from raytrain_plus.trial.measure import Alone, alone_loss, backward, each_layer, forward, measure_layers
from raytrain_plus.trial.memory_limits import held_memory, total_memory
from raytrain_plus.trial.mistakes import NO_MEMORY, Described, advice_for, breaks_in_words, check_best
from raytrain_plus.trial.shard_cost import ShardCost, measure_shard_cost
from raytrain_plus.trial.slice_check import check_slices

SMALL, LARGE = 2, 4
"""Rows of the two forward passes from which the memory of larger ones is extrapolated; BatchNorm needs two rows."""
BACKWARD = 3
"""How much longer a step takes than its forward pass."""
LONG_S = 3.0
"""Expected seconds above which a microbatch is tried with fewer rows."""
WAIT_S = 300.0
"""Maximum seconds of a collective; in a trial nobody else takes part."""

_TAKES: Mapping[str, tuple[str, ...]] = {
    "layers": (),
    "model": (),
    "weights": (),
    "rebuilt": (),
    "optimizer": ("parameters",),
    "scheduler": ("optimizer",),
    "loss": ("model", "batch"),
    "evaluate": ("model", "batch"),
    "collate": ("table",),
    "summarise": ("outputs",),
    "show": ("model",),
}
"""The methods of a task, and the names of what they are called with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What a trial found."""

    rows: int
    """Rows of the largest microbatch that was tried."""
    of_rows: int
    """Rows of the job's microbatches."""
    seconds: float
    """Seconds of its step."""
    bytes: int | None
    """Expected bytes of memory of a worker; None if they are not known."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What `evaluate` returned for a held-out microbatch."""
    remarks: tuple[str, ...] = ()
    """What was not tried, and what looks wrong."""
    initial: tuple[float, ...] = ()
    """The sum of each of the model's initial values, for `check_alike`; empty for a model in stages."""
    layers: tuple[Layer, ...] = ()
    """The cost of each layer, if the model is to be partitioned into stages."""
    state: StateSize | None = None
    """The size of the training state; None if it is not known, or is partitioned into stages."""
    shard_cost: ShardCost | None = None
    """The cost of a shard beside its passes; None if it was not measured."""
    inexact: str = ""
    """The parameter whose gradients cannot be summed exactly; empty if there is none."""


def check_signatures(task: Task) -> None:
    """Raise `TaskError` if a method of the task cannot be called with what a run gives it."""
    for method, names in _TAKES.items():
        called = getattr(task, method)
        if not callable(called):
            raise TaskError(
                f"the attribute '{method}' hides the method {method}() that a run calls",
                where=f"the task {type(task).__name__}",
                remedy="give the attribute another name",
            )
        try:
            signature = inspect.signature(called)
        except (TypeError, ValueError):
            # A function of an extension module may have no signature.
            continue
        try:
            signature.bind(*names, *["model"] * (method == "optimizer" and takes_model(task)))
        except TypeError:
            raise TaskError(
                f"{type(task).__name__}.{method}{signature} cannot be called as {method}({', '.join(names)})",
                where=f"the task {type(task).__name__}",
                expected=f"def {method}({', '.join(('self', *names))})",
            ) from None


def try_on_cpu(job: Job, cls: type[Task], rows: RowReader, held_out: RowReader | None) -> Trial:
    """Try a task of that class on this machine's CPU, with as many threads as a worker has.

    Raises the errors of `try_task`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(job.workers.threads)
    if job.reduction == "exact":
        make_deterministic()
    try:
        trial = try_task(job, cls, torch.device("cpu"), rows, held_out)
        with prints_hidden():
            inexact = inexact_parameter(parameters_of(task_of(job, cls, rows.sample_order.steps)))
        trial = replace(trial, inexact=inexact)
        if trial.seconds > LONG_S or job.parallel.by_layer:
            return trial
        with prints_hidden():
            return replace(trial, shard_cost=_shard_cost(job, cls, rows))
    finally:
        torch.set_num_threads(threads)


def _shard_cost(job: Job, cls: type[Task], rows: RowReader) -> ShardCost | None:
    """Return the cost of a shard on this machine's CPU; None if the task cannot make such steps."""
    task = task_of(job, cls, *_length(rows))
    steps = whole_steps(build_state(job, task, torch.device("cpu")), skip_nonfinite=True)
    order = rows.sample_order

    def batch(count: int) -> Microbatch:
        table = joined([rows.read(found) for found in order.row_ranges_between(0, 0, count)])
        return microbatch_of(usable(table), task.collate)

    # The trial reports the task's mistakes.
    with contextlib.suppress(Exception):
        return measure_shard_cost(job, steps, _context(), batch)
    return None


def _length(rows: RowReader) -> tuple[int, int]:
    """Return the number of steps of a run, and of the rows of its data."""
    return rows.sample_order.steps, rows.sample_order.rows


def try_task(
    job: Job,
    cls: type[Task],
    device: torch.device,
    rows: RowReader,
    held_out: RowReader | None,
    rules: Mapping[str, bool] = NEW_RULES,
) -> Trial:
    """Try a new task of that class: the whole model, or its layers if the job has stages.

    `rules`: those of the run: see `Holding`.

    Raises the errors of `build_task`, `check_files`, `try_whole` and `try_layers`.
    """
    with prints_hidden():
        not_taken = check_files(job, cls)
    set_random_key(random_key(job.seed, "task"))
    room = total_memory(device)
    size = None
    if not job.parallel.in_parts:
        with prints_hidden():
            size = fitting_state(job, task_of(job, cls, *_length(rows)), device, room)
    task = task_of(job, cls, *_length(rows))
    try_model = try_layers if job.parallel.by_layer else try_whole
    found = try_model(job, task, device, rows, held_out, room, size, rules=rules)
    return replace(found, state=size, remarks=(*found.remarks, *[not_taken] * bool(not_taken)))


def try_whole(
    job: Job,
    task: Task,
    device: torch.device,
    rows: RowReader,
    held_out: RowReader | None,
    room: int,
    size: StateSize | None = None,
    *,
    rules: Mapping[str, bool] = NEW_RULES,
) -> Trial:
    """Build the whole model, make a step of one real microbatch, and evaluate one held-out microbatch.

    `task`: used for nothing else, because it may keep the model. `room`: bytes of memory of the device or machine.
    `size`: that of the training state, if known. Of a sharded state, the part of one of the most workers is built.
    Raises `TaskError` for whatever the task raises, and `InputError` if a microbatch does not fit into memory.
    """
    check_signatures(task)
    with explained(job, task):
        state = build_state(job, task, device)
    state.rules.update(rules)
    initial = initial_sums(state)
    unshared = Unshared(state.module, task)
    own_share(job, state)
    steps = whole_steps(state, skip_nonfinite=True)
    wanted, remarks = microbatch_rows(rows.sample_order, job.parallel.microbatches), list[str]()
    found = _footprint(job, task, state, rows, device, size) if wanted > LARGE else None
    count, need = wanted, None
    if found is not None:
        footprint, row_s = found
        need = int(footprint.at(wanted))
        check_fits(job, footprint, wanted, room)
        if row_s * wanted > LONG_S:
            count = max(LARGE, int(LONG_S / row_s))
            remarks.append(f"a microbatch of {wanted:,} rows takes long, so one of {count:,} rows was tried")
    batch = _batch(job, task, rows, count)
    start = time.monotonic()
    remarks += _first_step(job, task, steps, batch)
    with explained(job, task, batch.batch):
        if state.rules[NOTHING_ADDED]:
            changed = unshared.changed()
            remarks += [attributes_changed(changed).text] if changed else []
            fewer = max(min(SMALL, batch.rows), batch.rows // 2)
            exact = job.reduction == "exact"
            unshared.check_transient(lambda: _outputs_of(state, _batch(job, task, rows, fewer)), exact=exact)
    remarks += [scaled_hooks().text] * (state.technique.precision.scales_loss and _has_hooks(state.module))
    remarks += [woken().text] * state.woken
    remarks += [stays_in_evaluation(name).text for name in [state.trained_in_evaluation] if name]
    remarks += task.remarks()
    seconds = time.monotonic() - start
    remarks += _uncompiled(job)
    metrics = {}
    if held_out is not None:
        tested = _batch(job, task, held_out, count)

        def evaluated() -> dict[str, float]:
            return evaluate(state, steps.passes, lambda _: [tested], [0], _context(), shards=job.data.shards, step=-1)

        metrics = _tried(job, task, tested, evaluated, remarks)
    return Trial(
        rows=batch.rows,
        of_rows=wanted,
        seconds=seconds,
        bytes=need,
        metrics=metrics,
        remarks=tuple(remarks),
        initial=initial,
    )


def _first_step(job: Job, task: Task, steps: SynchronousSteps, batch: Microbatch) -> list[str]:
    """Make a step of one microbatch; return remarks on it. Raises `TaskError` for whatever the task raises."""
    try:
        with explained(job, task, batch.batch):
            skipped = steps.run(0, {0: [batch]}, _context()).skipped
            check_own_parameters(task, {id(one) for part in steps.state.parts for one in part.module.parameters()})
    except TaskError as error:
        # Other microbatches of a step may have a weight.
        if not error.what.endswith(UNDEFINED):
            raise
        return ["the loss of the first microbatch has the weight 0, so neither it nor the optimizer was tried"]
    return ["the first microbatch gives a loss or gradients that are not all finite"] if skipped else []


def _outputs_of(state: TrainState, batch: Microbatch) -> list[torch.Tensor]:
    """Return the loss of a microbatch in training mode; it changes no buffers."""
    [part] = state.parts
    state.restore_buffers()
    try:
        with part.evaluating(0, 0):
            given = to_device(batch.batch, state.device, copy=True)
            return [task_loss(state.task, part.module, given, batch.rows).loss.detach()]
    finally:
        state.restore_buffers()


def _outputs_of_layer(chunk: Chunk, work: Alone, given: Tensors | None) -> list[torch.Tensor]:
    """Return what a layer makes of what the layer before has made; it changes no persistent buffers."""
    kept = [(value, value.clone()) for value in chunk.submod.buffers()]
    found = forward(chunk, work, given)
    for value, before in kept:
        value.copy_(before)
    return found.values if isinstance(found, Tensors) else [found.loss]


def _has_hooks(module: nn.Module) -> bool:
    return any(map(has_backward_hooks, module.modules()))


def check_alike(trial: Trial, state: TrainState, where: str) -> None:
    """Raise `TaskError` if the model that was built after a trial in the same process has other initial values."""
    if trial.initial != initial_sums(state):
        raise TaskError(
            "the model has other initial values when it is built a second time in the same process, as after a loss",
            where=where,
            expected="values that depend on the global generators of torch, NumPy and Python alone",
            remedy="build the model, and generators of its own, inside model() or layers(), not once per process",
        )


def try_layers(
    job: Job,
    task: Task,
    device: torch.device,
    rows: RowReader,
    held_out: RowReader | None,
    room: int = 0,
    size: StateSize | None = None,
    *,
    rules: Mapping[str, bool] = NEW_RULES,
) -> Trial:
    """Do the same layer by layer, for a model that may fit into no single process, and measure each layer.

    The optimizer is made for one layer's parameters at a time. `room`, `size`: see `try_whole`. Raises `TaskError` for
    whatever the task raises, and `InputError` if what the layers keep does not fit into memory beside the state.
    """
    check_signatures(task)
    held = held_memory(device)
    wanted = microbatch_rows(rows.sample_order, job.parallel.microbatches)
    batch = _batch(job, task, rows, wanted)
    start, technique = time.monotonic(), technique_of(job, device)
    with explained(job, task, batch.batch):
        classes_of(batch.batch)
        if job.parallel.slices > 1:
            check_slices(job, task, device, batch)
        slicing, in_one = slicing_of(job, task), job.parallel.in_one_stage
        layers = measure_layers(task, job.seed, technique, batch, job.parallel.overlaps, slicing, in_one=in_one)
        seconds = time.monotonic() - start
        need = None if size is None else check_layers_fit(job, layers, held, size, device, room)
        few = None if held_out is None else _batch(job, task, held_out, wanted)
        remarks = list[str]()
        returned = _one_by_one(task, job, technique, batch, few, remarks, rules)
    remarks, metrics = [*dict.fromkeys(remarks), *_uncompiled(job)], {}
    if few is not None:
        metrics = _tried(job, task, few, lambda: _summarised(task, returned, few.rows), remarks)
    return Trial(
        rows=batch.rows,
        of_rows=wanted,
        seconds=seconds,
        bytes=need,
        metrics=metrics,
        remarks=tuple(remarks),
        layers=layers,
    )


def _uncompiled(job: Job) -> list[str]:
    """Return a remark on what the compiler has left out; none if the job compiles nothing, or all was compiled."""
    breaks = graph_breaks() if job.compile else []
    return [f"compile: {breaks_in_words(breaks)}"] if breaks else []


def _one_by_one(
    task: Task,
    job: Job,
    technique: Technique,
    batch: Microbatch,
    held_out: Microbatch | None,
    remarks: list[str],
    rules: Mapping[str, bool],
) -> Any:
    """Make an optimizer step with each layer alone, and pass a held-out microbatch through all; add remarks.

    Returns what `evaluate` returns for it.
    """
    work = Alone(partial(alone_loss, task), job.seed, technique, batch)
    names = pass_names(task, job.seed, in_one=job.parallel.in_one_stage)
    output: Any = None
    evaluated, empty, stepped = None, None, False
    known, changed = set[int](), list[str]()
    for number, (_, built) in enumerate(each_layer(task, job.seed, technique, names, slicing_of(job, task))):
        module = train_as_built(built.module)
        if rules[MEAN_LOSS]:
            check_hooks(hooked_parameters(module))
        chunk, added = Chunk(module, number, [0] * len(names)), AddedState(module)
        unshared = Unshared(module, None if number else task)
        if not rules[NOTHING_ADDED]:
            added.allow()
        given, output = output, forward(chunk, work, output)
        added.check()
        backward(chunk, output)
        changed += unshared.changed() if rules[NOTHING_ADDED] else []
        if rules[NOTHING_ADDED]:
            unshared.check_transient(partial(_outputs_of_layer, chunk, work, given), exact=job.reduction == "exact")
        remarks += [scaled_hooks().text] * (technique.precision.scales_loss and _has_hooks(module))
        # A task may keep layers that were tried before.
        known |= {id(one) for one in module.parameters()}
        check_own_parameters(task, known)
        try:
            stepped |= _optimizer_step(task, module, on_host=technique.offloads)
        except ValueError as error:
            # A layer may hold none of the parameters that the optimizer selects; it then has no optimizer.
            if "empty parameter list" not in str(error):
                raise
            empty = error
        if held_out is not None:
            module.eval()
            with torch.no_grad():
                chunk = Chunk(module, number, [0] * len(names))
                metrics = Alone(partial(held_out_metrics, task), job.seed, technique, held_out)
                evaluated = forward(chunk, metrics, evaluated)
    if empty is not None and not stepped:
        raise empty
    remarks += [attributes_changed(changed).text] if changed else []
    return evaluated


def _summarised(task: Task, returned: Any, rows: int) -> dict[str, float]:
    """Return the metrics of a held-out microbatch of `rows` rows, for which `evaluate` returned that."""
    summarised = type(task).summarise is not Task.summarise
    means, outputs = checked(returned, rows, summarised, float(rows))
    return {**means.numbers, **means.of_rows, **(numbers(task.summarise(outputs)) if summarised else {})}


def _optimizer_step(task: Task, module: nn.Module, *, on_host: bool) -> bool:
    """Make a step of the task's optimizer and scheduler; return whether the module has anything to train."""
    trained = [
        (name, _changed(value, on_host=on_host)) for name, value in module.named_parameters() if value.requires_grad
    ]
    if trained:
        optimizer = build_optimizer(task, trained, module)
        scheduler = build_scheduler(task, optimizer)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return bool(trained)


def _changed(value: nn.Parameter, *, on_host: bool) -> nn.Parameter:
    """Return a trained parameter with the dtype of its gradient, as the optimizer of a run gets it."""
    dtype, device = gradient_dtype(value), torch.device("cpu") if on_host else value.device
    if (value.dtype, value.device) == (dtype, device):
        return value
    master = nn.Parameter(value.detach().to(device, dtype))
    master.grad = None if value.grad is None else value.grad.to(device)
    return master


def describe(batch: Any) -> Described:
    """Return the type and shape of each value of a batch, if it is a mapping, or of the batch itself."""
    if isinstance(batch, pa.Table):
        return {name: str(batch.schema.field(name).type) for name in batch.column_names}
    # A class of the task's own may look like a mapping and be none.
    with contextlib.suppress(Exception):
        return {str(name): _described(batch[name]) for name in batch.keys()}  # noqa: SIM118
    return {}


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    return type(value).__name__


@contextmanager
def explained(job: Job, task: Task, batch: Any = None) -> Iterator[None]:
    """Turn what the task's code raises, given `batch`, into a `TaskError` that says what is wrong and what to do."""

    def report(error: BaseException) -> Exception | None:
        if isinstance(error, TrainingError):
            return TaskError(error.what, where=f"task: {job.task}", user_traceback=error.user_traceback)
        if isinstance(error, RaytrainError):
            return None
        kind, text = type(error).__name__, str(error)
        # Of a batch, a function for the optimizer or the state knows nothing.
        given = batch if declared_in(error) in ("", "evaluate") else None
        advice = NO_MEMORY if out_of_memory(error) else advice_for(kind, text, describe(given))
        return TaskError(
            f"{_speaker(task, error)} raised {kind}: {text}",
            where=f"task: {job.task}",
            expected=advice.expected,
            remedy=advice.remedy,
            user_traceback=trim_traceback(error) if users_frames(error) else "",
        )

    with reporting(report):
        yield


def _speaker(task: Task, error: BaseException) -> str:
    """Return which of the task's methods raised, in words."""
    if declared := declared_in(error):
        return f"{type(task).__name__}: the function of session.{declared}"
    for frame in users_frames(error):
        if frame.name in _TAKES:
            return f"{type(task).__name__}.{frame.name}"
        if frame.name == type(task).__name__:
            # A training function is a task by its own name.
            return frame.name
    return f"{type(task).__name__}, in the backward pass or the optimizer step,"


def _footprint(
    job: Job, task: Task, state: TrainState, rows: RowReader, device: torch.device, size: StateSize | None
) -> tuple[PerRow, float] | None:
    """Return what a step needs, and its expected seconds for each row; None if the task does not take so few rows."""
    seconds = 0.0
    # Without the size, two values for each weight that is changed here.
    to_come = sum(2 * value.nbytes for _, value in state.named)
    if size is not None:
        to_come = int(size.kept * share_of(job.parallel, most_workers(job)))
    if job.offload == "optimizer" and device.type == "cuda":
        to_come = 0
    # A task of its own, because one may keep something of its first batch's size.
    other = task_of(job, type(task), *_length(rows))

    def forward(count: int) -> TaskLoss:
        nonlocal seconds
        batch = _batch(job, other, rows, count)
        start = time.monotonic()
        with state.technique.precision.autocast():
            found = task_loss(other, state.module, to_device(batch.batch, device, copy=True), batch.rows)
        seconds = BACKWARD * (time.monotonic() - start) / batch.rows
        return found

    try:
        state.train()
        return measure_footprint(device, forward, SMALL, LARGE, to_come), seconds
    except Exception:
        # Whatever is wrong is reported with the microbatch that a run would use.
        return None
    finally:
        state.restore_buffers()


def _batch(job: Job, task: Task, rows: RowReader, count: int) -> Microbatch:
    """Return the first `count` rows as a microbatch."""
    table = first_rows(rows, count)
    with explained(job, task, without_ids(table)):
        return microbatch_of(table, task.collate)


def _tried(
    job: Job, task: Task, batch: Microbatch, evaluated: Callable[[], dict[str, float]], remarks: list[str]
) -> dict[str, float]:
    """Return the metrics of one held-out microbatch, `batch`; a summary of so few rows may fail, which is remarked."""
    try:
        with explained(job, task, batch.batch):
            metrics = evaluated()
    except TaskError as error:
        if not error.what.startswith(f"{type(task).__name__}.summarise "):
            raise
        remarks.append(f"{error.what}; it had only {batch.rows:,} held-out rows, and gets all of them in a run")
        return {}
    check_best(job.best, metrics)
    return metrics


def _context() -> StepContext:
    return StepContext(world=SoloWorld(), control=Control(), wait_s=WAIT_S)
