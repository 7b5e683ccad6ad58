"""The state's names, and its hash recomputed from the documented contract."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from raytrain_plus.state.named import named_state, state_sha256


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.outer = nn.Linear(2, 2, bias=False)
        self.outer.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("passing", torch.zeros(1), persistent=False)


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.norm(model.outer(model.inner(torch.randn(4, 2)))).sum().backward()
    optimizer.step()
    return model, optimizer


def test_names_follow_the_contract_and_tied_parameters_appear_once() -> None:
    model, optimizer = trained()
    state = named_state(model, optimizer, list(model.named_parameters()))
    assert set(state) == {
        *(f"param/{name}" for name in ("inner.weight", "norm.weight", "norm.bias")),
        *(f"buffer/norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        *(
            f"optim/{name}/{key}"
            for name in ("inner.weight", "norm.weight", "norm.bias")
            for key in ("step", "exp_avg", "exp_avg_sq")
        ),
    }


def test_the_hash_covers_names_dtypes_shapes_and_bytes() -> None:
    state = {"param/b": torch.tensor([[1.0, 2.0]]), "param/a": torch.tensor(3)}
    expected = hashlib.sha256()
    expected.update(b"param/a\0float64\0\0" + torch.tensor(3.0, dtype=torch.float64).numpy().tobytes())
    expected.update(b"param/b\0float32\x001,2\0" + torch.tensor([1.0, 2.0]).numpy().tobytes())
    assert state_sha256(state) == expected.hexdigest()
    assert state_sha256({**state, "param/b": torch.tensor([[1.0, 2.5]])}) != expected.hexdigest()
