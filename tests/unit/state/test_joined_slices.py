from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from raytrain_plus.membership.pieces import Piece
from raytrain_plus.state.entry import Cut, StateTensor
from raytrain_plus.state.slices import module_of
from raytrain_plus.state.stored.digest import model_file

CUTS: dict[str, Cut] = {"block.qkv": ("column", 3), "block.mix": ("row", 1), "embed": ("vocabulary", 1)}
WHOLE = {
    "embed.weight": np.arange(8 * 3, dtype=np.float32).reshape(8, 3),
    "block.qkv.weight": np.arange(12 * 2, dtype=np.float32).reshape(12, 2) + 100,
    "block.qkv.bias": np.arange(12, dtype=np.float32) + 200,
    "block.mix.weight": np.arange(5 * 4, dtype=np.float32).reshape(5, 4) + 300,
    "block.mix.bias": np.arange(5, dtype=np.float32) + 400,
}


def sliced(slices: int) -> dict[str, np.ndarray[Any, Any]]:
    """The state of a model in so many slices, as the workers have it."""
    found = {}
    for name, value in WHOLE.items():
        module, kind = name.rsplit(".", 1)
        layer, _, rest = name.partition(".")
        cut = CUTS.get(module)
        if cut is None or (cut[0] == "row" and kind == "bias"):
            found[f"param/{name}"] = value
            continue
        for number in range(slices):
            if cut[0] == "row":
                part = np.split(value, slices, 1)[number]
            else:
                part = np.concatenate([np.split(one, slices)[number] for one in np.split(value, cut[1])])
            found[f"param/{layer}@{number}.{rest}"] = np.ascontiguousarray(part)
            found[f"optim/{layer}@{number}.{rest}/exp_avg"] = np.zeros_like(part)
    return found


def entry(name: str, value: np.ndarray[Any, Any], held: tuple[int, int]) -> StateTensor:
    cut = CUTS.get(module_of(name)) if "@" in name and name.startswith("param/") else None
    also = ("head.weight",) if name.startswith("param/embed") else ()
    return StateTensor(name=name, dtype="float32", shape=value.shape, size=value.nbytes, held=held, cut=cut, also=also)


def _number(name: str) -> str:
    return name.partition("@")[2].partition(".")[0]


def exported(slices: int, hosts: int, rows: int | None = None) -> tuple[dict[str, Any], str]:
    """The file and the hash, made from so many workers; `rows`: each holds so many rows of a tensor at most."""
    state = sliced(slices)
    inventories: list[list[StateTensor]] = [[] for _ in range(hosts)]
    for name, value in state.items():
        holders = [int(_number(name)) * hosts // slices] if "@" in name else list(range(hosts))
        for holder in holders:
            inventories[holder].append(entry(name, value, (0, len(value))))
    if rows is not None:
        [inventory] = inventories
        parts = [
            [entry(one.name, state[one.name], (first, min(first + rows, one.shape[0])))]
            for one in inventory
            for first in range(0, one.shape[0], rows)
        ]
        inventories = parts

    def begin(holder: int, pieces: tuple[Piece, ...]) -> Any:
        def wait() -> Sequence[Any]:
            return [state[name][first:last].tobytes() for name, first, last in pieces]

        return wait

    digest = hashlib.sha256()
    data = b"".join(bytes(part) for part in model_file(inventories, begin, digest))
    return safetensors.numpy.load(data), digest.hexdigest()


@pytest.mark.parametrize(
    ("slices", "hosts", "rows"), [(1, 1, None), (2, 1, None), (2, 2, None), (4, 2, None), (4, 1, 1)]
)
def test_the_file_of_a_model_has_whole_weights(slices: int, hosts: int, rows: int | None) -> None:
    found, _ = exported(slices, hosts, rows)
    tied = {"head.weight": WHOLE["embed.weight"]}
    assert found.keys() == WHOLE.keys() | tied.keys()
    for name, value in (WHOLE | tied).items():
        assert np.array_equal(found[name], value), name


def test_the_hash_does_not_depend_on_who_hosts_the_slices() -> None:
    assert len({exported(4, hosts)[1] for hosts in (1, 2, 4)}) == 1
