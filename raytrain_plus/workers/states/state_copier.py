"""Keep copies of states in memory: this worker's own, also in another worker if nobody else holds it; and others' here.

The copy is made between two steps, and sent on a thread while the training continues, one at a time. At most two of
each kind are in memory: the newest one for which the controller knows that every stage's copy is in place, and its
successor. After a loss all members go back to the former together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import ray
from ray.exceptions import ActorDiedError, RayError

from raytrain_plus.errors import RunError, WaitExpired
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.state.holding import Holding
from raytrain_plus.state.hostcopy import HostMemory
from raytrain_plus.state.transfer import Snapshot, snapshot_digest
from raytrain_plus.workers.epochs import PEER
from raytrain_plus.workers.messages import Buddy, Sent

SEND_S = 60.0
"""Maximum seconds to send one copy, beyond what its size takes at `BYTES_PER_S`; then it is sent again."""
BYTES_PER_S = 20e6
"""The slowest rate at which a copy may travel."""
AGAIN_S = 0.05
"""Seconds between two checks whether a copy has arrived or is still needed; the shortest wait before it is resent."""
LONGEST_AGAIN_S = 5.0
"""Maximum seconds to wait before a copy is resent; the wait doubles up to this."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    generation: int
    snapshot: Snapshot
    memory: HostMemory


@dataclass(frozen=True, slots=True)
class _Out:
    """A copy of its own state that is not known to be in place."""

    kept: _Kept
    stage: Stage
    sent: Sent
    tell: Callable[[Sent], None]


