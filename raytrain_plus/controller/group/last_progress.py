"""Follow the writes at the end of a run: how far they are, whether they advance, and what followers are told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.event_loop import EventLoop
from raytrain_plus.controller.group.model_hand_over import ModelHandOver
from raytrain_plus.controller.record.run_record import RunRecord

ASK_S = 0.5
"""Seconds between two questions to a writer."""
TELL_S = 2.0
"""Seconds between two lines about the writes; a run whose writes take less time shows none."""
RATE_S = 10.0
"""Seconds over which the rate of writing is measured."""

Amount = tuple[int, int]
"""Bytes that the storage has taken, and all bytes."""


@dataclass(slots=True)
class Advance:
    """Tells from repeated looks whether writes advance, and how fast. Pure; times in seconds by one clock."""

    since: float
    """When they advanced last."""
    _before: object = None
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, bytes) of the looks of the last `RATE_S`."""

    def look(self, amounts: Mapping[str, Amount], stage: object, now: float) -> None:
        """Record the amount of each write, and what else shows progress: any change of it counts."""
        seen = dict(amounts), stage
        if seen == self._before:
            return
        self._before, self.since = seen, now
        done = sum(taken for taken, _ in amounts.values())
        if self._seen and done < self._seen[-1][1]:
            # Another write, or another attempt.
            self._seen.clear()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_S:
            self._seen.popleft()

    def rate(self, now: float) -> float | None:
        """Return bytes per second; None if that is not known yet."""
        if len(self._seen) < 2:
            return None
        (first, before), (_, done) = self._seen[0], self._seen[-1]
        # Up to now: while nothing is taken, the rate falls.
        return (done - before) / (now - first) if done > before and now > first else None


@dataclass
class LastProgress:
    """Asks the writers of the last checkpoint how far they are, and tells followers."""

    loop: EventLoop
    checkpoints: Checkpoints
    hand_over: ModelHandOver
    record: RunRecord

    def __post_init__(self) -> None:
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Forget what was seen: another phase begins."""
        self._advance = Advance(now)
        self._amounts: dict[str, Amount] = {}
        self._owing: set[str] = set()
        self._asked = self._told = now

    def look(self, now: float) -> float:
        """Look at the writes, during the end of the run; return when they advanced last."""
        writers = self.checkpoints.writers
        for name in self._amounts.keys() - set(writers):
            # Its share is written, and counts as such until the end.
            self._amounts[name] = (self._amounts[name][1],) * 2
        if now - self._asked >= ASK_S:
            self._asked = now
            self._ask(writers)
        model = self.hand_over.written
        amounts = {**self._amounts, **({} if model is None else {"the model": model})}
        stage = tuple(writers), self.checkpoints.publishing, self.checkpoints.durable, self.hand_over.over
        self._advance.look(amounts, stage, now)
        if now - self._told >= TELL_S:
            self._told = now
            done, of = (sum(one) for one in zip(*amounts.values(), strict=True)) if amounts else (0, 0)
            self.record.saving(self.hand_over.step, done, of, self._advance.rate(now))
        return self._advance.since

    def _ask(self, writers: Sequence[str]) -> None:
        for name in writers:
            if name not in self._owing:
                self._owing.add(name)
                then: Callable[[Amount | None], None] = partial(self._heard, name)
                self.loop.ask(name, "writing", then=then, failed=partial(self._unheard, name), errors=Exception)

    def _heard(self, name: str, amount: Amount | None) -> None:
        self._owing.discard(name)
        if amount is not None:
            self._amounts[name] = amount

    def _unheard(self, name: str, error: Exception) -> None:
        self._owing.discard(name)
