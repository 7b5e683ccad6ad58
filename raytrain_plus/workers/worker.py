"""One worker: control calls that always answer, and a training thread that does the work.

Everything that touches torch or the world runs on the training thread, one thing after the other; control methods hand
work to it and wait, or set a flag that it looks at.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import ray
import safetensors.torch
import torch

from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.horovod import HorovodWorld
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.torch import TorchWorld, open_store
from raytrain_plus.collective.world import World
from raytrain_plus.data.granule import Rows, Transform
from raytrain_plus.data.line import Line
from raytrain_plus.data.of_job import evaluation_line, line_of
from raytrain_plus.data.prepare import prepare
from raytrain_plus.data.reader import Batches, held_out
from raytrain_plus.data.source import Index, index
from raytrain_plus.errors import DataError, RaytrainError, TaskError, TrainingError
from raytrain_plus.job import Job
from raytrain_plus.state.named import model_tensors, named_state, state_sha256
from raytrain_plus.taskfile import build_task, load_function, load_task, trim_traceback
from raytrain_plus.training.loop import Evaluation, Limits, train
from raytrain_plus.training.model import build_model
from raytrain_plus.training.step import Stepper
from raytrain_plus.workers.plan import Ended, Export, Place, Plan, Ready
from raytrain_plus.workers.reporter import Reporter

T = TypeVar("T")

FIRST_STEP_S = 300.0
"""Limit of a first step and of an evaluation: they compile, open files, and have no earlier step to be measured by."""


class Worker:
    """What a worker process holds; `actor` puts it on Ray."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._stop = threading.Event()
        self._interrupt = threading.Event()
        self._plan: Plan | None = None
        self._stepper: Stepper | None = None
        self._world: World | None = None
        self._store: Any = None

    def place(self) -> Place:
        """Who and where this process is."""
        return Place(
            worker=self._name,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            clock_s=time.time(),
        )

    def prepare(self, plan: Plan) -> Ready:
        """Imports and builds the task, makes the data where this node lacks it. Raises what is wrong with either."""
        return self._do(lambda: self._prepare(plan))

    def open_store(self, timeout_s: float) -> int:
        """Opens the store through which a torch world forms; its port."""

        def do() -> int:
            self._store, port = open_store(ray.util.get_node_ip_address(), timeout_s)
            return port

        return self._do(do)

    def form(self, collective: str, formation: Formation) -> None:
        """Joins a world. Raises `Interrupted` where it cannot form."""

        def do() -> None:
            self._interrupt.clear()
            if formation.size == 1:
                self._world = SoloWorld()
            elif collective == "horovod":
                self._world = HorovodWorld(formation)
            else:
                self._world = TorchWorld(formation, self._store)

        self._do(do)

    def train(self, controller: Any, generation: int, hosted: tuple[int, ...], first_step: int) -> Ended:
        """Trains to the end; the controller keeps this call pending, and its failure is how it learns of a death."""
        return self._do(lambda: self._train(controller, generation, hosted, first_step))

    def stop(self) -> None:
        """Wishes to stop at the next step boundary; the wish travels in the header."""
        self._stop.set()

    def interrupt(self) -> None:
        """Leaves the wait for a collective at once."""
        self._interrupt.set()

    def export(self) -> Export:
        """The model as it stands, and what the task shows."""
        return self._do(self._export)

    def leave(self) -> None:
        """Closes the world."""

        def do() -> None:
            if self._world is not None:
                self._world.close()
                self._world = None

        self._do(do)

    def _do(self, work: Callable[[], T]) -> T:
        def told() -> T:
            try:
                return work()
            except RaytrainError:
                raise
            except Exception as error:
                raise _users_error(error) from None

        return self._thread.submit(told).result()

    def _prepare(self, plan: Plan) -> Ready:
        start = time.monotonic()
        torch.set_num_threads(plan.job.workers.threads)
        sys.path[:0] = [root for root in plan.roots if root not in sys.path]
        roots = [Path(root) for root in plan.roots]
        job = plan.job
        if plan.pickled_task is not None:
            cls = cloudpickle.loads(plan.pickled_task)
        else:
            assert isinstance(job.task, str), "a class travels pickled"
            cls = load_task(job.task, roots)
        _same_data(job.data.path, job.data.prepare, roots, plan.index.fingerprint)
        if job.evaluate is not None and plan.held_out is not None:
            _same_data(job.evaluate.path, job.data.prepare, roots, plan.held_out.fingerprint)
        task = build_task(cls, job.args)
        device = torch.device("cuda", 0) if job.workers.gpus else torch.device("cpu")
        try:
            built = build_model(task, job.seed, device)
            self._stepper = Stepper(
                task, built, seed=job.seed, shards=job.data.shards, clip_norm=job.clip_norm, device=device
            )
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(
                f"{cls.__name__} cannot be built: {type(error).__name__}: {error}",
                where=f"task: {job.task}",
                user_traceback=trim_traceback(error),
            ) from None
        self._plan = plan
        parameters = sum(value.numel() for _, value in self._stepper.named)
        return Ready(parameters=parameters, seconds=time.monotonic() - start)

    def _train(self, controller: Any, generation: int, hosted: tuple[int, ...], first_step: int) -> Ended:
        assert self._plan is not None
        assert self._stepper is not None
        assert self._world is not None
        plan, job, stepper = self._plan, self._plan.job, self._stepper
        roots = [Path(root) for root in plan.roots]
        transform = load_function(job.data.transform, roots) if job.data.transform else None
        rows = _rows(plan.index, line_of(job, plan.index), job, transform)
        held_out_rows = (
            _rows(plan.held_out, evaluation_line(job, plan.held_out), job, transform)
            if plan.held_out is not None
            else None
        )
        node = ray.get_runtime_context().get_node_id()
        feed = Batches(
            rows,
            shards=hosted,
            first_step=first_step,
            microbatches=job.parallel.microbatches,
            collate=stepper.task.collate,
            cache_mb=job.data.cache_mb,
            make_stream=functools.partial(open_stream, node=node, roots=plan.roots),
        )
        reporter = Reporter(lambda records: controller.report.remote(self._name, generation, records))
        with feed, reporter:
            stopped = train(
                stepper,
                feed,
                self._world,
                hosted=hosted,
                shards=job.data.shards,
                first_step=first_step,
                steps=plan.steps,
                evaluation=self._evaluation(job, held_out_rows),
                limits=Limits(hang_timeout_s=job.elastic.hang_timeout_s, first_step_s=FIRST_STEP_S),
                tell=reporter.tell,
                wishes_stop=self._stop.is_set,
                interrupted=self._interrupt.is_set,
            )
        state = named_state(stepper.module, stepper.optimizer, stepper.named)
        return Ended(stopped=stopped, state_sha256=state_sha256(state))

    def _evaluation(self, job: Job, rows: Rows | None) -> Evaluation | None:
        if job.evaluate is None or rows is None or self._stepper is None:
            return None
        size = job.data.batch_size // job.data.shards // job.parallel.microbatches
        collate = self._stepper.task.collate
        return Evaluation(
            every_steps=job.evaluate.every_steps, batches=lambda shard: held_out(rows, shard, size, collate)
        )

    def _export(self) -> Export:
        assert self._stepper is not None
        module = self._stepper.module
        model = safetensors.torch.save(model_tensors(module))
        module.eval()
        with torch.no_grad():
            show = self._stepper.task.show(module)
        return Export(model=model, show=show)


def _rows(seen: Index, line: Line, job: Job, transform: Transform | None) -> Rows:
    return Rows(index=seen, line=line, seed=job.seed, transform=transform, granule=job.data.granule)


def open_stream(*arguments: Any, **settings: Any) -> Any:
    """A Ray Data stream; Ray Data is loaded here, when the first one is wanted, because that takes a second."""
    from raytrain_plus.data.stream import Stream

    return Stream(*arguments, **settings)


def _same_data(path: str, spec: str | None, roots: list[Path], fingerprint: str) -> None:
    """Makes the data where this node lacks it, and holds what is there against what the driver saw."""
    prepare(spec, path, roots)
    seen = index(path).fingerprint
    if seen != fingerprint:
        raise DataError(
            f"this node ({os.uname().nodename}) sees other data than the driver",
            where=path,
            expected=f"fingerprint {fingerprint[:12]}, found {seen[:12]}",
            remedy="put the same files there on every node, or name a shared folder",
        )


def _users_error(error: Exception) -> TrainingError:
    kind = type(error).__name__
    what = f"the task raised {kind}: {error}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        what = f"out of memory ({kind}): {error}; use more microbatches, a smaller batch, or a larger machine"
    return TrainingError(what, trim_traceback(error))