class Copier:
    """Implements `training.step.loop.Copying`."""

    def __init__(self, worker: str, holding: Callable[[], Holding], every_steps: int) -> None:
        self._worker = worker
        self._holding = holding
        self._every_steps = every_steps
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, Stage], _Kept] = {}
        self._free: list[HostMemory] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")
        self._sending: Future[None] | None = None
        self._open: _Out | None = None
        self._generation = -1
        self._stage = Stage()
        self._copies = self._alone = False
        self._buddy: Buddy | None = None
        self._early: tuple[int, Buddy | None] = (-1, None)
        """The keeper of copies for a generation that has not begun here yet."""
        self._tell: Callable[[Sent], None] = lambda sent: None
        self._next = 0

    def begin(
        self, generation: int, stage: Stage, copies: bool, buddy: Buddy | None, tell: Callable[[Sent], None]
    ) -> None:
        """Begin a generation in which this worker holds `stage`.

        `copies`: whether copies of that state are made; `buddy`, if any, keeps them too. `tell` reports each that is in
        place.
        """
        with self._lock:
            self._generation, self._stage, self._tell = generation, stage, tell
            self._copies, self._alone = copies, copies and buddy is None
            self._buddy, self._open, self._next = buddy, None, -1
        if self._early[0] == generation:
            self.send_to(*self._early)

    def send_to(self, generation: int, buddy: Buddy | None) -> None:
        """Send copies to another keeper from now on, including the one in progress.

        A controller that has not heard of the latter hears of it so, also if no keeper is available.
        """
        with self._lock:
            if generation > self._generation:
                self._early = generation, buddy
            if generation != self._generation:
                return
            self._buddy = buddy
            self._copies = self._copies or buddy is not None
            self._alone = self._alone and buddy is None
            # If it is already being sent, the sender notices the change itself.
            if self._open is not None and (self._sending is None or self._sending.done()):
                self._sending = self._thread.submit(self._send, self._open)

    def end(self) -> None:
        """End the generation: nothing more is sent."""
        with self._lock:
            self._generation, self._copies, self._open = -1, False, None

    def ready(self) -> bool:
        """Return whether a copy can be made: the previous one is in place."""
        return self._copies and self._open is None

    def due(self, step: int) -> bool:
        """Return whether the state after `step` should be copied, if all can; the same for every member."""
        return step >= max(self._next, 0)

    def copy(self, step: int, check: Callable[[], None]) -> None:
        """Copy the state after `step`, and send it in the background.

        `check` is called while this waits, and may raise.
        """
        # The sender sets it to None, at any moment.
        while (sending := self._sending) is not None and not sending.done():
            # A copy that is no longer needed ends as soon as its thread notices.
            check()
            time.sleep(AGAIN_S)
        start = time.monotonic()
        with self._lock:
            memory = self._free.pop() if self._free else HostMemory()
        snapshot = memory.snapshot(step, self._holding())
        with self._lock:
            sent = Sent(
                worker=self._worker,
                buddy="",
                generation=self._generation,
                step=step,
                bytes=sum(data.nbytes for _, _, data in snapshot.tensors.values()),
                stall_s=time.monotonic() - start,
            )
            self._open = _Out(_Kept(self._generation, snapshot, memory), self._stage, sent, self._tell)
            self._next = step + self._every_steps
            self._sending = self._thread.submit(self._keep_and_send, self._open)

    def keep(self, generation: int, stage: Stage, snapshot: Snapshot) -> None:
        """Keep a copy of another worker's state. Raises `RunError` if it arrived damaged."""
        if _digest(snapshot) != snapshot.digest:
            raise RunError(f"a copy of step {snapshot.step} arrived damaged")
        with self._lock:
            memory = self._free.pop() if self._free else HostMemory()
        # The received data lies in Ray's memory, which belongs to the sender.
        self._put(stage, _Kept(generation, memory.keep(snapshot), memory))

    def settled(self, generation: int, step: int) -> None:
        """Record that the copies of that step are all in place; drop older ones."""
        with self._lock:
            if self._open is not None and (self._generation, self._open.sent.step) == (generation, step):
                self._open = None
            for key, kept in list(self._kept.items()):
                if (kept.generation, key[0]) < (generation, step):
                    self._free.append(self._kept.pop(key).memory)
            if not self._kept:
                self._free.clear()

    def find(self, step: int, stage: Stage) -> Snapshot | None:
        """Return the copy of that stage's state after `step`; None if it is not here."""
        with self._lock:
            kept = self._kept.get((step, stage))
            return None if kept is None else kept.snapshot

    def own(self) -> int | None:
        """Return the newest step whose state this worker copied in the current generation; None if there is none."""
        with self._lock:
            steps = [
                step
                for (step, stage), kept in self._kept.items()
                if stage == self._stage and kept.generation == self._generation
            ]
            return max(steps, default=None)

    def copies(self) -> list[tuple[int, Stage, int]]:
        """Return the steps and stages of which copies are here, each with the generation that made it."""
        with self._lock:
            return [(step, stage, kept.generation) for (step, stage), kept in self._kept.items()]

    def sound(self, step: int, stage: Stage) -> bool:
        """Return whether that copy is here, and undamaged."""
        found = self.find(step, stage)
        return found is not None and _digest(found) == found.digest

    def _put(self, stage: Stage, kept: _Kept) -> None:
        with self._lock:
            key = kept.snapshot.step, stage
            before = self._kept.get(key)
            if before is not None and before.generation > kept.generation:
                # It came late.
                self._free.append(kept.memory)
                return
            if before is not None:
                self._free.append(before.memory)
            self._kept[key] = kept

    def _keep_and_send(self, out: _Out) -> None:
        try:
            out.kept.memory.wait()
            snapshot = out.kept.snapshot
            self._put(out.stage, replace(out.kept, snapshot=replace(snapshot, digest=_digest(snapshot))))
        except Exception:
            # A copy is a safeguard: nothing else depends on it.
            log.exception("a copy of step %d could not be kept", out.sent.step)
            return
        self._send(out)

    def _send(self, out: _Out) -> None:
        again_s = AGAIN_S
        while self._open is out:
            buddy, alone = self._buddy, self._alone
            snapshot = self.find(out.sent.step, out.stage)
            if snapshot is None:
                return
            if alone:
                out.tell(out.sent)
                return
            try:
                if buddy is not None and self._arrived(out, buddy, snapshot):
                    out.tell(replace(out.sent, buddy=buddy.name))
                    with self._lock:
                        # Another buddy may have been named while this one received it.
                        if self._buddy is buddy:
                            self._sending = None
                            return
                    continue
            except (RayError, WaitExpired) as error:
                # The controller names a new buddy for one that has died, and reports the loss.
                if not isinstance(error, ActorDiedError):
                    log.warning("a copy of step %d did not arrive; trying again: %s", out.sent.step, _last_line(error))
                again_s = min(2 * again_s, LONGEST_AGAIN_S)
            until = time.monotonic() + again_s
            while self._open is out and self._buddy is buddy and time.monotonic() < until:
                time.sleep(AGAIN_S)

    def _arrived(self, out: _Out, buddy: Buddy, snapshot: Snapshot) -> bool:
        """Send a copy; return whether the buddy has it, or False if it is no longer needed."""
        reference = buddy.actor.call.remote(PEER, "keep_copy", out.kept.generation, out.stage, snapshot)
        until = time.monotonic() + SEND_S + out.sent.bytes / BYTES_PER_S
        while not ray.wait([reference], timeout=AGAIN_S)[0]:
            if self._open is not out:
                return False
            if time.monotonic() > until:
                raise WaitExpired(f"{buddy.name} did not receive a copy of step {out.sent.step} in time")
        ray.get(reference)
        return self._open is out


def _last_line(error: Exception) -> str:
    """Return the last line of an error's text, which says what went wrong: a traceback of another process is above."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def _digest(snapshot: Snapshot) -> str:
    return snapshot_digest(snapshot.step, snapshot.tensors, snapshot.values)
