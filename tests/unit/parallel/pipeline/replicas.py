"""A model replica whose stages are threads of one process and exchange tensors through queues."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from raytrain_plus.errors import Interrupted

LIMIT_S = 20.0

S = TypeVar("S")
T = TypeVar("T")

Mail = defaultdict[tuple[int, int, int], "queue.SimpleQueue[torch.Tensor]"]


class Sent:
    """A transfer that is complete at once."""

    def finish(self, what: str) -> None:
        pass


class Coming:
    """A transfer that completes later."""

    def __init__(self, box: queue.SimpleQueue[torch.Tensor], into: torch.Tensor) -> None:
        self._box, self._into = box, into

    def finish(self, what: str) -> None:
        try:
            self._into.detach().copy_(self._box.get(timeout=LIMIT_S))
        except queue.Empty:
            raise Interrupted(f"stopped waiting for {what}") from None


class Threads:
    """One stage's interface."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self.rank = rank
        self._mail = mail

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Sent:
        self._box(self.rank, to, tag).put(tensor.clone())
        return Sent()

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Coming:
        return Coming(self._box(source, self.rank, tag), tensor)

    def _box(self, *key: int) -> queue.SimpleQueue[torch.Tensor]:
        # A defaultdict can make two, one for the sender and one for the receiver, if both look at the same moment.
        source, to, tag = key
        return self._mail.setdefault((source, to, tag), queue.SimpleQueue())


def replica(stages: int, stage: Callable[[Threads], Any]) -> list[Any]:
    """Run `stage` once for each stage; return the results, or raise the first error."""
    mail: Mail = defaultdict(queue.SimpleQueue)
    return at_once(stage, [Threads(rank, mail) for rank in range(stages)])


def at_once(work: Callable[[S], T], given: Sequence[S]) -> list[T]:
    """Run `work` with each item on its own thread; return the results.

    Raises the first thread's error rather than the errors that follow from it.
    """
    with ThreadPoolExecutor(len(given)) as pool:
        running = [pool.submit(work, one) for one in given]
        errors = [error for one in running if (error := one.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, Interrupted)), errors[0])
    return [one.result() for one in running]


COMPUTES = threading.RLock()
"""Held by the thread that computes: random generators belong to the process."""
