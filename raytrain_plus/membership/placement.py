"""Choose which worker takes which seat, given the node of each. Pure.

The workers of a replica exchange activations, and those of one stage sums in every layer, so they belong on one node.
Replicas are spread over nodes, so that the end of a node reaches few. In order of importance:

1. No more state moves than without nodes: a worker that was a member, or holds a stage, takes the stage and tensor rank
   that `mesh.seated` gives it, since a state that moves costs more than a link between nodes. Members of a replica that
   continues keep their seats. This module chooses the replica of the others, and which newcomers join.
2. Replicas that lie on one node; then stages, each with all its tensor ranks, that do.
3. Replicas of equal number on all nodes; those that form together stand in the order of nodes, so that neighbours in a
   ring share one where possible.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from raytrain_plus.membership.mesh import Shape, remaining, seated


def placed(
    before: Sequence[str],
    old: Shape,
    available: Collection[str],
    new: Shape,
    holding: Mapping[str, int],
    nodes: Mapping[str, str],
) -> tuple[str, ...]:
    """Return which of the `available` workers sits in each seat of `new`; `nodes`: the node of each of them.

    The other arguments are those of `mesh.seated`, whose answer this is if all workers are on one node.

    >>> nodes = {"a": "x", "b": "y", "c": "x", "d": "y"}
    >>> placed((), Shape(1), "abcd", Shape(2, 2), {}, nodes)
    ('a', 'c', 'b', 'd')
    >>> placed("acbd", Shape(2, 2), "abdef", Shape(2, 2), {}, {**nodes, "e": "y", "f": "x"})
    ('a', 'f', 'b', 'd')
    """
    found = seated(before, old, available, new, holding)
    order = tuple(dict.fromkeys(nodes[worker] for worker in available))
    if len(order) == 1:
        return found
    stays = remaining(before, old, available, new)
    seats = [worker if worker == there else None for worker, there in zip(found, stays, strict=True)]
    unseated = _Unseated(order, nodes, new.stages * new.tensor_ranks)
    for seat, worker in enumerate(found):
        if seats[seat] is None:
            unseated.add(new.stage(seat).index, worker if worker in before or worker in holding else None)
    for worker in available:
        if worker not in before and worker not in holding:
            unseated.fresh[nodes[worker]].append(worker)
    replicas = new.lines("stage", "tensor_rank")
    empty = [replica for replica in replicas if not any(seats[seat] for seat in replica)]
    _fill(seats, replicas, new, unseated)
    _order_by_node(seats, [replica for replica in empty if seats[replica[0]]], unseated)
    _fill(seats, new.lines("tensor_rank"), new, unseated)
    _fill(seats, [(seat,) for seat in range(new.size)], new, unseated)
    return tuple(map(str, seats))


class _Unseated:
    """The workers that have no seat yet."""

    def __init__(self, order: Sequence[str], nodes: Mapping[str, str], positions: int) -> None:
        """`order`: the nodes; the first of equal ones is taken. `positions`: those of one replica."""
        self.order, self.nodes = order, nodes
        self.known: list[dict[str, list[str]]] = [defaultdict(list) for _ in range(positions)]
        """For each position, by node, the workers that must take it, in any replica."""
        self.open = [0] * positions
        """For each position, how many of its seats newcomers take."""
        self.fresh: dict[str, list[str]] = defaultdict(list)
        """The newcomers by node: they may take any position."""

    def add(self, position: int, worker: str | None) -> None:
        """Add an empty seat at a position, and the worker that must take such a one; None for a newcomer."""
        if worker is None:
            self.open[position] += 1
        else:
            self.known[position][self.nodes[worker]].append(worker)

    def can_fill(self, positions: Sequence[int], node: str) -> bool:
        """Return whether workers on this node can take all these positions of a replica."""
        new = [position for position in positions if not self.known[position][node]]
        return len(new) <= len(self.fresh[node]) and all(self.open[position] for position in new)

    def take(self, position: int, node: str) -> str:
        """Return a worker on this node for a position; it is no longer unseated."""
        if known := self.known[position][node]:
            return known.pop(0)
        self.open[position] -= 1
        return self.fresh[node].pop(0)

    def count(self, node: str) -> int:
        """Return the number of unseated workers on this node."""
        return len(self.fresh[node]) + sum(len(known[node]) for known in self.known)


def _fill(seats: list[str | None], lines: Sequence[tuple[int, ...]], shape: Shape, unseated: _Unseated) -> None:
    """Fill the empty seats of each line that then lies on one node."""
    nodes, each = unseated.nodes, len(unseated.known)

    def nodes_of(line: Sequence[int]) -> list[str]:
        return [nodes[worker] for seat in line if (worker := seats[seat]) is not None]

    replicas = Counter(node for replica in shape.lines("stage", "tensor_rank") for node in set(nodes_of(replica)))
    # A line with members has no choice between nodes, so it comes first.
    for line in sorted(lines, key=lambda line: not nodes_of(line)):
        empty = [seat for seat in line if seats[seat] is None]
        positions, there = [seat % each for seat in empty], set(nodes_of(line))
        able = [node for node in unseated.order if there <= {node} and unseated.can_fill(positions, node)]
        if not (empty and able):
            continue
        first = line[0] - line[0] % each
        in_replica = Counter(nodes_of(range(first, first + each)))
        slices = line[0] - line[0] % shape.tensor_ranks
        in_stage = Counter(nodes_of(range(slices, slices + shape.tensor_ranks)))
        spread = replicas if len(line) == each else Counter[str]()
        node = max(able, key=lambda one: (in_stage[one], in_replica[one], -spread[one], unseated.count(one)))
        for seat, position in zip(empty, positions, strict=True):
            seats[seat] = unseated.take(position, node)
        replicas[node] += not in_replica[node]


def _order_by_node(seats: list[str | None], replicas: Sequence[tuple[int, ...]], unseated: _Unseated) -> None:
    """Exchange whole replicas, each on one node, so that those of a node follow each other."""
    rows = [[seats[seat] for seat in replica] for replica in replicas]
    rows.sort(key=lambda row: unseated.order.index(unseated.nodes[str(row[0])]))
    for replica, row in zip(replicas, rows, strict=True):
        for seat, worker in zip(replica, row, strict=True):
            seats[seat] = worker
