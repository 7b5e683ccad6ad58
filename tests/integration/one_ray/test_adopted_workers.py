"""Workers outlive their controller: the next process adopts them, and without one they end and leave nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import ray
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.errors import StaleController
from raytrain_plus.training.exchange.step_records import StepRecord
from raytrain_plus.workers.imports import Imports
from raytrain_plus.workers.messages import Plan
from raytrain_plus.workers.pool import Pool
from raytrain_plus.workers.run_actors import NAMESPACE, actors_of, clear
from tests.integration.one_ray.remains import places
from tests.unit.workers.members import assigned, plan_of

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("cluster")]

RUN = "small/0a1b2c3d"
CPUS = 1


class Slow(Task):
    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=1e-9)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.005)
        return model(batch["x"].float()[:, None]).mean()  # type: ignore[no-any-return]


class Owner:
    """A controller that does what a test says, and that Ray starts again if it may."""

    def __init__(self) -> None:
        self._pool = Pool(RUN, CPUS, 0, Imports(), wait_s=60)
        self.heard: list[StepRecord] = []
        self.gone: list[str] = []

    def ready(self) -> int:
        return os.getpid()

    def start(self, name: str, plan: Plan | None) -> None:
        """Start a worker, and prepare it if there is a plan."""
        self._pool.start(name)
        if plan is not None:
            ray.get(self._pool.call(name, "prepare", plan, 60.0))

    def stand_by(self, name: str) -> None:
        self._pool.stand_by({name: ray.get_runtime_context().get_node_id()})

    def claim(self, name: str) -> None:
        """Start a worker, and do not wait for it."""
        self._pool.start(name)

    def serve(self, name: str) -> None:
        """Let a worker train alone."""
        self._pool.call(name, "serve", ray.get_runtime_context().current_actor, assigned())

    def report(self, worker: str, generation: int, records: Sequence[Any]) -> int:
        self.heard += [record for record in records if isinstance(record, StepRecord)]
        # Nothing is durable yet.
        return -1

    def joined(self, *_: Any) -> None: ...

    def adopt(self, epoch: int, limit_s: float) -> tuple[float, dict[str, Any]]:
        """Adopt the workers of the process before; return how many seconds that took, and what they said."""
        start = time.monotonic()
        found = self._pool.adopt(epoch, limit_s)
        took_s = time.monotonic() - start
        for name in found:
            self._pool.watch(name, lambda future, name=name: self.gone.append(name))
        return took_s, found

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        return ray.get(self._pool.call(name, method, *arguments))

    def told(self) -> tuple[list[int], list[str]]:
        """Return the steps that were reported to this process, and the workers that have died."""
        return [record.step for record in self.heard], self.gone

    def shutdown(self) -> None:
        self._pool.shutdown()


def owner(restarts: int) -> Any:
    options = {"max_restarts": restarts, "max_task_retries": restarts, "max_concurrency": 32, "num_cpus": 0}
    return ray.remote(Owner).options(name=RUN, namespace=NAMESPACE, lifetime="detached", **options).remote()


def plan(folder: Path) -> Plan:
    made = plan_of(folder, 100_000)
    return replace(made, pickled_task=cloudpickle.dumps(Slow), roots=(str(folder),))


def until(true: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def processes() -> list[psutil.Process]:
    """Return the processes of workers and standbys on this machine."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "WorkerActor" in " ".join(one.cmdline()):
                found.append(one)
    return found


def nothing_left() -> bool:
    return not (actors_of(RUN) or places() or processes())


