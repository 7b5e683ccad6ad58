"""Tasks of the benchmarks: the byte GPT of the examples, a small GPT-2, and an MLP so small that overhead shows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from examples import byte_gpt
from examples.digits import Digits
from raytrain_plus import Task
from tests.benchmarks.gate import gated


class Mlp(Task):
    """An MLP of 0.4 M parameters."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 512),
            nn.Tanh(),
            nn.Linear(512, 512),
            nn.Tanh(),
            nn.Linear(512, 160),
            nn.Tanh(),
            nn.Linear(160, 10),
        )

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])


class Paced(Mlp):
    """Steps that wait for a device most of the time."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(0.012)
        return super().loss(model, batch)


class Padded(Mlp):
    """4.2 M parameters, with AdamW's two figures for each a state of 50 MB; steps are padded to about 100 ms."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 2016), nn.Tanh(), nn.Linear(2016, 2016), nn.Tanh(), nn.Linear(2016, 10))

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # One shard each, on two workers.
        time.sleep(0.025)
        return super().loss(model, batch)


class Gpt2(Task):
    """A small GPT-2 of Transformers: 0.44 M parameters, texts of 64 bytes."""

    def model(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=128, n_layer=2, n_head=4))

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        text = batch["bytes"][:, :64].long()
        return model(input_ids=text, labels=text).loss


class ByteGPT(byte_gpt.ByteGPT):
    """Return the optimizer of the examples without its schedule, which the bare loops do not have."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> None:  # type: ignore[override]
        return None


GatedDigits, GatedMlp, GatedGpt2 = gated(Digits), gated(Mlp), gated(Gpt2)


def prepare(folder: Path, name: str) -> None:
    """Write `mlp` (random points), or source text for `byte_gpt` and `gpt2`."""
    if name in ("byte_gpt", "gpt2"):
        byte_gpt.prepare(folder, "train")
        return
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 64)).astype("float32")
    column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), 64)
    table = pa.table({"x": column, "y": pa.array(rng.integers(0, 10, len(x)), pa.int64())})
    pq.write_table(table, folder / "0.parquet", row_group_size=500, write_page_checksum=True)
