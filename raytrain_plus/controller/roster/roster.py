"""Store what each worker reported about itself: its node, and the results of its preparation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from raytrain_plus.data.paths.sight import Sight
from raytrain_plus.membership.mesh import hosted_slices
from raytrain_plus.membership.owners import Owners
from raytrain_plus.membership.view import View
from raytrain_plus.workers.messages import PreparedReport, WorkerLocation


def who(location: WorkerLocation) -> dict[str, Any]:
    """Return how events name a worker."""
    return {"worker": location.worker, "pid": location.pid, "node": location.node}


def seated(
    view: View,
    locations: Mapping[str, WorkerLocation],
    params: Mapping[str, int],
    optimizer_bytes: Mapping[str, int] = MappingProxyType({}),
    slices: int = 1,
) -> list[dict[str, Any]]:
    """Return how events name the members of a view.

    `params`: how many parameters each of them trains. `optimizer_bytes`: those of its optimizer's state, if sharded.
    `slices`: the job's number of tensor slices.
    """

    def hosted(rank: int) -> dict[str, Any]:
        own = hosted_slices(slices, rank, view.shape.tensor_ranks)
        return {"tensor_rank": rank, "slices": list(own)} if slices > 1 else {}

    return [
        {
            **who(locations[member.worker]),
            "replica": member.place.replica,
            "stage": member.place.stage,
            "params": params[member.worker],
            "shards": list(member.shards),
            **hosted(member.place.tensor_rank),
            **({"optimizer_bytes": optimizer_bytes[member.worker]} if optimizer_bytes else {}),
        }
        for member in view.members
    ]


class Roster:
    """Every worker that ever started in this run, departed ones too."""

    def __init__(self) -> None:
        self._locations: dict[str, WorkerLocation] = {}
        self._ready: dict[str, PreparedReport] = {}
        self._sights: dict[str, Mapping[str, tuple[Sight, ...]]] = {}
        """For each node, what its first worker saw of the data files: its replacements compare their view with it."""

    def record_location(self, location: WorkerLocation) -> None:
        """Record where a worker's process runs."""
        self._locations[location.worker] = location

    def prepared(self, name: str, ready: PreparedReport) -> None:
        """Record what a worker reports once its task is built."""
        self._sights.setdefault(self.node(name), ready.sights)
        # Kept once per node: workers may come and go by the hundred.
        self._ready[name] = replace(ready, sights={})

    def node(self, name: str) -> str:
        """Return the node of a worker that has come."""
        return self._locations[name].node

    def nodes(self, names: Iterable[str]) -> set[str]:
        """Return the nodes of these workers, as far as they have come."""
        return {self._locations[name].node for name in names if name in self._locations}

    def on_node(self, node: str, names: Iterable[str]) -> list[str]:
        """Return which of these workers run on that node."""
        return [name for name in names if name in self._locations and self._locations[name].node == node]

    def address(self, name: str) -> str:
        """Return the address of the node of a worker that has come."""
        return self._locations[name].address

    def sights(self, node: str) -> Mapping[str, tuple[Sight, ...]]:
        """Return what the first worker on that node saw of the data; empty if there was none."""
        return self._sights.get(node, {})

    @property
    def ready(self) -> Mapping[str, PreparedReport]:
        """What each prepared worker has reported."""
        return self._ready

    @property
    def state_bytes(self) -> int:
        """The size of a copy of the training state; 0 before the first worker is prepared."""
        return max((ready.state_bytes for ready in self._ready.values()), default=0)

    def held_bytes(self, owners: Owners) -> dict[str, int]:
        """Return the bytes of the optimizer's state that each of these members holds: of the tensors with rows."""
        rows = next(iter(self._ready.values())).rows if self._ready else {}
        row_bytes = {name: state for name, (_, _, state) in rows.items()}
        return {name: own.size(row_bytes) for name, own in owners.items()}
