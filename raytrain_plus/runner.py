"""From a job to its result: checks what can be checked here, finds or starts Ray, starts the controller, follows it."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import math
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import cloudpickle
import ray
import yaml
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_plus.data.of_job import line_of
from raytrain_plus.data.prepare import prepare
from raytrain_plus.data.source import Index, check_alike, check_enough, differences, index
from raytrain_plus.elastic.controller import Controller
from raytrain_plus.elastic.group import Limits
from raytrain_plus.elastic.order import Closing, Order
from raytrain_plus.elastic.policy import room_for
from raytrain_plus.errors import CheckpointError, DamagedError, DataError, InputError, RunError, TaskError
from raytrain_plus.install.state import choose_collective
from raytrain_plus.job import Job
from raytrain_plus.observe.progress import View, view_for
from raytrain_plus.parallel.mesh import useful_shape
from raytrain_plus.parallel.shapes import cuts_of, largest, left_out
from raytrain_plus.past import Past, look_back
from raytrain_plus.result import Result
from raytrain_plus.runfolder import DATASET, check_writable, earlier_result, exists, job_of
from raytrain_plus.state.manifest import FOLDER as CHECKPOINTS
from raytrain_plus.state.manifest import Manifest
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.folder import Folder, open_folder, split, without_secrets
from raytrain_plus.taskfile import load_function, load_task
from raytrain_plus.training.layers import layers_of
from raytrain_plus.workers.plan import Plan
from raytrain_plus.workers.ray_private import (
    end_our_own_ray,
    most_there_can_be,
    our_own_signals,
    settings_of_our_own_ray,
    silent_about_deaths,
)

FOLLOW_S = 0.25
"""Longest wait for news of the run: bounds how soon a signal is heard, too."""


def run(
    job: Job,
    *,
    address: str | None = None,
    fresh: bool = False,
    view: View | None = None,
    quiet: bool = False,
    roots: Sequence[Path] = (),
    may_change: Collection[str] = (),
) -> Result:
    """Runs `job` to its end and returns its result; a run that failed is a result too, with its error in words.

    A run of this name that has not finished goes on from its newest complete checkpoint. `may_change`: settings in
    which the job may then differ from the one that began, beside those that no result depends on.

    `address` names a Ray cluster to join (else RAY_ADDRESS, else a connection that is already there, else one of our
    own is started for this run); `fresh` moves an earlier run of this name aside; `view` is told of everything, unless
    `quiet`. `roots` are folders to import the task from, beside the working directory. Raises `InputError` where the
    job, its data or its task is wrong: before a folder is made.
    """
    view = None if quiet else view or view_for(sys.stdout)
    folder = check_writable(job.storage).inside(job.name)
    done = earlier_result(folder, job, fresh, may_change)
    if done is not None:
        if view is not None:
            view.finish(done)
        return done
    search = [Path.cwd(), *roots]
    collective = choose_collective(job.collective, job.workers.gpus)
    pickled = _task_to_send(job, search)
    seen, held_out = _look_at_data(job, search)
    past = None
    if exists(folder) and not fresh:
        past = look_back(folder)
        check_goes_on(past, folder, job, seen)
    source = None if pickled is not None else source_sha256(job.task, search)
    if past is not None:
        _warn_of_another_task(past, source)
    cuts = cuts_of(job, layers_of(job, search))
    unformed = left_out(job, cuts)
    if unformed:
        print(f"warning: {unformed}", file=sys.stderr)
    with _Signals() as signals, connected(job, address) as began:
        # Ray's own code in C++ has put something in their place.
        signals.listen()
        order = Order(
            plan=Plan(
                job=job if pickled is None else replace(job, task=_spelled(job.task)),
                pickled_task=pickled,
                roots=tuple(str(root.absolute()) for root in search),
                steps=line_of(job, seen).steps,
                index=seen,
                held_out=held_out,
                collective=collective,
                folder=folder.address,
            ),
            past=past,
            task_sha256=source,
            limits=_limits(job, line_of(job, seen).steps, cuts),
            fresh=fresh,
            job_yaml=replace(job, storage=without_secrets(job.storage)).to_yaml(),
            versions=_versions(),
            began=began,
        )
        return _follow(order, view, signals)


def resume(
    run_folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    address: str | None = None,
    view: View | None = None,
    quiet: bool = False,
    roots: Sequence[Path] = (),
) -> Result:
    """Goes on with the run in this folder, a path or an address, from its newest complete checkpoint; its result.

    `overrides` are `a.b=c`: what no result depends on may change, and on purpose `args.…`, and `steps`, which lets a
    finished run go on. Its task and relative paths are looked up from the working directory, as when it began.
    """
    storage, name = split(run_folder)
    folder = open_folder(run_folder)
    if job_of(folder).epochs is not None and any(override.split("=")[0] == "steps" for override in overrides):
        raise InputError(
            "the length of this run is given in epochs, and its last step is of a size of its own",
            where="--set steps",
            expected="a run whose job says `steps`",
        )
    own = [f"name={json.dumps(name)}", f"storage={json.dumps(storage)}"]
    job = job_of(folder, [*overrides, *own])
    return run(job, address=address, view=view, quiet=quiet, roots=roots, may_change=("args", "steps"))


def check_goes_on(past: Past, folder: Folder, job: Job, seen: Index) -> None:
    """Raises `InputError` where the job cannot go on from what is in `folder`: other data, another job's checkpoints, a
    newer version, the end."""
    _check_data(folder, job, seen)
    for manifest in (found.manifest for found in past.found if found.manifest is not None):
        _check_ours(manifest, folder, job, seen)
    for found in past.found:
        if found.error is not None and not isinstance(found.error, DamagedError):
            raise found.error
        if found.damaged:
            print(f"warning: the checkpoint {found.name} cannot be used: {found.why}", file=sys.stderr)
        if found.manifest is not None:
            made, steps = found.manifest.step + 1, line_of(job, seen).steps
            if steps < made:
                raise InputError(
                    f"{steps} steps are fewer than the run has made ({made})", where="steps", expected=f"{made} or more"
                )
            return
    lost = [found for found in past.found if found.damaged]
    if lost:
        raise CheckpointError(
            f"no checkpoint can be used; the newest: {lost[0].why}",
            where=f"{folder.where}/{CHECKPOINTS}/{lost[0].name}",
            remedy="mend the files if you have a copy; or start over with --fresh, which keeps this run's folder",
        )
    result = Result.load(folder)
    if result is not None and result.status == "finished":
        raise InputError("the finished run has no checkpoint to go on from", where=f"run folder {folder.where}")


def _check_data(folder: Folder, job: Job, seen: Index) -> None:
    """Holds the data against what the run's folder says of it, where it says anything."""
    remedy = "move the file away; the data is then held against what the checkpoints say"
    try:
        then = read_object(folder, DATASET, remedy)
    except FileNotFoundError:
        return
    try:
        differing = then["fingerprint"] != seen.fingerprint and differences(seen.to_json(), then)
    except (KeyError, TypeError) as error:
        what = f"the file is damaged: it does not say what the data was ({type(error).__name__}: {error})"
        raise InputError(what, where=f"{folder.where}/{DATASET}", remedy=remedy) from None
    if differing is not False:
        raise _other_data(job, seen, str(then["fingerprint"]), f"the run began: {'; '.join(differing[:3])}")