@pytest.fixture
def controller(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield the actor of a controller that Ray starts again, or not; end what it leaves."""
    actor = owner(request.param)
    yield actor
    clear(RUN)
    ray.kill(actor)
    until(nothing_left, "all is ended")


RESTARTED = pytest.mark.parametrize("controller", [-1], indirect=True)


@RESTARTED
def test_the_next_process_adopts_workers_that_train_on(tmp_path: Path, controller: Any) -> None:
    before = ray.get(controller.ready.remote())
    ray.get([controller.start.remote(name, plan(tmp_path)) for name in ("worker-0", "worker-1")])
    ray.get(controller.start.remote("worker-2", None))
    ray.get(controller.stand_by.remote("worker-1"))
    controller.serve.remote("worker-0")
    until(lambda: len(ray.get(controller.told.remote())[0]) > 3, "it trains")
    old = {name.split("#")[0].rpartition("/")[2]: actor for name, actor in actors_of(RUN).items()}
    assert sorted(old) == ["standby-3", "worker-0", "worker-1", "worker-2"]
    pids = {name: ray.get(old[name].call.remote(0, "location")).pid for name in ("worker-0", "worker-1")}
    os.kill(before, signal.SIGKILL)
    took_s, found = ray.get(controller.adopt.remote(1, 10.0), timeout=60)
    assert took_s < 2
    assert {name: report.location.pid for name, report in found.items()} == pids
    trains, idle = found["worker-0"], found["worker-1"]
    assert (trains.inside, trains.joined, trains.charter) == (True, True, assigned().charter)
    assert (idle.inside, idle.joined, idle.charter, idle.outcome.holds, idle.records) == (False, False, None, -1, [])
    assert {number for number, _ in trains.records} == {assigned().charter.number}
    until(lambda: len(ray.get(controller.told.remote())[0]) > 3, "it trains on, and reports to the new process")
    steps = [record.step for _, record in trains.records] + ray.get(controller.told.remote())[0]
    assert sorted(set(steps)) == list(range(max(steps) + 1))
    # It comes out as if nothing had been.
    ray.get(controller.call.remote("worker-0", "pause", 0))
    outcome = ray.get(controller.call.remote("worker-0", "rejoin", 0), timeout=30)
    assert (outcome.why, outcome.holds is not None and outcome.holds >= max(steps)) == ("paused", True)
    # What belongs to nobody is gone, and the process before has nothing to say any more.
    until(lambda: len(processes()) == 2 and len(places()) == 2, "the others are ended")
    with pytest.raises(StaleController):
        ray.get(old["worker-0"].call.remote(0, "location"))
    os.kill(pids["worker-1"], signal.SIGKILL)
    until(lambda: ray.get(controller.told.remote())[1] == ["worker-1"], "its death is heard of")
    ray.get(controller.shutdown.remote())
    until(nothing_left, "all is ended")


@RESTARTED
def test_a_worker_that_does_not_answer_is_ended(tmp_path: Path, controller: Any) -> None:
    ray.get([controller.start.remote(name, plan(tmp_path)) for name in ("worker-0", "worker-1")])
    stopped = ray.get(controller.call.remote("worker-1", "location")).pid
    os.kill(stopped, signal.SIGSTOP)
    took_s, found = ray.get(controller.adopt.remote(1, 2.0))
    assert list(found) == ["worker-0"]
    assert 2 <= took_s < 3
    until(lambda: len(processes()) == 1 and len(places()) == 1, "it is ended")


@pytest.mark.parametrize("controller", [0], indirect=True)
def test_workers_whose_controller_is_dead_for_good_end_and_leave_nothing(tmp_path: Path, controller: Any) -> None:
    ray.get([controller.start.remote(name, plan(tmp_path)) for name in ("worker-0", "worker-1")])
    ray.get(controller.stand_by.remote("worker-1"))
    # There is no room for the last three.
    ray.get([controller.claim.remote(f"worker-{number}") for number in range(2, 7)])
    until(lambda: len(actors_of(RUN)) == 8 and len(processes()) == 5, "all that have room are started")
    ray.kill(controller)
    until(nothing_left, "all is ended", 10.0)


@pytest.mark.slow
@RESTARTED
def test_a_controller_that_sleeps_is_ended_by_its_workers(tmp_path: Path, controller: Any) -> None:
    before = ray.get(controller.ready.remote())
    ray.get(controller.start.remote("worker-0", plan(tmp_path)))
    os.kill(before, signal.SIGSTOP)
    start = time.monotonic()
    assert ray.get(controller.ready.remote(), timeout=60) != before
    print(f"a controller that sleeps was replaced after {time.monotonic() - start:.1f} s")
    _, found = ray.get(controller.adopt.remote(1, 5.0))
    assert list(found) == ["worker-0"]
