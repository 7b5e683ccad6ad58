"""One member of a world, controlled by lines of JSON on standard input. Not a test itself.

Its argument consists of words: the world of the host (`horovod` or `torch`); `staged` if tensors are those of a device,
`nccl` if NCCL sums these once it has formed, or with `peers` sends them; `gpu` if the device is a GPU. Otherwise
stand-ins take the GPU's place: copies that are late, and a second world of the host that hangs as NCCL does.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import torch

from raytrain_plus.collective import nccl_peers, nccl_world
from raytrain_plus.collective.horovod_world import HorovodWorld, load_horovod
from raytrain_plus.collective.interrupt import close_connections
from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.member_credentials import Credentials
from raytrain_plus.collective.nccl import Library, Nccl
from raytrain_plus.collective.nccl_peers import NcclPeers
from raytrain_plus.collective.nccl_world import NcclWorld
from raytrain_plus.collective.staged import StagedWorld
from raytrain_plus.collective.torch_world import TorchWorld
from raytrain_plus.collective.world import wait
from raytrain_plus.device_copies import HostCopies
from raytrain_plus.errors import Interrupted
from tests.hanging_nccl import HangingNccl
from tests.late_copies import LateCopies

WORDS = sys.argv[1].split()
KIND = "horovod" if "horovod" in WORDS else "torch"
STAGED, NCCL, GPU = ("staged" in WORDS or "nccl" in WORDS), "nccl" in WORDS, "gpu" in WORDS
PEERS = "peers" in WORDS
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
FORM_S = 60.0
"""Limit, in seconds, of waiting for NCCL to form."""
SETTLE_S = 5.0
"""Limit, in seconds, of waiting for what a closed world leaves to its threads, before what is held is measured."""


class Member:
    """Holds the world; collectives run on one thread, so that commands can arrive meanwhile."""

    def __init__(self) -> None:
        self.world: Any = None
        self.left = False
        self.seconds: dict[str, float] = {}
        """How long the parts of the newest world took to form."""

    def interrupted(self) -> bool:
        """Return whether to leave a wait. Horovod's work must end by the cut alone; torch's sometimes cannot."""
        return self.left and KIND == "torch"

    def form(self, order: dict[str, Any]) -> dict[str, Any]:
        given = order["formation"]
        credentials = Credentials(given["credentials"]["token"], tuple(given["credentials"]["link_keys"]))
        formation = Invitation(**{**given, "server": tuple(given["server"]), "credentials": credentials})
        if self.world is not None:
            self.world.close()
            self.world = None
        self.left = False
        names = set(os.environ)
        start = time.monotonic()
        self.world = HorovodWorld(formation) if KIND == "horovod" else TorchWorld(formation)
        if STAGED:
            self.world = StagedWorld(self.world, HostCopies(DEVICE) if GPU else LateCopies(), self.interrupted).start()
        self.seconds = {"host": time.monotonic() - start}
        if NCCL:
            self.world = self._with_nccl(self.world, start)
        assert set(os.environ) == names, "a thread that looks one up meanwhile would end the process"
        return {"rank": self.world.rank, "size": self.world.size}

    def _with_nccl(self, host: StagedWorld, start: float) -> NcclWorld | NcclPeers:
        """Return a world that uses NCCL; note when the host's could be used, and when NCCL had formed."""
        library: Library = Nccl(DEVICE) if GPU else HangingNccl()
        pairs = itertools.permutations(range(host.size), 2)
        world: NcclWorld | NcclPeers = (
            NcclPeers(host, pairs, FORM_S, self.interrupted).join(library)
            if PEERS
            else NcclWorld(host, FORM_S, self.interrupted).join(library)
        )
        self.seconds = {"host": time.monotonic() - start}
        while world.forming:
            if world.why_never or self.interrupted():
                world.close()
                raise Interrupted(f"the world did not form: NCCL did not: {world.why_never}")
            time.sleep(0.001)
        self.seconds["nccl"] = time.monotonic() - start
        # All members are told to go on only when all have answered.
        world.use_formed()
        return world

    def times(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return after how many seconds the newest world could sum in the host's memory, and by NCCL."""
        return dict(self.seconds)

    def measure(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return the seconds of each of some sums of ones, after a first one that does not count."""
        tensor, seconds = torch.empty(order["length"], device=DEVICE), []
        for number in range(order["count"] + 1):
            tensor.fill_(1)
            self._settle()
            start = time.monotonic()
            wait([self.world.reduce(tensor, f"measured {number}")], "a test", 60)
            self._settle()
            seconds.append(time.monotonic() - start)
        assert (tensor == self.world.size).all()
        return {"seconds": seconds[1:]}

    def _settle(self) -> None:
        if GPU:
            torch.cuda.synchronize(DEVICE)

    def held(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return what this process holds, once it no longer changes: descriptors, threads and memory, in bytes."""
        process, before = psutil.Process(), None
        until = time.monotonic() + SETTLE_S
        while True:
            gc.collect()
            found = {"descriptors": process.num_fds(), "threads": process.num_threads()}
            found |= {"device_bytes": _device_bytes()}
            if found == before or time.monotonic() > until:
                return {**found, "host_bytes": process.memory_full_info().uss}
            before = found
            time.sleep(0.1)

    def reduce(self, order: dict[str, Any]) -> dict[str, Any]:
        where = torch.device("cpu") if order.get("on_host") else DEVICE
        tensor = torch.full((order["length"],), self.world.rank + 1, device=where).to(getattr(torch, order["dtype"]))
        wait([self.world.reduce(tensor, f"{order['dtype']}.{order['operation']}", order["operation"])], "a test", 20)
        assert (tensor == tensor[0]).all()
        return {"value": tensor[0].item()}

    def move(self, order: dict[str, Any]) -> dict[str, Any]:
        """Gather, exchange and sum numbers that tell who sent them, of several dtypes."""
        world, size, rank = self.world, self.world.size, self.world.rank
        found: dict[str, Any] = {}
        where = torch.device("cpu") if order.get("on_host") else DEVICE
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.uint8):
            mine = torch.arange(3 * size, device=where).to(dtype) + 20 * rank
            into = torch.empty(3 * size * size, dtype=dtype, device=where)
            wait([world.gather(mine, into, f"{dtype}.gather")], "a test", 20)
            parts = torch.empty_like(mine)
            wait([world.exchange(mine, parts, f"{dtype}.exchange")], "a test", 20)
            found[str(dtype)] = [into.tolist(), parts.tolist()]
        for dtype in (torch.float32, torch.float64):
            part = torch.empty(3, dtype=dtype, device=where)
            numbers = torch.arange(3.0 * size, device=where).to(dtype) + rank
            wait([world.reduce_scatter(numbers, part, f"{dtype}.scatter")], "a test", 20)
            found[f"sum {dtype}"] = part.tolist()
        return found

    def mix(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start operations on tensors of the device and of the host, one after the other, and only then wait."""
        world, size, rank = self.world, self.world.size, self.world.rank
        works, results = [], []
        for number in range(order["count"]):
            where = DEVICE if number % 2 else torch.device("cpu")
            numbers = torch.arange(2.0 * size, device=where) + rank + number
            sums, into, part = numbers.clone(), torch.empty(2 * size * size, device=where), numbers.new_empty(2)
            parts = torch.empty_like(numbers)
            works += [
                world.reduce(sums, f"{number}.sum"),
                world.gather(numbers, into, f"{number}.gather"),
                world.exchange(numbers, parts, f"{number}.exchange"),
                world.reduce_scatter(numbers, part, f"{number}.scatter"),
            ]
            results.append([sums, into, parts, part])
        wait(works, "a test", 20, self.interrupted)
        return {"results": [[tensor.tolist() for tensor in one] for one in results]}

    def bits(self, order: dict[str, Any]) -> dict[str, Any]:
        written = np.array(
            [2**62 + 1, np.float64(0.1).view(np.int64), np.float64("nan").view(np.int64)], dtype=np.int64
        )
        tensor = torch.from_numpy(written.copy() if self.world.rank == 1 else np.zeros(3, dtype=np.int64)).to(DEVICE)
        wait([self.world.reduce(tensor, "bits")], "a test", 20)
        return {"same": bool((tensor.cpu().numpy() == written).all())}

    def reduce_forever(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._closing():
            while True:
                tensor = torch.ones(order["length"], device=DEVICE)
                wait([self.world.reduce(tensor, "forever")], "a test", 20, self.interrupted)

    def flood(self, order: dict[str, Any]) -> dict[str, Any]:
        """Enqueue many sums, and only then wait: a death occurs during enqueuing."""
        with self._closing():
            while True:
                names = [f"flood.{number}" for number in range(300)]
                length = order["length"] // 1000
                works = [self.world.reduce(torch.ones(length, device=DEVICE), name) for name in names]
                wait(works, "a test", 20, self.interrupted)

    def agree(self, order: dict[str, Any]) -> dict[str, Any]:
        """Compute small sums with known results: each reported success must be right."""
        with self._closing():
            number = 1000
            while True:
                number += 1
                tensor = torch.tensor([number], device=DEVICE)
                wait([self.world.reduce(tensor, "agree", "max")], "a test", 20, self.interrupted)
                if tensor.item() != number:
                    raise AssertionError(f"the maximum of {number} everywhere is {tensor.item()}")

    def look(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return whether a sum has ended, and after how many seconds that is known, if another member is late."""
        if self.world.rank:
            time.sleep(1.0)
        work, start = self.world.reduce(torch.ones(1000), "looked at"), time.monotonic()
        found = {"ended": work.ended(0.0), "seconds": time.monotonic() - start}
        wait([work], "a test", 20)
        return {**found, "ends": work.ended(0.0)} if KIND == "torch" else found

    def wait_for_others(self, order: dict[str, Any]) -> dict[str, Any]:
        """Return how much of a core this process uses while it waits in each sum for a member that sleeps first."""
        used, start = time.process_time(), time.monotonic()
        for _ in range(20):
            if self.world.rank:
                time.sleep(0.1)
            wait([self.world.reduce(torch.ones(1000), "late")], "a test", 20)
        return {"cores": (time.process_time() - used) / (time.monotonic() - start)}

    def relay(self, order: dict[str, Any]) -> dict[str, Any]:
        """Pass what the previous member sent on to the next one, three tensors at once, last ones first."""
        world, size = self.world, self.world.size
        tensors = [torch.full((order["length"],), float(number), device=DEVICE) for number in range(3)]
        if world.rank:
            coming = [world.receive(tensor, world.rank - 1, number) for number, tensor in enumerate(tensors)]
            for one in reversed(coming):
                one.finish("a test")
        going = []
        if world.rank + 1 < size:
            going = [world.send(tensor + 1, world.rank + 1, number) for number, tensor in enumerate(tensors)]
        for one in going:
            one.finish("a test")
        return {"values": [tensor[-1].item() for tensor in tensors]}

    def send_to_nobody(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._closing():
            self.world.send(torch.zeros(order["length"]), order["to"], 78).finish("a member to take a tensor")
            return {"never": True}

    def await_nothing(self, order: dict[str, Any]) -> dict[str, Any]:
        with self._closing():
            self.world.receive(torch.zeros(10), order["source"], 77).finish("a tensor that never comes")
            return {"never": True}

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self.close({})

    def close(self, order: dict[str, Any]) -> dict[str, Any]:
        self.world.close()
        self.world = None
        return {"closed": True}


def _device_bytes() -> int:
    """Return the GPU's memory in use, by all processes, without what this one's allocator keeps."""
    if not GPU:
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


def main() -> None:
    member = Member()
    if NCCL and not GPU:
        # The stand-in has no device: floating numbers count as those of one.
        nccl_world.on_host = nccl_peers.on_host = lambda tensor: not tensor.is_floating_point()
    printing = threading.Lock()

    def say(answer: dict[str, Any]) -> None:
        with printing:
            print(json.dumps(answer), flush=True)

    def told(future: Future[dict[str, Any]]) -> None:
        error = future.exception()
        if isinstance(error, Interrupted):
            say({"interrupted": str(error)})
        elif error is not None:
            say({"error": f"{type(error).__name__}: {error}"})
        else:
            say(future.result())

    if KIND == "horovod":
        load_horovod()
    if GPU:
        # Adds a variable to the environment, and takes seconds, which are no part of forming a world.
        torch.cuda.init()
        torch.ones(1, device=DEVICE).add_(1).item()
    if NCCL and GPU:
        Nccl(DEVICE)
    say({"up": True})
    with ThreadPoolExecutor(1) as pool:
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "cut":
                member.left = True
                close_connections(
                    [(address, port) for address, port in order["listening"]], listeners=KIND == "horovod"
                )
            else:
                pool.submit(getattr(member, order["do"]), order).add_done_callback(told)


if __name__ == "__main__":
    main()