def _check_ours(manifest: Manifest, folder: Folder, job: Job, seen: Index) -> None:
    """Refuses the checkpoint of another job, or of other data, which somebody has put there."""
    where = f"{folder.where}/{CHECKPOINTS}/{manifest.name}.json"
    # Of a run that is resumed these may change.
    differing = [key for key in job.same_as(yaml.safe_dump(manifest.job)) if key not in ("args", "steps")]
    if differing:
        raise CheckpointError(
            f"the checkpoint is another job's ({manifest.run}); they differ in {', '.join(differing)}",
            where=where,
            remedy="move it away; or start over with --fresh, which keeps this run's folder",
        )
    if manifest.data["fingerprint"] != seen.fingerprint:
        raise _other_data(job, seen, str(manifest.data["fingerprint"]), f"the checkpoint {manifest.name} was written")


def _other_data(job: Job, seen: Index, fingerprint: str, when: str) -> DataError:
    return DataError(
        f"the data is other than when {when}",
        where=job.data.path,
        expected=f"the data with the fingerprint {fingerprint[:12]}, not {seen.fingerprint[:12]}",
        remedy="put the files back; or start over with --fresh",
    )


def source_sha256(task: str | type, roots: Sequence[Path]) -> str | None:
    """The hash of the file that a task's class comes from; None where it comes from none."""
    cls = load_task(task, roots)
    try:
        file = inspect.getsourcefile(cls)
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return None


