"""Inject faults into a run that it must survive: kill its controller or one of its workers at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import RunEvent, Tail
from raytrain_plus.state.stored.manifest import FOLDER as CHECKPOINTS
from raytrain_plus.storage.interface import Folder

LOOK_S = 0.01
"""Seconds between two reads of a run's events."""
END_S = 30.0
"""Maximum seconds to reach the node of a process."""
MOMENTS = ("join", "recovery", "checkpoint", "end")
"""While the first group forms (a worker: once it has), while the group recovers from a loss, while a checkpoint is
written, and at the end."""

Who = Literal["controller", "worker"]


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A process that is killed once, at a moment of the run."""

    who: Who
    at: str | int
    """One of `MOMENTS`, or a number of committed steps."""

    def __str__(self) -> str:
        return f"kill {self.who} at={self.at}"


def read_fault(text: str) -> InjectedFault:
    """Return the fault that a user has asked for. Raises `InputError` if it is none.

    >>> read_fault("kill controller at=join"), read_fault("kill worker at=20").at
    (InjectedFault(who='controller', at='join'), 20)
    """
    found = re.fullmatch(r"kill (controller|worker) at=(\w+)", " ".join(text.split()))
    if found is None or not (found[2] in MOMENTS or found[2].isdecimal()):
        raise InputError(
            f"'{text}' is no fault",
            where="--fault",
            expected="'kill controller at=WHEN' or 'kill worker at=WHEN', where WHEN is "
            f"{', '.join(MOMENTS)} or a number of steps",
        )
    who: Who = "controller" if found[1] == "controller" else "worker"
    return InjectedFault(who, int(found[2]) if found[2].isdecimal() else found[2])


@dataclass
class ProcessesOfRun:
    """The processes of a run, and what it does, according to its events. Pure."""

    controller: dict[str, Any] = field(default_factory=dict)
    """The newest controller: `pid`, `node`."""
    members: list[dict[str, Any]] = field(default_factory=list)
    """Those of the newest group: `worker`, `pid`, `node`."""
    whole: bool = False
    """Whether no worker was lost since that group was formed."""
    committed: int = -1
    lost: int = 0
    replaced: int = 0
    """How many controllers took the place of another."""
    most: int = 0
    """Members of its largest group."""
    ends: bool = False
    """Whether it makes its last writes."""

    def add(self, event: RunEvent) -> None:
        """Take in the next event."""
        kind = event["kind"]
        if kind == "controller_started":
            self.controller = event
            self.replaced += bool(event["adopted"])
        elif kind == "view_formed":
            self.members, self.whole = event["members"], True
            self.most = max(self.most, len(self.members))
        elif kind == "worker_lost":
            self.whole = False
            self.lost += 1
            self.members = [one for one in self.members if one["worker"] != event["worker"]]
        elif kind == "step_committed":
            self.committed = event["step"]
        elif kind in ("saving", "run_finished"):
            self.ends = True

    def due(self, at: str | int, saves: bool) -> bool:
        """Return whether this moment has come; `saves`: whether a checkpoint is being written."""
        if isinstance(at, int):
            return self.committed + 1 >= at
        if at == "join":
            return bool(self.controller)
        if at == "recovery":
            return self.lost > 0 and not self.whole
        return saves if at == "checkpoint" else self.ends


def kill_process(node: str, pid: int) -> None:
    """Send SIGKILL to a process on the node with this Ray node id; do nothing if the process is gone."""
    if node == ray.get_runtime_context().get_node_id():
        _kill(pid)
        return
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(pid), timeout=END_S)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class FaultInjection:
    """Kill processes of a run at their moments, while this is open; says so on stderr."""

    def __init__(self, run: Folder, faults: Sequence[InjectedFault]) -> None:
        self._run, self._left, self._tail = run, list(faults), Tail(run)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run_to_the_end, name="faults", daemon=True)
        self._error: Exception | None = None

    def __enter__(self) -> FaultInjection:
        if self._left:
            # A run that resumes has events of earlier starts.
            with contextlib.suppress(FileNotFoundError):
                for _ in self._tail.read():
                    continue
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._error is not None:
            print(f"faults cannot be injected any more: {self._error}", file=sys.stderr)
        for fault in self._left:
            print(f"fault not injected, because the run ended before: {fault}", file=sys.stderr)

    def _run_to_the_end(self) -> None:
        try:
            self._watch()
        except Exception as error:
            self._error = error

    def _watch(self) -> None:
        tail, now = self._tail, ProcessesOfRun()
        while self._left and not self._over.wait(LOOK_S):
            for event in tail.read():
                now.add(event)
            saves = any(fault.at == "checkpoint" for fault in self._left) and _saves(self._run)
            for fault in [one for one in self._left if now.due(one.at, saves)]:
                victim = now.controller if fault.who == "controller" else next(iter(now.members), None)
                if victim:
                    kill_process(victim["node"], victim["pid"])
                    self._left.remove(fault)
                    print(f"fault injected: {fault} (process {victim['pid']})", file=sys.stderr)


def _saves(run: Folder) -> bool:
    """Return whether a checkpoint is in progress: parts of it are there, and it has no manifest."""
    files = {**run.files(CHECKPOINTS), **run.unfinished(CHECKPOINTS)}
    names = {name.split("/")[1].split(".")[0] for name in files}
    return any(f"{CHECKPOINTS}/{name}.json" not in files for name in names)
