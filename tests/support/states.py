"""States, their shares and their checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from raytrain_plus.errors import DamagedError
from raytrain_plus.state.stored import manifest as m
from raytrain_plus.state.stored.checkpoint import Copy, commit, read_tensors, survey, write_share
from raytrain_plus.state.stored.shares import share_of
from raytrain_plus.state.transfer import unpacked
from raytrain_plus.storage.interface import Folder

Tensors = dict[str, torch.Tensor]


def state(step: int) -> Tensors:
    """Return a small state that differs after each step."""
    draw = torch.Generator().manual_seed(step)
    return {
        "param/first.weight": torch.randn(40, 3, generator=draw),
        "param/first.bias": torch.randn(3, generator=draw).to(torch.bfloat16),
        "buffer/count": torch.tensor(step),
        "buffer/empty": torch.empty(0, 4),
        "buffer/mask": torch.rand(7, generator=draw) > 0.5,
        "optim/first.weight/exp_avg": torch.randn(40, 3, generator=draw, dtype=torch.float64),
    }


def shares(run: Folder, tensors: Tensors, name: str, writers: int) -> list[m.Share]:
    sizes = {key: (tuple(value.shape), value.nbytes) for key, value in tensors.items()}
    written = []
    for writer in range(writers):
        copies = []
        for piece in share_of(writer, sizes, lambda tensor: tuple(range(writers))):
            value = tensors[piece.name]
            rows = value[piece.first : piece.last] if value.dim() else value
            data = rows.reshape(-1).view(torch.uint8).numpy()
            copies.append(Copy(piece, str(value.dtype).removeprefix("torch."), tuple(value.shape), data))
        written.append(write_share(run, name, writer, writers, copies))
    return written


def described(step: int, generation: int, written: list[m.Share], **changes: Any) -> m.Manifest:
    files, tensors = m.join_shares(written)
    return m.Manifest(
        **{
            "run": "run",
            "step": step,
            "generation": generation,
            "time": 1.5,
            "job": {"seed": 0},
            "task_sha256": None,
            "versions": {"raytrain-plus": "0.1.0"},
            "data": {"fingerprint": "f", "rows": 9, "samples": 8},
            "layout": [],
            "random": {},
            "metrics": {"loss": 0.1 * step},
            "stall_s": 0.0,
            "tree": {"scheduler": {"last_epoch": step}, "persistent": ["count"]},
            "files": files,
            "tensors": tensors,
            **changes,
        }
    )


def save(run: Folder, step: int, generation: int = 0, writers: int = 3, **changes: Any) -> m.Manifest:
    written = shares(run, state(step), m.name_of(step, generation), writers)
    made = described(step, generation, written, **changes)
    commit(run, made)
    return made


def load(run: Folder) -> tuple[int, Tensors]:
    """Load the newest complete checkpoint and verify every byte; skip damaged ones."""
    for found in survey(run):
        if found.manifest is not None:
            try:
                read = read_tensors(run, found.manifest, dict.fromkeys(found.manifest.tensors))
            except DamagedError:
                continue
            assert found.manifest.tree["scheduler"] == {"last_epoch": found.manifest.step}
            return found.manifest.step, {name: unpacked(packed, torch.device("cpu")) for name, packed in read.items()}
    return -1, {}


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )
