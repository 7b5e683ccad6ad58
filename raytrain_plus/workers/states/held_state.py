"""Hold this worker's part of the model: the whole, a stage, or nothing until its stage is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raytrain_plus.membership.mesh import Stage
from raytrain_plus.state.holding import Holding
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.workers.messages import Layers


@dataclass(frozen=True, slots=True)
class StageState:
    """A stage of the model, or the whole, and its state."""

    stage: Stage
    state: TrainState


class OwnState:
    """The state that this worker holds; only the training thread replaces it."""

    def __init__(self, build: Callable[[Layers], TrainState]) -> None:
        """Begin without a state; `build` makes a part of the model, with its initial values."""
        self._build = build
        self._now: StageState | None = None
        self._before: StageState | None = None

    @property
    def now(self) -> StageState | None:
        """The part of the model held now, or None."""
        return self._now

    @property
    def stage(self) -> Stage | None:
        """The stage held now, or None."""
        return None if self._now is None else self._now.stage

    @property
    def state(self) -> TrainState:
        """The state of the held part; there must be one."""
        assert self._now is not None, "only a worker that holds a part of the model steps, saves or applies"
        return self._now.state

    @property
    def before(self) -> StageState | None:
        """The stage held before the current generation gave this worker another one, until its first step."""
        return self._before

    def holding(self) -> Holding:
        """Return references to all parts of the state."""
        return self.state.holding()

    def at(self, step: int, stage: Stage) -> TrainState | None:
        """Return the state if it is that stage's after `step`, else None."""
        now = self._now
        return now.state if now is not None and (now.state.last_applied, now.stage) == (step, stage) else None

    def build(self, layers: Layers, *, keep_before: bool = False) -> TrainState:
        """Build this part of the model in place of what it holds.

        `keep_before`: what it holds stays in memory until `proven` or `go_back`.
        """
        if keep_before:
            self._before = self._now
        # Its memory is free before the new part is built, so no variable here may refer to it.
        self._now = None
        self._now = StageState(layers.stage, self._build(layers))
        return self._now.state

    def part(self, layers: Layers) -> TrainState:
        """Return the state of this part of the model, built if the worker holds another."""
        return self.state if self.stage == layers.stage else self.build(layers)

    def proven(self) -> None:
        """Drop the stage held before: all members of the generation have the state that they need."""
        self._before = None

    def go_back(self) -> None:
        """Restore the stage held before if the generation ended before its first step: no other worker may have it."""
        before, self._before = self._before, None
        if before is not None and not _as_good(self._now, before):
            self._now = before


def _as_good(now: StageState | None, before: StageState) -> bool:
    """Return whether the state that the worker took is as good as what it held before.

    With more positions than before it has less of the model. Of a sharded state it may have other rows, which those who
    gave them still have.
    """
    if now is None or now.state.last_applied is None or now.state.division is not None:
        return False
    return (
        now.state.last_applied == before.state.last_applied
        and now.stage.of <= before.stage.of
        and now.stage.ranks <= before.stage.ranks
    )
