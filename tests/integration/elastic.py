"""A Ray of several raylets on this machine, and a run on it that tests disturb."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from raytrain_plus import Data, Elastic, Job, Result, Workers, run
from raytrain_plus.audit.audit import audit
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.address import is_address
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import RUN_THREAD, TASKS, end_runs

Event = dict[str, Any]


@contextmanager
def raylets(count: int, cpus: int = 1, settings: dict[str, Any] | None = None, **node_args: Any) -> Iterator[Cluster]:
    """Start a head without CPUs for the controller, and `count` nodes of `cpus` each; `settings` are Ray's own."""
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": settings, **node_args}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=cpus, **node_args)
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield cluster
    except BaseException:
        # A run that is still alive would connect to Ray again while the cluster shuts down.
        end_runs()
        raise
    finally:
        ray.shutdown()
        cluster.shutdown()


def job(tmp_path: Path, **changes: Any) -> Job:
    """Return a job of 200 steps on up to four workers; a step changes every kind of state of its small model."""
    settings: dict[str, Any] = {
        "name": "run",
        "task": "tasks:Faulty",
        "seed": 11,
        "data": Data(path=str(tmp_path / "data"), batch_size=48, shards=8),
        "steps": 200,
        "clip_norm": 1.0,
        "workers": Workers(min=1, max=4),
        "elastic": Elastic(wait_s=30),
        "storage": str(tmp_path / "runs"),
    }
    args = {"folder": str(tmp_path), **changes.pop("args", {})}
    return Job(**{**settings, **changes, "args": args})


class Follower:
    """A view of a run that keeps its events."""

    def __init__(self, told: list[Event]) -> None:
        self._told = told

    def start(self, name: str, steps: int) -> None:
        """The run starts."""

    def event(self, event: Event) -> None:
        """The run reports an event."""
        self._told.append(event)

    def finish(self, result: Result) -> None:
        """The run has ended."""

    def close(self) -> None:
        """No more events follow."""


class Run:
    """A run in a thread of the test, and its events."""

    def __init__(self, job: Job, fresh: bool = True) -> None:
        self.job = job
        self._fresh = fresh
        self.folder = Path(job.storage) / job.name
        """The run's folder, if `storage` is a path."""
        self._thread = threading.Thread(target=self._run, name=RUN_THREAD, daemon=True)
        self.told: list[Event] = []
        """The events as a view of the run receives them."""
        self.result: Result | None = None
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = run(self.job, fresh=self._fresh, view=Follower(self.told), roots=[TASKS])
        except BaseException as error:
            self.error = error

    def events(self, kind: str | None = None) -> list[Event]:
        """Return the events so far; if `storage` is an address, only those of this run."""
        told = self.told if is_address(self.job.storage) else read_events(LocalFolder(self.folder))
        return [event for event in told if kind is None or event["kind"] == kind]

    def until(self, holds: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
        """Wait until `holds` returns something true, and return that."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = holds()
            if found:
                return found
            if not self._thread.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"{what}: not seen; {self.error or self.result}; the last events: {self.events()[-5:]}")

    def until_step(self, step: int) -> None:
        self.until(lambda: self.committed() >= step, f"step {step}")

    def until_told(self, kind: str, count: int = 1, timeout_s: float = 60) -> Event:
        """Wait for the event number `count` (from 1) of a kind, and return it."""
        told = self.until(lambda: self.events(kind)[count - 1 :], f"{kind} number {count}", timeout_s)
        return told[0]  # type: ignore[no-any-return]

    def committed(self) -> int:
        steps = self.events("step_committed")
        return steps[-1]["step"] if steps else -1

    def members(self) -> list[Event]:
        """Return the members of the newest view."""
        return self.events("view_formed")[-1]["members"]  # type: ignore[no-any-return]

    def until_size(self, count: int) -> list[Event]:
        """Wait for a view of `count` members, and return these."""
        self.until(lambda: self.events("view_formed") and len(self.members()) == count, f"{count} members")
        return self.members()

    def kill(self, member: Event, number: int = signal.SIGKILL) -> None:
        os.kill(member["pid"], number)

    def finish(self, timeout_s: float = 120) -> Result:
        """Wait for the run's end and return its result; raise what the run raised."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"the run did not end; the last events: {self.events()[-5:]}"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def losses(self) -> list[float]:
        """Return the loss of each step that no resumption made void; check that each was reported once, in order."""
        void = [(event["generation"], event["step"]) for event in self.events("resumed")]
        steps = [
            event
            for event in self.events("step_committed")
            if not any(event["generation"] < later and event["step"] > after for later, after in void)
        ]
        assert [event["step"] for event in steps] == list(range(len(steps)))
        return [event["loss"] for event in steps]


def ended(run: Run) -> tuple[str | None, list[float], dict[str, float]]:
    """Return hash, losses and metrics of a run; check that its audit is clean."""
    result = run.finish()
    assert result.status == "finished", result.error
    found = audit(result.path)
    assert found.clean, found.faults
    return result.state_sha256, run.losses(), dict(result.metrics)


def born(members: list[Event]) -> dict[int, float]:
    """Return process id -> start time of the process."""
    return {member["pid"]: psutil.Process(member["pid"]).create_time() for member in members}
