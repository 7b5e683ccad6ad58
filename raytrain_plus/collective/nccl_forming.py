"""Communicators that form on a thread of their own, all of a member's or none, while something else does their work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from typing_extensions import Self

from raytrain_plus.collective.nccl import ID_BYTES, Communicator, Library, settle
from raytrain_plus.collective.world import World, wait
from raytrain_plus.errors import Interrupted, RaytrainError

log = logging.getLogger(__name__)

LEAVE_S = 0.05
"""Limit, in seconds, of waiting for the aborts, or for the thread, which may be inside of NCCL.

An abort ends at once what is under way, which is all that others wait for. Then it frees everything before it returns.
That waits for the whole GPU, so for other communicators of this process: all are aborted at once.
"""
NAME = "the ids of NCCL's members"


class Wanted(NamedTuple):
    """A communicator to form: its id, this member's rank in it, and how many members it has."""

    shared_id: bytes
    rank: int
    size: int


def new_id(library: Library) -> bytes:
    """Return an id for the members of a communicator; an empty one, with which none forms, if NCCL gives none."""
    try:
        return library.new_id()
    except Exception as error:
        log.warning("NCCL gives no id: %s", error)
        return b""


def shared_ids(host: World, own: Sequence[bytes], limit_s: float, interrupted: Callable[[], bool]) -> list[list[bytes]]:
    """Return the ids that each member gives, by its rank. All give as many; an id that no one uses may be empty.

    Raises `Interrupted` if a member does not answer within `limit_s`, or `interrupted` returns True; `host` is left
    then.
    """
    everyone = torch.zeros(host.size, len(own), ID_BYTES // 8, dtype=torch.int64)
    joined = bytearray(b"".join(one.ljust(ID_BYTES, b"\0") for one in own))
    everyone[host.rank] = torch.frombuffer(joined, dtype=torch.int64).view(len(own), -1)
    try:
        # Each is summed with the zeros of the others.
        wait([host.reduce(everyone, NAME)], NAME, limit_s, interrupted)
    except Exception as error:
        host.close()
        raise error if isinstance(error, RaytrainError) else Interrupted(f"NCCL has no id: {error}") from error
    return [[one.tobytes() for one in of_member] for of_member in everyone.numpy()]


class Forming:
    """Communicators under way: formed, not yet, or never."""

    def __init__(
        self,
        library: Library,
        wanted: Sequence[Wanted],
        limit_s: float,
        prepare: Callable[[Sequence[Communicator], Callable[[], bool]], object] = lambda *_: None,
    ) -> None:
        """Prepare to form all that are wanted, each within `limit_s`.

        `prepare` makes their first use on the same thread; it hears whether they are left meanwhile.
        """
        self._library = library
        self._wanted = wanted
        self._limit_s = limit_s
        self._prepare = prepare
        self._left = threading.Event()
        self._lock = threading.Lock()
        self._aborts: list[threading.Thread] = []
        self._formed: Future[list[Communicator]] = Future()
        self._thread = threading.Thread(target=self._form, name="forms NCCL", daemon=True)

    def start(self) -> Self:
        """Begin to form them; return this."""
        self._thread.start()
        return self

    @property
    def ended(self) -> bool:
        """Whether all have formed."""
        return self._formed.done() and self._formed.exception() is None

    @property
    def failure(self) -> str:
        """Why they will never form; empty if they may, or have."""
        error = self._formed.exception() if self._formed.done() else None
        return "" if error is None else str(error)

    def communicators(self) -> list[Communicator]:
        """Return them, in order; all have formed."""
        return self._formed.result(0)

    def left(self) -> bool:
        """Return whether they are left."""
        return self._left.is_set()

    def begin_to_leave(self) -> None:
        """Begin to abort all of them, now or as soon as NCCL lets go of the thread that forms them."""
        self._left.set()
        if self.ended:
            self._abort(self.communicators())

    def leave(self) -> None:
        """Abort all of them, and wait a moment for that."""
        self.begin_to_leave()
        until = time.monotonic() + LEAVE_S
        for one in (self._thread, *self._aborts):
            one.join(max(0.0, until - time.monotonic()))
        self.begin_to_leave()

    def _abort(self, communicators: Sequence[Communicator]) -> None:
        """Begin to abort these, each on a thread, unless that has begun."""
        with self._lock:
            if not self._aborts:
                self._aborts = [
                    threading.Thread(target=_aborted, args=(one,), name="leaves NCCL", daemon=True)
                    for one in communicators
                ]
                for thread in self._aborts:
                    thread.start()

    def _form(self) -> None:
        made: list[Communicator] = []
        try:
            # All begin before any is waited for. If one does not, those that have begun are aborted.
            for one in self._wanted:
                if not any(one.shared_id):
                    raise RuntimeError("a worker could not give NCCL's members an id")
                made.append(self._library.begin(*one))
            for communicator in made:
                settle(communicator, "NCCL to form", self._limit_s, self.left)
            self._prepare(made, self.left)
        except Exception as error:
            self._abort(made)
            self._formed.set_exception(error)
            return
        self._formed.set_result(made)
        if self.left():
            self.begin_to_leave()


def _aborted(one: Communicator) -> None:
    try:
        one.abort()
    except Exception as error:
        log.warning("NCCL's part could not be aborted: %s", error)
