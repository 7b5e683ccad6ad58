"""Classify handwritten digits: the 1,797 images of 8 x 8 pixels that come with scikit-learn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task


class Digits(Task):
    """Classify a digit."""

    def __init__(self, width: int = 64, lr: float = 3e-3) -> None:
        self.width, self.lr = width, lr

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, self.width),
            nn.BatchNorm1d(self.width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(self.width, 10),
        )

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=self.lr)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["pixels"] / 16), batch["label"])

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scores = model(batch["pixels"] / 16)
        right = (scores.argmax(dim=1) == batch["label"]).float().mean()
        return {"loss": F.cross_entropy(scores, batch["label"]), "accuracy": right}


def prepare(folder: Path, name: str) -> None:
    """Write the split `name` into `folder`: every fifth image is held out, the others are for training."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    held_out = torch.arange(len(labels)) % 5 == 0
    chosen = (held_out if name == "held_out" else ~held_out).numpy()
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(images[chosen].astype("float32").reshape(-1)), 64)
    table = pa.table({"pixels": pixels, "label": pa.array(labels[chosen].astype("int64"))})
    pq.write_table(table, folder / "digits.parquet", row_group_size=64, write_page_checksum=True)
