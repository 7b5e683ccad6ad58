"""Classify images with a small CNN: made-up squares, discs, crosses and stripes of 16 x 16 pixels, in noise."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task

SIDE = 16
CLASSES = ("square", "disc", "cross", "stripes")


class Shapes(Task):
    """Classify an image."""

    def __init__(self, width: int = 16, lr: float = 3e-3) -> None:
        self.width, self.lr = width, lr

    def model(self) -> nn.Module:
        width = self.width
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * (SIDE // 4) ** 2, len(CLASSES)),
        )

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=self.lr)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(scores(model, batch), batch["label"])

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = scores(model, batch)
        right = (found.argmax(dim=1) == batch["label"]).float().mean()
        return {"loss": F.cross_entropy(found, batch["label"]), "accuracy": right}


def scores(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the model's scores of a batch's images: (rows, classes)."""
    found: torch.Tensor = model(batch["pixels"].reshape(-1, 1, SIDE, SIDE).float() / 255)
    return found


def flip(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    """Mirror half of the images, chosen at random: `data.transform`. Those to evaluate (`augment` is false) stay."""
    images = pc.list_flatten(table.column("pixels")).to_numpy().reshape(-1, SIDE, SIDE)
    chosen = (rng.random(len(images)) < 0.5) & table.column("augment").to_numpy()
    mirrored = np.where(chosen[:, None, None], images[:, :, ::-1], images)
    at = table.schema.get_field_index("pixels")
    return table.set_column(at, table.schema.field(at), as_column(mirrored))


def prepare(folder: Path, name: str) -> None:
    """Write the split `name` into `folder`: 2,000 images for training, or 400 held out. Put your own images here."""
    train = name == "train"
    rng = np.random.Generator(np.random.PCG64(0 if train else 1))
    labels = rng.integers(len(CLASSES), size=2000 if train else 400)
    images = np.stack([drawn(CLASSES[label], rng) for label in labels])
    columns = {"pixels": as_column(images), "label": pa.array(labels), "augment": pa.array(np.full(len(labels), train))}
    pq.write_table(pa.table(columns), folder / "images.parquet", row_group_size=256, write_page_checksum=True)


def drawn(shape: str, rng: np.random.Generator) -> np.ndarray:
    """Return an image of a shape, somewhere, in noise: bytes of shape (SIDE, SIDE)."""
    image = rng.integers(0, 100, size=(SIDE, SIDE))
    radius = rng.integers(3, 6)
    at = rng.integers(radius, SIDE - radius, size=2)
    down, right = np.abs(np.indices((SIDE, SIDE)) - at[:, None, None])
    inside = np.maximum(down, right) <= radius
    masks = {
        "square": inside,
        "disc": down**2 + right**2 <= radius**2,
        "cross": inside & ((down <= 1) | (right <= 1)),
        "stripes": inside & (right % 2 == 0),
    }
    return np.where(masks[shape], 220, image).astype(np.uint8)


def as_column(images: np.ndarray) -> pa.Array:
    """Return images as a column: one list of SIDE * SIDE bytes a row."""
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(images).reshape(-1)), SIDE * SIDE)
