"""Worlds of processes."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.collective.solo import SoloWorld
from tests.gpu import sharing

MEMBER = Path(__file__).parents[1] / "integration" / "world_member.py"


LIMIT_S = 10.0
"""Half of the time, in seconds, for which a member of these worlds waits for another by itself."""


class Member:
    """A process that executes commands from its standard input and answers each with one JSON line."""

    def __init__(
        self, kind: str, where: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.process = subprocess.Popen(
            [*where, sys.executable, str(MEMBER), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(MEMBER.parents[2]), **environment},
        )

    def tell(self, **order: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return {"died": self.process.wait(10)}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        self.tell(**order)
        return self.hear()


@contextmanager
def members(count: int, kind: str) -> Iterator[list[Member]]:
    with ExitStack() as stack:
        # A member that is killed leaves files there.
        own = {"TMPDIR": stack.enter_context(TemporaryDirectory())}
        environments = [own | sharing(rank) if "gpu" in kind.split() else own for rank in range(count)]
        group = [stack.enter_context(started(kind, environment=one)) for one in environments]
        for member in group:
            assert member.hear() == {"up": True}
        yield group


@contextmanager
def started(
    kind: str, where: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Member]:
    """Start a member whose command begins with `where`; kill it on exit."""
    member = Member(kind, where, environment)
    try:
        yield member
    finally:
        member.process.kill()
        member.process.wait(10)
        for pipe in (member.process.stdin, member.process.stdout):
            assert pipe is not None
            pipe.close()


class Door(NamedTuple):
    """A rendezvous as members see it: the port to connect to, and the server that admits them."""

    port: int
    rendezvous: RendezvousServer


@contextmanager
def server(size: int) -> Iterator[tuple[RendezvousServer, Door]]:
    rendezvous = RendezvousServer("127.0.0.1", size=size, peers=["127.0.0.1"])
    port = rendezvous.start()
    try:
        yield rendezvous, Door(port, rendezvous)
    finally:
        rendezvous.close()


def formation(rank: int, size: int, door: Door, generation: int = 0) -> dict[str, Any]:
    return {
        "generation": generation,
        "name": f"g{generation}",
        "rank": rank,
        "size": size,
        "address": "127.0.0.1",
        "server": ["127.0.0.1", door.port],
        "timeout_s": 2 * LIMIT_S,
        "credentials": asdict(door.rendezvous.credentials(rank)),
    }


def form(group: list[Member], door: Door, generation: int = 0) -> list[dict[str, Any]]:
    for rank, member in enumerate(group):
        member.tell(do="form", formation=formation(rank, len(group), door, generation))
    return [member.hear() for member in group]


def check_reductions(size: int, kind: str, on_host: bool = False) -> None:
    """Check sums and maxima; `on_host`: of tensors of the host, if there is a device."""
    with members(size, kind) as group:
        for generation in range(2):  # a process can join one world after the other
            with server(size) as (_, door):
                assert form(group, door, generation) == [{"rank": rank, "size": size} for rank in range(size)]
            for operation, expected in (("sum", sum(range(1, size + 1))), ("max", size)):
                for dtype in ("float32", "float64", "int64"):
                    for member in group:
                        member.tell(do="reduce", dtype=dtype, operation=operation, length=1000, on_host=on_host)
                    assert [member.hear() for member in group] == [{"value": expected}] * size, (operation, dtype)
            for member in group:
                member.tell(do="close")
            assert [member.hear() for member in group] == [{"closed": True}] * size


def check_moves(size: int, kind: str, on_host: bool = False) -> None:
    """Check what is gathered, exchanged, and summed in parts; `on_host` as in `check_reductions`."""
    sent = [[number + 20 * rank for number in range(3 * size)] for rank in range(size)]
    with members(size, kind) as group, server(size) as (_, door):
        form(group, door)
        for member in group:
            member.tell(do="move", on_host=on_host)
        for rank, found in enumerate(member.hear() for member in group):
            own = slice(3 * rank, 3 * rank + 3)
            for dtype in ("float32", "bfloat16", "float16", "int16", "uint8"):
                gathered, exchanged = found[f"torch.{dtype}"]
                assert gathered == [number for numbers in sent for number in numbers]
                assert exchanged == [number for numbers in sent for number in numbers[own]]
            for dtype in ("float32", "float64"):
                expected = [sum(number + other for other in range(size)) for number in range(3 * size)][own]
                assert found[f"sum torch.{dtype}"] == expected


def check_bits(kind: str) -> None:
    """Check that a sum of one writer's bits and of zeros has these bits."""
    with members(2, kind) as group, server(2) as (_, door):
        form(group, door)
        for member in group:
            member.tell(do="bits")
        # One writer, 2^62 + 1 and a float's bits: they arrive unchanged.
        assert [member.hear() for member in group] == [{"same": True}] * 2