def _warn_of_another_task(past: Past, source: str | None) -> None:
    newest = next((found.manifest for found in past.found if found.manifest is not None), None)
    if newest is not None and source is not None and newest.task_sha256 not in (None, source):
        print(
            "warning: the task's source file has changed since the checkpoint that the run goes on from "
            f"(step {newest.step}) was written",
            file=sys.stderr,
        )


def _spelled(task: str | type) -> str:
    return task if isinstance(task, str) else f"{task.__module__}:{task.__qualname__}"


def _task_to_send(job: Job, roots: Sequence[Path]) -> bytes | None:
    """None for a task that workers import by name; the class by value where Python code handed it over."""
    load_task(job.task, roots)
    if isinstance(job.task, str):
        return None
    module = sys.modules[job.task.__module__]
    named = module.__name__ != "__main__"
    try:
        if named:
            cloudpickle.register_pickle_by_value(module)
        pickled: bytes = cloudpickle.dumps(job.task)
        return pickled
    except Exception as error:
        raise TaskError(
            f"{job.task.__qualname__} cannot be sent to a worker: {type(error).__name__}: {error}",
            where=f"task: {_spelled(job.task)}",
            remedy="keep locks, files, connections and loaded models out of module globals and class attributes; "
            "make them in the task's methods",
        ) from error
    finally:
        if named:
            with contextlib.suppress(ValueError):
                cloudpickle.unregister_pickle_by_value(module)


def _look_at_data(job: Job, roots: Sequence[Path]) -> tuple[Index, Index | None]:
    for name in (job.data.prepare, job.data.transform):
        if name is not None:
            load_function(name, roots)
    prepare(job.data.prepare, job.data.path, roots)
    seen = index(job.data.path)
    check_enough(seen, job.data.shards)
    if job.evaluate is None:
        return seen, None
    prepare(job.data.prepare, job.evaluate.path, roots)
    held_out = index(job.evaluate.path)
    check_enough(held_out, job.data.shards)
    check_alike(seen, held_out)
    return seen, held_out


KNOCK_S = 5.0
"""Limit of finding out whether anybody listens at a cluster's address."""


@contextlib.contextmanager
def connected(job: Job, address: str | None) -> Iterator[float]:
    """A Ray to run on; yields the moment at which it was there. One that we start ends with the run."""
    if ray.is_initialized():
        yield time.time()
        return
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        with our_own_signals():
            if address:
                _knock(address)
                ray.init(address=address, logging_level=logging.WARNING)
            else:
                ray.init(
                    address="local",
                    num_cpus=max(1, math.ceil((largest(job) + job.workers.spares) * job.workers.cpus)),
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    _system_config=settings_of_our_own_ray(),
                )
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"no Ray cluster answers: {str(error).splitlines()[0]}",
            where=f"address: {address or 'local'}",
            remedy="check the address, or leave it out to start Ray on this machine",
        ) from error
    try:
        with silent_about_deaths():
            yield time.time()
    finally:
        if address:
            ray.shutdown()
        else:
            end_our_own_ray()


