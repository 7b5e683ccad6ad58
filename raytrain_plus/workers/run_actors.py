"""Find and end a run's workers by their names in Ray, from any process of the cluster.

Both the actors and the placement groups of workers are detached: they outlive the controller that created them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from raytrain_plus.workers.epochs import PEER

NAMESPACE = "raytrain_plus"
"""The Ray namespace of controllers. A controller's name is the run's name, a slash, and a unique suffix."""
WORKERS = "raytrain_plus.workers"
"""The Ray namespace of the workers' actors."""
RESPOND_S = 4.0
"""Seconds in which a worker that can leave something responds; its machine may be busy.

Those that have found no room never respond, and all must be gone 10 s after their controller.
"""
WRITE_S = 300.0
"""Seconds without progress after which workers that write what they leave are not waited for."""
LOOK_S = 1.0
"""Seconds between two looks at how far they are."""


class NamedGroup(NamedTuple):
    """The resources of a worker."""

    name: str
    """The name of the placement group in Ray."""
    group: PlacementGroup


def name_in(run: str, name: str) -> str:
    """Return the full name of an actor or a placement group of a run; `run` is the name of the controller's actor."""
    return f"{run}/{name}"


def actors_of(run: str) -> dict[str, Any]:
    """Return the actors of a run's workers and standbys by their names; also those that have not started yet."""
    found = {}
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == WORKERS and one["name"].startswith(name_in(run, "")):
            # It may have ended in the meantime.
            with suppress(ValueError):
                found[one["name"]] = ray.get_actor(one["name"], namespace=WORKERS)
    return found


def places_of(run: str) -> list[NamedGroup]:
    """Return the placement groups of a run's workers, in the order of their names."""
    found = [
        NamedGroup(one["name"], PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))
        for number, one in placement_group_table().items()
        if one["state"] != "REMOVED" and one["name"].startswith(name_in(run, ""))
    ]
    return sorted(found, key=lambda place: place.name)


def hear(workers: Iterable[Any]) -> bool:
    """Return whether one of these actors of workers hears a controller."""
    return any(_answers([worker.hears.remote() for worker in workers]))


def leave(workers: Iterable[Any]) -> None:
    """Have these actors of workers write what the next controller of their run needs; return once they have."""
    asked = {worker.respond.remote(): worker for worker in workers}
    if asked:
        # Others are stopped, or have never started.
        responding, _ = ray.wait([*asked], num_returns=len(asked), timeout=RESPOND_S)
        leaving = {asked[one].leave.remote(): asked[one] for one in responding}

        def wait(limit_s: float) -> bool:
            for one in ray.wait([*leaving], num_returns=len(leaving), timeout=limit_s)[0] if leaving else ():
                del leaving[one]
            return not leaving

        wait_for_writers(wait, lambda: _answers([worker.call.remote(PEER, "writing") for worker in leaving.values()]))


def wait_for_writers(wait: Callable[[float], bool], written: Callable[[], object]) -> None:
    """Wait for workers that write what they leave, for at most `WRITE_S` without progress.

    `wait`: waits for up to so many seconds, and returns whether all have ended; `written`: how far they are.
    """
    before, until = written(), time.monotonic() + WRITE_S
    while not wait(LOOK_S) and time.monotonic() < until:
        if (now := written()) != before:
            before, until = now, time.monotonic() + WRITE_S


def _answers(asked: Sequence[Any]) -> list[Any]:
    """Return what actors of workers have answered in time, in the order of the questions."""
    found = []
    for one in ray.wait([*asked], num_returns=len(asked), timeout=RESPOND_S)[0] if asked else ():
        # It may have ended instead.
        with suppress(RayError):
            found.append(ray.get(one))
    return found


def clear(run: str, actor: str = "", place: str = "") -> None:
    """End all workers of a run, and remove their placement groups; several processes may do so at once.

    A worker gives the names of its own `actor`, which is spared, and `place`, which is removed last: Ray ends this
    process then.
    """
    own: list[NamedGroup] = []
    others: list[NamedGroup] = []
    with suppress(RayError):
        for one in places_of(run):
            (own if one.name == place else others).append(one)
    for one in others:
        remove(one)
    end_actors(run, actor)
    for one in own:
        remove(one)


def remove(place: NamedGroup) -> None:
    """Remove a placement group, which ends the worker in it."""
    with suppress(RayError):
        remove_placement_group(place.group)


def end_actors(run: str, spared: str) -> None:
    """End all actors of a run's workers but the spared one."""
    with suppress(RayError):
        for name, actor in actors_of(run).items():
            if name != spared:
                end_actor(actor)


def end_actor(actor: Any) -> None:
    """End an actor, whatever it does."""
    # A process that is gone already, with its node perhaps, cannot be ended.
    with suppress(RayError):
        ray.kill(actor)
