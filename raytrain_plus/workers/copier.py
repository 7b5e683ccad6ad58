"""Keeps copies of states in memory: this worker's own in another's, too, where nobody else holds it; and others' here.

The copy is made between two steps, and sent on a thread of its own while the training goes on, one at a time. Two of
each kind are in memory at most: the newest of which the controller knows that every stage's is where it belongs, and
the one that follows it. After a loss all go back to the former together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_plus.errors import RunError, WaitExpired
from raytrain_plus.parallel.mesh import Stage
from raytrain_plus.state.holding import Holding
from raytrain_plus.state.hostcopy import HostMemory
from raytrain_plus.state.transfer import Snapshot, digest
from raytrain_plus.workers.plan import Buddy, Sent

SEND_S = 60.0
"""Limit of one copy on its way, beyond what its size takes at `BYTES_PER_S`; it is sent again then."""
BYTES_PER_S = 20e6
"""The slowest that a copy may travel."""
AGAIN_S = 0.05
"""Seconds between two looks for a buddy, while there is none that answers."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    generation: int
    snapshot: Snapshot
    memory: HostMemory


class Copier:
    """See `training.loop.Copying`."""

    def __init__(self, worker: str, holding: Callable[[], Holding], every_steps: int) -> None:
        self._worker = worker
        self._holding = holding
        self._every_steps = every_steps
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, Stage], _Kept] = {}
        self._free: list[HostMemory] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")
        self._sending: Future[None] | None = None
        self._open: int | None = None
        """The step of the copy that is not known to be where it belongs; `_send_open` sends it."""
        self._send_open: Callable[[], None] = lambda: None
        self._generation = -1
        self._stage = Stage()
        self._copies = self._alone = False
        self._buddy: Buddy | None = None
        self._tell: Callable[[Sent], None] = lambda sent: None
        self._next = 0

    def begin(
        self, generation: int, stage: Stage, copies: bool, buddy: Buddy | None, tell: Callable[[Sent], None]
    ) -> None:
        """In that generation it holds this stage; `copies`: whether copies of that are made, which `buddy` keeps, too,
        where there is one."""
        with self._lock:
            self._generation, self._stage, self._tell = generation, stage, tell
            self._copies, self._alone = copies, copies and buddy is None
            self._buddy, self._open, self._next = buddy, None, -1

    def send_to(self, generation: int, buddy: Buddy | None) -> None:
        """From now on another one keeps the copies, the last one among them."""
        with self._lock:
            if generation != self._generation:
                return
            self._buddy = buddy
            if self._open is not None:
                self._sending = self._thread.submit(self._send_open)

    def end(self) -> None:
        """The generation is over: nothing more is sent."""
        with self._lock:
            self._generation, self._copies = -1, False

    def ready(self) -> bool:
        """Whether a copy can be made: the one before is where it belongs."""
        return self._copies and self._open is None

    def due(self, step: int) -> bool:
        """Whether the state after `step` is to be copied, if all can; the same for every member."""
        return step >= max(self._next, 0)

    def copy(self, step: int) -> None:
        """Copies the state after `step`, and sends it meanwhile."""
        if self._sending is not None:
            # Of an earlier generation; it ends as soon as it looks up.
            self._sending.result(SEND_S)
        start = time.monotonic()
        with self._lock:
            memory = self._free.pop() if self._free else HostMemory()
            generation, stage, tell = self._generation, self._stage, self._tell
            self._open, self._next = step, step + self._every_steps
        snapshot = memory.snapshot(step, self._holding())
        stall_s = time.monotonic() - start
        with self._lock:
            self._send_open = partial(self._send, _Kept(generation, snapshot, memory), stage, stall_s, tell)
            self._sending = self._thread.submit(self._send_open)

    def keep(self, generation: int, stage: Stage, snapshot: Snapshot) -> None:
        """Keeps a copy of another's state. Raises `RunError` where it came damaged."""
        if digest(snapshot.step, snapshot.tensors, snapshot.values) != snapshot.digest:
            raise RunError(f"a copy of step {snapshot.step} came damaged")
        with self._lock:
            memory = self._free.pop() if self._free else HostMemory()
        # What came lies in Ray's memory, which is whose who sent it.
        self._put(stage, _Kept(generation, memory.keep(snapshot), memory))

    def settled(self, generation: int, step: int) -> None:
        """The copies of that step are all where they belong; older ones are not needed any more."""
        with self._lock:
            if self._generation == generation and self._open == step:
                self._open = None
            for key, kept in list(self._kept.items()):
                if (kept.generation, key[0]) < (generation, step):
                    self._free.append(self._kept.pop(key).memory)
            if not self._kept:
                self._free.clear()

    def find(self, step: int, stage: Stage) -> Snapshot | None:
        """The copy of that stage's state after `step`, if it is here."""
        with self._lock:
            kept = self._kept.get((step, stage))
            return None if kept is None else kept.snapshot

    def _put(self, stage: Stage, kept: _Kept) -> None:
        with self._lock:
            before = self._kept.pop((kept.snapshot.step, stage), None)
            if before is not None:
                self._free.append(before.memory)
            self._kept[kept.snapshot.step, stage] = kept

    def _send(self, made: _Kept, stage: Stage, stall_s: float, tell: Callable[[Sent], None]) -> None:
        snapshot = made.snapshot
        whole = replace(snapshot, digest=digest(snapshot.step, snapshot.tensors, snapshot.values))
        self._put(stage, replace(made, snapshot=whole))
        size = sum(data.nbytes for _, _, data in whole.tensors.values())
        sent = Sent(
            worker=self._worker,
            buddy="",
            generation=made.generation,
            step=snapshot.step,
            bytes=size,
            stall_s=stall_s,
        )
        while made.generation == self._generation:
            buddy = self._buddy
            if self._alone:
                tell(sent)
                return
            if buddy is None:
                time.sleep(AGAIN_S)
                continue
            try:
                told = buddy.actor.call.remote("keep_copy", made.generation, stage, whole)
                self._wait(told, made.generation, SEND_S + size / BYTES_PER_S)
            except (RayError, WaitExpired):
                if made.generation == self._generation:
                    log.warning("a copy of step %d did not arrive; trying again", snapshot.step, exc_info=True)
                time.sleep(AGAIN_S)
                continue
            tell(replace(sent, buddy=buddy.name))
            return

    def _wait(self, reference: Any, generation: int, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        while not ray.wait([reference], timeout=AGAIN_S)[0]:
            if generation != self._generation:
                return
            if time.monotonic() > until:
                raise WaitExpired(f"the buddy did not take a copy within {limit_s:.0f} s")
        ray.get(reference)
