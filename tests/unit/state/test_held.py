"""What a worker has of a sharded state is named and cut as checkpoints and exports need it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.state.held import HeldTensor, held_tensors, whole_tensors
from raytrain_plus.state.weight_rows import TensorRows

UNITS = {"w": 8, "whole": 1, "none": 1}
W, EXP, STEP = torch.arange(24.0).reshape(8, 3), torch.arange(12.0).reshape(4, 3), torch.tensor(5.0)


def names(found: Sequence[HeldTensor]) -> list[tuple[str, int, int]]:
    return [(one.name, one.first, one.last) for one in found]


def of_rows(rows: Piece, tensors: dict[str, torch.Tensor]) -> dict[TensorRows, torch.Tensor]:
    return {TensorRows(rows, name): value for name, value in tensors.items()}


def test_rows_are_named_by_their_whole_tensor() -> None:
    state = of_rows(Piece("w", 2, 6), {"param/w": W[2:6], "optim/w/exp_avg": EXP, "optim/w/step": STEP})
    found = held_tensors(state, Pieces.of([Piece("w", 2, 6)]), UNITS)
    # The step count goes with the first row, which another worker has.
    assert names(found) == [("param/w", 2, 6), ("optim/w/exp_avg", 2, 6)]
    weight, moment = found
    assert torch.equal(weight.value, W[2:6])
    assert (weight.entry.shape, weight.entry.size, weight.entry.held) == ((8, 3), W.nbytes, (2, 6))
    assert torch.equal(moment.slice(3, 5), EXP[1:3])
    assert moment.pieces(24) == [Piece("optim/w/exp_avg", 2, 4), Piece("optim/w/exp_avg", 4, 6)]


def test_fewer_rows_are_written_than_held() -> None:
    state = of_rows(Piece("w", 0, 8), {"param/w": W, "optim/w/exp_avg": W, "optim/w/step": STEP})
    found = held_tensors(state, Pieces.of([Piece("w", 0, 1), Piece("w", 6, 8)]), UNITS)
    assert names(found) == [
        ("param/w", 0, 1),
        ("param/w", 6, 8),
        ("optim/w/exp_avg", 0, 1),
        ("optim/w/exp_avg", 6, 8),
        ("optim/w/step", 0, 1),
    ]


def test_what_cannot_be_divided_is_held_whole_or_not_at_all() -> None:
    whole, none = Piece("whole"), Piece("none")
    state = of_rows(whole, {"param/whole": W, "optim/whole/row": W[:, 0]})
    state |= of_rows(none, {"param/none": torch.zeros(0)})
    assert names(held_tensors(state, Pieces.of([whole]), UNITS)) == [("param/whole", 0, 8), ("optim/whole/row", 0, 8)]
    assert held_tensors(state, Pieces.of([Piece("w", 0, 8)]), UNITS) == []
    [empty] = held_tensors(state, Pieces.of([none]), UNITS)
    assert empty.pieces(8) == [Piece("param/none", 0, 0)]


def test_without_sharding_everything_is_held() -> None:
    state = {"param/w": W, "optim/w/step": STEP}
    assert names(whole_tensors(state)) == [("param/w", 0, 8), ("optim/w/step", 0, 1)]
