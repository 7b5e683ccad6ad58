"""Train a small GPT on bytes of text: the source of Python's standard library, until you name your own files."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task

TEXTS = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))  # put your own files here
CONTEXT = 64
VOCABULARY = 256


class Embed(nn.Module):
    """Bytes to vectors: (rows, context) -> (rows, context, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(CONTEXT, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self.byte(x) + self.place.weight[: x.shape[1]]
        return vectors


class Block(nn.Module):
    """Attention to the bytes before, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        vectors: torch.Tensor = self.layer(x, src_mask=mask, is_causal=True)
        return vectors


class GPT(Task):
    """Predict the next byte."""

    def __init__(self, width: int = 96, depth: int = 3, heads: int = 4, lr: float = 2e-3, warmup: int = 20) -> None:
        self.width, self.depth, self.heads, self.lr, self.warmup = width, depth, heads, lr, warmup

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        blocks = {f"block{number}": lambda: Block(self.width, self.heads) for number in range(self.depth)}
        return {
            "embed": lambda: Embed(self.width),
            **blocks,
            "head": lambda: nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, VOCABULARY)),
        }

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=self.lr, weight_decay=0.05)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup))

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        text = batch["bytes"].long()
        scores = model(text[:, :-1])
        return F.cross_entropy(scores.reshape(-1, VOCABULARY), text[:, 1:].reshape(-1))

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        loss = self.loss(model, batch)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}


def prepare(folder: Path, name: str) -> None:
    """Write the split `name` into `folder`, in rows of CONTEXT + 1 bytes: every tenth file is held out."""
    chosen = [text for number, text in enumerate(TEXTS) if (number % 10 == 0) == (name == "held_out")]
    text = np.frombuffer(b"".join(file.read_bytes() for file in chosen), dtype=np.uint8)
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)]
    if name == "held_out":
        rows = rows[: 480 * (CONTEXT + 1)]  # enough for a metric, and few enough for frequent evaluations
    table = pa.table({"bytes": pa.FixedSizeListArray.from_arrays(pa.array(rows), CONTEXT + 1)})
    pq.write_table(table, folder / "text.parquet", row_group_size=512, write_page_checksum=True)
