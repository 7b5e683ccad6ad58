"""The workers' Ray side: a placement group and an actor each, started and ended together or one by one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytrain_plus.errors import WaitExpired, WorkerLost
from raytrain_plus.workers.actor import WorkerActor
from raytrain_plus.workers.plan import Place


@dataclass(frozen=True, slots=True)
class Handle:
    """One started worker."""

    name: str
    actor: Any
    group: PlacementGroup


class Pool:
    """The worker actors of one run. Names are never used again."""

    def __init__(self, cpus: float, gpus: float) -> None:
        self._need = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        self._started = 0
        self.handles: dict[str, Handle] = {}

    def start(self, count: int) -> list[str]:
        """Starts `count` workers; their names. They come up on their own: `places` waits for them."""
        names = []
        for _ in range(count):
            name = f"worker-{self._started}"
            self._started += 1
            group = placement_group([self._need or {"CPU": 0.001}], strategy="PACK")
            actor = (
                ray.remote(WorkerActor)
                .options(
                    num_cpus=self._need.get("CPU", 0),
                    num_gpus=self._need.get("GPU", 0),
                    max_restarts=0,
                    max_concurrency=6,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
                )
                .remote(name)
            )
            self.handles[name] = Handle(name, actor, group)
            names.append(name)
        return names

    def places(self, timeout_s: float) -> dict[str, Place]:
        """Where each worker is, once all are up. Raises `WaitExpired`, saying how many came."""
        refs = {handle.actor.call.remote("place"): name for name, handle in self.handles.items()}
        ready, missing = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
        if missing:
            raise WaitExpired(
                f"only {len(ready)} of {len(refs)} workers came up within {timeout_s:g} s "
                f"(each needs {_spell(self._need)}); free some of the cluster, or lower workers.min"
            )
        return {refs[ref]: get(ref, refs[ref], timeout_s) for ref in ready}

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Starts a worker's method; the reference of its answer, to be taken with `get`."""
        return self.handles[name].actor.call.remote(method, *arguments)

    def each(
        self, what: str, timeout_s: float, method: str, arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Calls `method` with its own arguments on each worker named, at once; the answers by name.

        The first error is raised as soon as it is there, as itself; `WaitExpired` says that `what` took too long.
        """
        pending = {self.call(name, method, *values): name for name, values in arguments.items()}
        answers: dict[str, Any] = {}
        deadline = time.monotonic() + timeout_s
        while pending:
            ready, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WaitExpired(f"{what} took more than {timeout_s:g} s on {', '.join(sorted(pending.values()))}")
            for ref in ready:
                name = pending.pop(ref)
                answers[name] = get(ref, name, timeout_s)
        return answers

    def tell(self, method: str) -> None:
        """Calls `method` on every worker without waiting."""
        for name in self.handles:
            self.call(name, method)

    def shutdown(self) -> None:
        """Ends every worker and frees its place."""
        for handle in self.handles.values():
            ray.kill(handle.actor)
            remove_placement_group(handle.group)
        self.handles.clear()


def get(ref: Any, worker: str, timeout_s: float) -> Any:
    """The answer of a worker's call. Errors of the call are raised as themselves, a death as `WorkerLost`."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise WorkerLost(f"{worker} died: {_first_line(error)}") from None
    except GetTimeoutError as error:
        raise WaitExpired(f"{worker} did not answer within {timeout_s:g} s") from error


def _first_line(error: BaseException) -> str:
    """The cause in Ray's message, which is many lines long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "cause" in line.lower() or "exit" in line.lower()]
    return (causes or lines or [type(error).__name__])[0]


def _spell(need: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in need.items()) or "nothing"
