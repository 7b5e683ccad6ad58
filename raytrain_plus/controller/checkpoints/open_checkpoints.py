"""Track which checkpoints are in progress, which shares are written, and which are complete. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from raytrain_plus.workers.messages import Written


@dataclass(slots=True)
class _OpenCheckpoint:
    names: Sequence[str]
    """Its writers, in order."""
    written: dict[int, Written] = field(default_factory=dict)

    def missing(self) -> list[str]:
        return [name for writer, name in enumerate(self.names) if writer not in self.written]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A checkpoint that will never be complete."""

    step: int
    generation: int
    why: str


class Saving:
    """The checkpoints of a run that are neither complete nor given up."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], _OpenCheckpoint] = {}
        self._over: dict[tuple[int, int], bool] = {}
        """Checkpoints no longer in progress -> whether they were given up."""
        self._left: dict[tuple[int, str], int] = {}
        """(generation, worker) -> the last step that it copied before it left."""

    def __bool__(self) -> bool:
        """Return whether any checkpoint is in progress."""
        return bool(self._open)

    @property
    def writers(self) -> list[str]:
        """The workers whose shares of checkpoints in progress are not written yet."""
        return sorted({name for one in self._open.values() for name in one.missing()})

    def begin(self, step: int, generation: int, names: Sequence[str]) -> None:
        """Begin the checkpoint of this step, written by these workers in this order; repeated calls change nothing."""
        if (step, generation) not in self._over:
            self._open.setdefault((step, generation), _OpenCheckpoint(names))

    def knows(self, step: int, generation: int) -> bool:
        """Return whether that checkpoint is or was in progress."""
        return (step, generation) in self._open or (step, generation) in self._over

    def writer(self, told: Written) -> str | None:
        """Return the worker that reports; None if that checkpoint is not in progress."""
        found = self._open.get((told.step, told.generation))
        return None if found is None else found.names[told.writer]

    def given_up(self, step: int, generation: int) -> bool:
        """Return whether that checkpoint was given up."""
        return self._over.get((step, generation), False)

    def written(self, told: Written, living: Collection[str]) -> list[Abandoned]:
        """Record a worker's written share, or its failure; of the other writers, only the `living` still can write.

        Return the checkpoint if it is given up because of that.
        """
        key = (told.step, told.generation)
        if key not in self._open:
            return []
        if told.error:
            name = self._open[key].names[told.writer]
            return [self._give_up(key, f"{name} could not write its share: {told.error}")]
        self._open[key].written[told.writer] = told
        return self._without(key, living)

    def lost(self, living: Collection[str]) -> list[Abandoned]:
        """Record that only these workers are left; return what is given up because of that."""
        return [given_up for key in list(self._open) for given_up in self._without(key, living)]

    def left(self, name: str, generation: int, copied: int) -> list[Abandoned]:
        """Record that a worker left that generation, with copies up to step `copied`.

        Return what is given up because of that.
        """
        self._left[generation, name] = copied
        return [given_up for key in list(self._open) for given_up in self._uncopied(key)]

    def _without(self, key: tuple[int, int], living: Collection[str]) -> list[Abandoned]:
        gone = [name for name in self._open[key].missing() if name not in living]
        if gone:
            return [self._give_up(key, f"{gone[0]} was lost before it had written its share")]
        return self._uncopied(key)

    def _uncopied(self, key: tuple[int, int]) -> list[Abandoned]:
        step, generation = key
        without = [name for name in self._open[key].missing() if self._left.get((generation, name), step) < step]
        return [self._give_up(key, f"{without[0]} left the group before it had copied its share")] if without else []

    def _give_up(self, key: tuple[int, int], why: str) -> Abandoned:
        self._open.pop(key, None)
        self._over[key] = True
        return Abandoned(*key, why)

    def give_up_void(self, resumptions: Sequence[tuple[int, int]]) -> list[Abandoned]:
        """Give up the checkpoints that a resumption made void, and return them."""
        gone = [key for key in self._open if any(key[1] < later and key[0] > step for later, step in resumptions)]
        return [self._give_up(key, "the run has resumed from an earlier step") for key in gone]

    def give_up_all(self, why: str) -> list[Abandoned]:
        """Give up all checkpoints in progress, and return them."""
        return [self._give_up(key, why) for key in list(self._open)]

    def whole(self, committed: int) -> list[list[Written]]:
        """Return the shares of each complete checkpoint of a committed step, in the order of steps, once each."""
        ready = sorted(key for key, one in self._open.items() if key[0] <= committed and not one.missing())
        self._over.update(dict.fromkeys(ready, False))
        return [[told for _, told in sorted(self._open.pop(key).written.items())] for key in ready]
