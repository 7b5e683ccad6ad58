"""Give states to others: to a member that begins a generation, and tensor by tensor to the export.

Other threads than the training thread ask for states, so nothing here changes one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from raytrain_plus.errors import Interrupted, RunError
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.owners import layers_of
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.membership.slice_names import is_slice
from raytrain_plus.state.entry import Cut, StateTensor
from raytrain_plus.state.finite import check_finite
from raytrain_plus.state.held import HeldTensor, held_tensors, whole_tensors
from raytrain_plus.state.holding import optimized, saved_model, scale_values
from raytrain_plus.state.named import bytes_of, optimizer_values, state_sha256
from raytrain_plus.state.slices import module_of, name_of_whole
from raytrain_plus.state.stages import REST, everything, layer_of
from raytrain_plus.state.transfer import Array, Snapshot, hashed, part_of
from raytrain_plus.state.weight_rows import TensorKey, TensorRows, key_of
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.workers.states.held_state import OwnState
from raytrain_plus.workers.states.state_copier import Copier
from raytrain_plus.workers.states.state_receiver import LOOK_S


class StateSource:
    """Gives the state that this worker holds, and those that it keeps copies of."""

    def __init__(self, worker: str, own: OwnState, copier: Copier) -> None:
        self._worker = worker
        self._own = own
        self._copier = copier
        self._giving = threading.Lock()
        self._given: Counter[int] = Counter()
        """For each generation, how often others were given a state that they begin it with."""
        self._copied: tuple[tuple[int, Stage], Sequence[HeldTensor]] | None = None
        """The tensors of the copy that is being read, by step and stage."""

    def snapshot(
        self,
        generation: int,
        step: int,
        stage: Stage,
        layers: Collection[str] | None = None,
        rows: Sequence[Piece] | None = None,
        with_values: bool = False,
    ) -> Snapshot:
        """Return that stage's state after `step`, held or copied here, for a member that begins a generation with it.

        `layers`: those of its layers that are wanted (`state.stages.REST` for what belongs to none); None for all.
        `rows`: the rows whose optimizer's state is wanted; None if that is not sharded. `with_values`: with the values
        of these rows by themselves, which the weights of others may lack. This worker is between two steps, and stays
        so until the other has copied the state.
        """
        own, wanted = self._own.at(step, stage), everything if layers is None else layers.__contains__
        if own is None:
            snapshot = self.copy_of(step, stage, layers, rows)
        else:
            snapshot = own.snapshot(wanted, None if rows is None else Pieces.of(rows), with_values=with_values)
        with self._giving:
            self._given[generation] += 1
        return snapshot

    def copy_of(
        self, step: int, stage: Stage, layers: Collection[str] | None, rows: Sequence[Piece] | None = None
    ) -> Snapshot:
        """Return the copy that this worker keeps of that stage's state after `step`, or of some of its layers.

        `layers`, `rows`: see `snapshot`. A layer is given whole if any of its rows are wanted.
        """
        copy = self._copier.find(step, stage)
        if copy is None:
            raise RunError(f"{self._worker} has neither {stage} of step {step} nor a copy of it")
        wanted = None if layers is None else {*layers, *layers_of(Pieces.of(rows or ()))}
        return copy if wanted is None else part_of(copy, wanted.__contains__)

    def wait_until_given(self, generation: int, times: int, check: Callable[[], None]) -> None:
        """Wait until others were given `times` states to begin that generation with; `check` may raise meanwhile."""
        while self._given[generation] < times:
            check()
            time.sleep(LOOK_S)

    def forget_given(self) -> None:
        """End the generation: what others were given for it no longer matters."""
        self._given.clear()

    def has(self, step: int, stage: Stage) -> bool:
        """Return whether this worker holds that stage's state after `step`, or has an undamaged copy of it."""
        return self._own.at(step, stage) is not None or self._copier.sound(step, stage)

    def inventory(self, step: int, stage: Stage) -> list[StateTensor]:
        """Return the tensors of that stage's state after `step`.

        Raises `Interrupted` if this worker has neither that state nor an undamaged copy.
        """
        self._copied = None
        if not self.has(step, stage):
            raise Interrupted(f"{self._worker} has neither {stage} of step {step} nor a copy of it")
        state = self._state(step, stage)
        check_finite(((held.name, held.value) for held in state), self._allowed(step, stage), step)
        cuts, others = self._cuts(step, stage), _by_first(self._shared(step, stage))
        return [_with_names(_with_cut(held.entry, cuts), others) for held in state]

    def tensors(self, step: int, stage: Stage, pieces: Sequence[Piece]) -> list[Array]:
        """Return the bytes of these pieces of tensors."""
        state = self._state(step, stage)
        found = [_rows_of(state, piece) for piece in pieces]
        # Check that it still is that state.
        self._state(step, stage)
        return found

    def _allowed(self, step: int, stage: Stage) -> Collection[str]:
        """Return the tensors of a state that may hold NaN or infinity."""
        if (own := self._own.at(step, stage)) is not None:
            return own.allowed
        found = self._copier.find(step, stage)
        return () if found is None else json.loads(found.values)["allowed"]

    def _cuts(self, step: int, stage: Stage) -> Mapping[str, Cut]:
        """Return how the modules of a state are cut that have slices."""
        if (own := self._own.at(step, stage)) is not None:
            return own.holding().cuts
        found = self._copier.find(step, stage)
        values = {} if found is None else json.loads(found.values).get("cuts", {})
        return {name: (kind, fused) for name, (kind, fused) in values.items()}

    def _shared(self, step: int, stage: Stage) -> Mapping[str, str]:
        """Return the further names of a state's tensors that have several: see `Holding.shared`."""
        if (own := self._own.at(step, stage)) is not None:
            return own.holding().shared
        found = self._copier.find(step, stage)
        shared: dict[str, str] = {} if found is None else json.loads(found.values).get("shared", {})
        return shared

    def _state(self, step: int, stage: Stage) -> Sequence[HeldTensor]:
        """Return the tensors of one state; those of a copy are kept until another state is requested."""
        if (own := self._own.at(step, stage)) is not None:
            self._copied = None
            return _held_by(own)
        if self._copied is None or self._copied[0] != (step, stage):
            found = self._copier.find(step, stage)
            if found is None:
                raise Interrupted(f"{self._worker} no longer has a copy of {stage} of step {step}")
            self._copied = (step, stage), whole_tensors(hashed(found))
        return self._copied[1]


