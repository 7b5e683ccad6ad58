"""Worlds for tensors of a device, in real processes with stand-ins for it: mixed operations, and what they leave.

`test_gpu_worlds` does the same with a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import sharing
from tests.integration.test_worlds import Member, form, members, reduced, server

pytestmark = pytest.mark.timeout(120)

Held = dict[str, int]
MIXED = 12
"""Rounds of operations that are started before any is waited for."""
FIRST = 5
"""Formings after which a process holds what it will hold."""
SLACK = {"descriptors": 0, "threads": 0, "device_bytes": 16 << 20, "host_bytes": 16 << 20}
"""By how much each may grow after that: memory by what allocators keep, and not with the number of formings."""
LOOKS = 4
"""Measurements of which the last counts: a device and its threads give back what they hold a while later."""


def mixed(size: int, kind: str) -> None:
    """Check operations on tensors of the device and of the host that are all under way at once."""
    with members(size, kind) as group, server(size) as (_, door):
        form(group, door)
        for member in group:
            member.tell(do="mix", count=MIXED)
        for rank, found in enumerate(member.hear() for member in group):
            assert found.get("results") == [results(size, rank, number) for number in range(MIXED)], found


def results(size: int, rank: int, number: int) -> list[list[float]]:
    """Return sum, gathered, exchanged and the own part of the sum, as one CPU computes them."""
    sent = [[float(column + one + number) for column in range(2 * size)] for one in range(size)]
    total = [float(sum(column)) for column in zip(*sent, strict=True)]
    own = slice(2 * rank, 2 * rank + 2)
    gathered = [value for one in sent for value in one]
    return [total, gathered, [value for one in sent for value in one[own]], total[own]]


def grown(kind: str, size: int, formings: int) -> list[dict[str, int]]:
    """Form and leave so many worlds in the same processes; return by how much each grew too much after the first."""
    with members(size, kind) as group:
        first: list[Held] = []
        for generation in range(formings):
            with server(size) as (_, door):
                answers = form(group, door, generation)
                assert answers == [{"rank": rank, "size": size} for rank in range(size)], answers
                assert reduced(group) == [{"value": sum(range(1, size + 1))}] * size
                closed(group)
            if generation + 1 == FIRST:
                first = [member.ask(do="held") for member in group]
        for _ in range(LOOKS):
            last = [member.ask(do="held") for member in group]
            found = [too_much(before, after) for before, after in zip(first, last, strict=True)]
            if not any(found):
                break
    print(f"{formings} formings of {size} ({kind}): {first[0]} after {FIRST}, {last[0]} after all")
    return found


def closed(group: list[Member]) -> None:
    """Let all members leave their world."""
    for member in group:
        member.tell(do="close")
    assert [member.hear() for member in group] == [{"closed": True}] * len(group)


def too_much(before: Held, after: Held) -> dict[str, int]:
    """Return what grew by more than `SLACK`."""
    growth = {name: after[name] - before[name] for name in SLACK}
    return {name: by for name, by in growth.items() if by > SLACK[name]}


KINDS = ["staged horovod", "staged torch", "nccl"]


@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_the_device_and_of_the_host_run_at_once(kind: str) -> None:
    mixed(3, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_formings_leave_nothing(kind: str) -> None:
    assert grown(kind, 2, 10) == [{}, {}]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_formings_leave_nothing(kind: str) -> None:
    assert grown(kind, 2, 100) == [{}, {}]


def test_ranks_share_a_gpu_by_what_their_nccl_allows() -> None:
    ours, theirs = (sharing(rank, (2, 29, 7)) for rank in range(2))
    assert ours["NCCL_HOSTID"] != theirs["NCCL_HOSTID"]
    assert ours["NCCL_SOCKET_IFNAME"] == "lo"
    assert sharing(0, (2, 30, 7)) == sharing(1, (2, 31, 0)) == sharing(None, (2, 30))
    assert sharing(0, (2, 30, 7))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_growth_beyond_what_allocators_keep_is_seen() -> None:
    before: dict[str, Any] = dict.fromkeys(SLACK, 10)
    assert too_much(before, {**before, "threads": 9, "host_bytes": 10 + SLACK["host_bytes"]}) == {}
    assert too_much(before, {**before, "descriptors": 12}) == {"descriptors": 2}