def check_relay(kind: str) -> None:
    """Check tensors that are sent from each member to the next one."""
    with members(3, kind) as group, server(3) as (_, door):
        form(group, door)
        for length in (1, 100_000):
            for member in group:
                member.tell(do="relay", length=length)
            expected = [{"values": [number + rank for number in range(3)]} for rank in range(3)]
            assert [member.hear() for member in group] == expected


def reduced(group: list[Member]) -> list[dict[str, Any]]:
    for member in group:
        member.tell(do="reduce", dtype="float32", operation="sum", length=1000)
    return [member.hear() for member in group]


def kill_in_all_reduce(
    rounds: int, kind: str, doing: str, length: int = 200_000, limit_s: float = LIMIT_S
) -> dict[str, int]:
    """Kills one of three in mid-reduction, `rounds` times; how many survivors left in time, were late, or died."""
    counted = {"out": 0, "late": 0, "died": 0, "formed again": 0}
    left: list[float] = []
    formed: list[dict[str, float]] = []
    for number in range(rounds):
        with members(3, kind) as group, server(3) as (rendezvous, door):
            assert all("rank" in answer for answer in form(group, door))
            assert reduced(group) == [{"value": 6}] * 3
            listening = [address for addresses in rendezvous.published().values() for address in addresses]
            for member in group:
                member.tell(do=doing, length=length + 1000 * (number % 7))
            time.sleep(0.2 + 0.013 * (number % 11))
            victim = number % 3
            os.kill(group[victim].process.pid, signal.SIGKILL)
            start = time.monotonic()
            survivors = [member for rank, member in enumerate(group) if rank != victim]
            for member in survivors:
                member.tell(do="cut", listening=listening)
            for member in survivors:
                answer = member.hear()
                left.append(time.monotonic() - start)
                assert "AssertionError" not in answer.get("error", ""), answer
                in_time = left[-1] < limit_s and "interrupted" in answer
                counted["died" if "died" in answer else "out" if in_time else "late"] += 1
            if all(member.process.poll() is None for member in survivors):
                with server(2) as (_, second):
                    answers = form(survivors, second, generation=1)
                again = all("rank" in answer for answer in answers) and reduced(survivors) == [{"value": 3}] * 2
                counted["formed again"] += again
                formed += [member.ask(do="times") for member in survivors]
    print(f"{rounds} kills of one in three ({kind}, {doing}): {counted}, slowest survivor out after {max(left):.3f} s")
    print_stalls(left, formed)
    return counted


def print_stalls(left: Sequence[float], formed: Sequence[dict[str, float]]) -> None:
    """Print how long a death delays the sums if the host sums while NCCL forms, and if all wait for NCCL.

    `left`: seconds until survivors were out; `formed`: those until each could sum again, after it was told to form.
    """
    formed = [one for one in formed if "nccl" in one]
    if formed:
        out = statistics.median(left)
        host, nccl = (statistics.median(one[key] for one in formed) for key in ("host", "nccl"))
        print(f"median stall: out {out:.3f} s; with the bridge {out + host:.3f} s; without {out + nccl:.3f} s")


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


class Doubling(SoloWorld):
    """A world of two members with the same values; notes what is started."""

    size = 2

    def __init__(self) -> None:
        self.started: list[str] = []
        self.sent: dict[int, torch.Tensor] = {}
        self.closed = False

    def reduce(self, tensor: torch.Tensor, name: str, operation: Any = "sum") -> Any:
        self.started.append(name)
        tensor.mul_(2)
        return super().reduce(tensor, name)

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        self.started.append(name)
        into.view(2, -1).copy_(tensor.view(1, -1).expand(2, -1))
        return super().reduce(tensor, name)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        self.sent[tag] = tensor.clone()
        return Arrived()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        tensor.copy_(self.sent[tag])
        return Arrived()

    def close(self) -> None:
        self.closed = True


class Arrived:
    def finish(self, what: str) -> None:
        """It has."""
