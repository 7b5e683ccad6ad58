"""A checkpoint's description of its model, and how other models differ from it."""

from __future__ import annotations

import pytest

from raytrain_plus.state.stored.manifest import StoredTensor, mismatch

STORED = {
    "param/first.weight": StoredTensor("float32", (4, 3), ()),
    "param/first.bias": StoredTensor("float32", (4,), ()),
    "buffer/count": StoredTensor("int64", (), ()),
    "optim/first.weight/exp_avg": StoredTensor("float32", (4, 3), ()),
}
BUILT = {
    "param/first.weight": ("float32", (4, 3)),
    "param/first.bias": ("float32", (4,)),
    "buffer/count": ("int64", ()),
}


@pytest.mark.parametrize(
    ("lacks", "has", "said"),
    [
        ([], {}, []),
        (["param/first.bias"], {}, ["first.bias is in the checkpoint, not in the task's model"]),
        ([], {"param/new": ("float32", (2,))}, ["new is in the task's model, not in the checkpoint"]),
        (
            [],
            {"param/first.weight": ("float32", (3, 4))},
            ["first.weight is float32 [4, 3] in the checkpoint, float32 [3, 4] in the task's model"],
        ),
        (
            [],
            {"buffer/count": ("int32", ())},
            ["count is int64 [] in the checkpoint, int32 [] in the task's model"],
        ),
        (
            ["buffer/count"],
            {"buffer/total": ("int64", ())},
            [
                "count is in the checkpoint, not in the task's model",
                "total is in the task's model, not in the checkpoint",
            ],
        ),
    ],
    ids=["same", "layer less", "layer more", "shape", "type", "renamed"],
)
def test_differences_between_models_are_described_by_name(
    lacks: list[str], has: dict[str, tuple[str, tuple[int, ...]]], said: list[str]
) -> None:
    built = {name: value for name, value in {**BUILT, **has}.items() if name not in lacks}
    assert mismatch(STORED, built) == said
