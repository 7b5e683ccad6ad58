"""Host the slices of a layer apart in one process, one for each thread, to try what several workers would compute."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from raytrain_plus.errors import Interrupted
from raytrain_plus.parallel.tensor.link import Link

Found = TypeVar("Found")

WAIT_S = 300.0
"""Seconds that a host waits for another: as long as a first step may take."""


class Hosts:
    """As many hosts as there are slices. One computes at a time, and the others go on when it waits for them.

    Random generators belong to the process: each host finds them as it has left them.
    """

    def __init__(self, count: int) -> None:
        """Prepare `count` hosts, a power of two."""
        self._count = count
        self._turn = threading.Lock()
        self._boxes: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor | None]] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._count))

    def link(self, host: int) -> Link:
        """Return the link of the slice that this host has."""
        return Link(host, self._count, lambda own, other: self._swapped(host, own, other))

    def run(self, works: Sequence[Callable[[], Found]]) -> list[Found]:
        """Return what each host's work returns. Raises the first error of one that has not waited in vain."""
        self._boxes = {(one, other): queue.SimpleQueue() for one in self for other in self}

        def of_host(host: int, work: Callable[[], Found]) -> Found:
            with self._turn:
                try:
                    return work()
                except BaseException:
                    for other in self:
                        self._boxes[host, other].put(None)
                    raise

        with ThreadPoolExecutor(self._count, thread_name_prefix="host of a slice") as pool:
            running = [pool.submit(of_host, host, work) for host, work in enumerate(works)]
            errors = [error for one in running if (error := one.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, Interrupted)), errors[0])
        return [one.result() for one in running]

    def _swapped(self, host: int, own: torch.Tensor, other: int) -> torch.Tensor:
        self._boxes[host, other].put(own)
        devices = [own.device] if own.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            self._turn.release()
            try:
                found = self._boxes[other, host].get(timeout=WAIT_S)
            except queue.Empty:
                found = None
            finally:
                self._turn.acquire()
        if found is None:
            raise Interrupted(f"host {other} of a slice did not get as far")
        return found