def _knock(address: str) -> None:
    """Raises `OSError` where nobody listens at `host:port`: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


def _limits(job: Job, steps: int, cuts: tuple[int, ...]) -> Limits:
    """What the group's machine goes by. Raises `InputError` where the cluster can never have
    `workers.min` and `workers.spares`."""
    need = {"CPU": job.workers.cpus, "GPU": job.workers.gpus}
    shards = job.data.shards
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = room_for(nodes, need)
    minimum, maximum, spares = max(job.workers.min, cuts[-1]), job.workers.max or job.workers.min, job.workers.spares
    most = most_there_can_be()
    wanted = minimum + spares
    grows = most is not None and all(most.get(name, 0.0) >= amount * wanted for name, amount in need.items())
    if room < wanted and not grows:
        has = "; ".join(f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU" for node in nodes)
        raise InputError(
            f"the cluster has room for {room} workers of {need['CPU']:g} CPU and {need['GPU']:g} GPU each",
            where=f"workers.min: {minimum}" if room < minimum else f"workers.spares: {spares}",
            expected=f"room for {wanted}, now or by an autoscaler; its {len(nodes)} nodes have: {has}",
            remedy="lower workers.min, workers.spares or what a worker needs, or add nodes",
        )
    shape = useful_shape(max(room - spares, minimum), minimum, maximum, shards, cuts)
    return Limits(
        minimum=minimum,
        maximum=maximum,
        spares=spares,
        shards=shards,
        steps=steps,
        max_failures=job.elastic.max_failures,
        expected=min(max(room, minimum), spares + (minimum if shape is None else shape.size)),
        cuts=cuts,
    )


def _versions() -> dict[str, str]:
    names = ("raytrain-plus", "ray", "torch", "pyarrow", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _follow(order: Order, view: View | None, signals: _Signals) -> Result:
    """Starts the controller on this node and follows it to the end."""
    here = ray.get_runtime_context().get_node_id()
    if view is not None:
        view.start(order.plan.job.name, order.plan.steps)
    controller: Any = (
        ray.remote(Controller)
        .options(num_cpus=0, max_concurrency=16, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False))
        .remote(order)
    )
    closing_ref = controller.run.remote()
    cursor = 0
    over = ended = False
    try:
        while not ended:
            # Nothing is told after the last event: it is the end that is waited for then.
            ended = bool(ray.wait([closing_ref], timeout=FOLLOW_S if over else 0)[0])
            events = ray.get(controller.follow.remote(cursor, 0.0 if ended or over else FOLLOW_S))
            cursor += len(events)
            over = over or any(event["kind"] == "run_finished" for event in events)
            if view is not None:
                for event in events:
                    view.event(event)
            if signals.new():
                controller.stop.remote()
        closing: Closing = ray.get(closing_ref)
    except RayTaskError as error:
        raise error.cause from None
    except SystemExit:
        # A second SIGTERM, which Ray hands on with a code of its own.
        raise SystemExit(signals.exit_code) from None
    except RayActorError as error:
        raise RunError(f"the controller died: {str(error).splitlines()[0]}") from error
    finally:
        ray.kill(controller)
        if view is not None:
            view.close()
    result = (
        replace(closing.result, exit_code=signals.exit_code) if closing.result.status == "stopped" else closing.result
    )
    if view is not None:
        view.finish(result)
    return result


class _Signals:
    """SIGINT and SIGTERM become wishes to stop, while this is open; the second one interrupts at once."""

    def __init__(self) -> None:
        self._count = 0
        self._told = 0
        self.exit_code = 130
        self._before: dict[int, Any] = {}

    def new(self) -> bool:
        """Whether a signal came since the last call."""
        told, self._told = self._told, self._count
        return told != self._count

    def listen(self) -> None:
        """Takes the signals, from whoever had them."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                had = signal.signal(number, self._heard)
                self._before.setdefault(number, had)

    def __enter__(self) -> _Signals:
        self.listen()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = 128 + number
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.exit_code)
