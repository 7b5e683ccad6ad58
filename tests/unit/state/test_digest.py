"""Hash and model file built from the stages, a few tensors at a time, match those of the whole state."""

from __future__ import annotations

import doctest
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch

from raytrain_plus.errors import Interrupted
from raytrain_plus.membership.pieces import Piece
from raytrain_plus.state.entry import StateTensor
from raytrain_plus.state.named import bytes_of, entry_of, state_sha256
from raytrain_plus.state.stored import digest
from raytrain_plus.state.stored.digest import model_file

State = dict[str, torch.Tensor]

STAGES: list[State] = [
    {
        "param/0.weight": torch.randn(5, 3),
        "param/tied": torch.randn(2),
        "param/half": torch.randn(3).bfloat16(),
        "buffer/0.count": torch.tensor(7),
        "optim/0.weight/exp_avg": torch.randn(5, 3),
        "optim/0.weight/step": torch.tensor(3.0),
    },
    {
        "param/1.weight": torch.randn(3, 5).t(),
        "param/1.mask": torch.tensor([True, False, True]),
        "param/1.none": torch.zeros(0, 4),
        "optim/1.weight/exp_avg": torch.randn(3, 5),
    },
]
STAGES[1]["param/tied"] = STAGES[0]["param/tied"]
WHOLE = STAGES[0] | STAGES[1]


def test_the_examples_hold() -> None:
    assert doctest.testmod(digest).failed == 0


def rows(value: torch.Tensor, piece: Piece) -> torch.Tensor:
    return value[piece.first : piece.last] if value.dim() else value


def written(
    stages: Sequence[State],
    given: Callable[[torch.Tensor], Any] = lambda value: value,
    entry: Callable[[str, torch.Tensor], StateTensor] = entry_of,
) -> tuple[bytes, str]:
    """Return the file and the hash; assert that at most two batches are fetched at once."""
    coming = 0

    def begin(holder: int, pieces: tuple[Piece, ...]) -> Callable[[], Sequence[Any]]:
        nonlocal coming
        coming += 1
        assert coming <= 2

        def wait() -> Sequence[Any]:
            nonlocal coming
            coming -= 1
            return [given(bytes_of(rows(stages[holder][piece.name], piece)).numpy()) for piece in pieces]

        return wait

    inventories = [[entry(name, value) for name, value in stage.items()] for stage in stages]
    digest = hashlib.sha256()
    file = b"".join(bytes(piece) for piece in model_file(inventories, begin, digest))
    return file, digest.hexdigest()


@pytest.mark.parametrize("most", [1, 30, 1 << 20])
@pytest.mark.parametrize(
    "stages", [[WHOLE], STAGES, STAGES[::-1], [WHOLE, *STAGES]], ids=["one", "two", "reversed", "overlapping"]
)
def test_file_and_hash_are_those_of_the_whole(stages: list[State], most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BATCH", most)
    file, sha = written(stages)
    assert sha == state_sha256(WHOLE)
    model = safetensors.torch.load(file)
    expected = {name.partition("/")[2]: value for name, value in WHOLE.items() if not name.startswith("optim/")}
    assert model.keys() == expected.keys()
    assert all(model[name].dtype == value.dtype and torch.equal(model[name], value) for name, value in expected.items())


@pytest.mark.parametrize("most", [1, 30, 1 << 20])
@pytest.mark.parametrize("stages", [[WHOLE], STAGES, [WHOLE, *STAGES]], ids=["one", "two", "overlapping"])
def test_a_tensor_is_in_the_file_under_each_of_its_names(
    stages: list[State], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "BATCH", most)
    also = {"param/0.weight": ("1.copy", "2.copy"), "param/half": ("1.half",), "buffer/0.count": ("1.count",)}
    file, sha = written(stages, entry=lambda name, value: replace(entry_of(name, value), also=also.get(name, ())))
    assert sha == state_sha256(WHOLE)
    model = safetensors.torch.load(file)
    assert len(model) == 7 + 4
    for name, others in also.items():
        assert all(torch.equal(model[other], WHOLE[name]) for other in others)
        assert torch.equal(model[name.partition("/")[2]], WHOLE[name])


def test_a_tensor_of_another_size_than_listed_is_refused() -> None:
    with pytest.raises(Interrupted, match=r"buffer/0.count arrived with 7 bytes, expected 8"):
        written(STAGES, lambda data: data[:-1])


@pytest.mark.parametrize("most", [1, 30, 1 << 20])
def test_rows_of_several_holders_make_the_same_file(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "BATCH", most)
    holders = 0

    def entry(name: str, value: torch.Tensor) -> StateTensor:
        """The first holder has the first rows, the second the rest and one row more."""
        nonlocal holders
        one = entry_of(name, value)
        holders += name == "param/0.weight"
        if one.rows < 3:
            return one
        return replace(one, held=(0, 2) if holders == 1 else (1, one.rows))

    file, sha = written([WHOLE, WHOLE], entry=entry)
    assert (file, sha) == written([WHOLE])
    assert holders == 2