def _with_cut(entry: StateTensor, cuts: Mapping[str, Cut]) -> StateTensor:
    """Return the entry, with how its tensor is cut if it is a slice."""
    sliced = entry.of_model and is_slice(layer_of(entry.name) or REST)
    return replace(entry, cut=cuts[module_of(entry.name)]) if sliced else entry


def _by_first(shared: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the further names of each tensor that has any, by its first one."""
    found: dict[str, tuple[str, ...]] = {}
    for name, first in shared.items():
        found[first] = (*found.get(first, ()), name)
    return found


def _with_names(entry: StateTensor, others: Mapping[str, tuple[str, ...]]) -> StateTensor:
    """Return the entry, with the further names that its tensor has in the model."""
    also = others.get(name_of_whole(entry.name).partition("/")[2], ()) if entry.of_model else ()
    return replace(entry, also=also) if also else entry


def sha256_of(state: TrainState) -> str:
    """Return the hash of a state (see `state.named`), or where it is sharded, of what all workers have of it."""
    return state_sha256({key: value for key, value in _hashed_tensors(state).items() if isinstance(key, str)})


def _held_by(state: TrainState) -> list[HeldTensor]:
    """Return the tensors that a state's hash covers, of those that are divided by rows the rows that change here."""
    tensors, layout = _hashed_tensors(state), state.holding().layout
    whole = {key: value for key, value in tensors.items() if isinstance(key, str)}
    if layout is None:
        return whole_tensors(whole)
    of_rows = {key: value for key, value in tensors.items() if isinstance(key, TensorRows)}
    divided = layout.divided
    alike = {name: value for name, value in whole.items() if name not in divided}
    return whole_tensors(alike) + held_tensors(of_rows, state.trained.owned, layout.counts)


def _rows_of(state: Sequence[HeldTensor], piece: Piece) -> Array:
    """Return the bytes of a piece of a tensor."""
    held = next(one for one in state if one.name == piece.name and one.first <= piece.first and piece.last <= one.last)
    return bytes_of(held.slice(piece.first, piece.last).cpu()).numpy()


def _hashed_tensors(state: TrainState) -> dict[TensorKey, torch.Tensor]:
    """Return the tensors that the state's hash covers."""
    holding = state.holding()
    found = saved_model(holding)
    for rows, name, values in optimized(holding):
        found |= {key_of(rows, tensor): value for tensor, value in optimizer_values(name, values).items()}
    return found | dict(scale_values(state.counts).items())
