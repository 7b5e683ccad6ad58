"""A Lightning script that trains on while machines come and go: on which of three spirals is a point?

`python spirals.py`, or with more workers: `raytrain run spirals.py --set workers.max=4`. Only the import of Trainer is
another one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from raytrain_plus.bring.lightning import Trainer

SPIRALS = 3


def points(count: int, seed: int) -> TensorDataset:
    """Return points near the spirals, the same ones each time, with the number of the spiral."""
    draw = torch.Generator().manual_seed(seed)
    spiral = torch.randint(SPIRALS, (count,), generator=draw)
    radius = torch.rand(count, generator=draw).sqrt()
    angle = 4 * radius + 2 * math.pi / SPIRALS * spiral + 0.2 * torch.randn(count, generator=draw)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), spiral)


class Spirals(LightningDataModule):
    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train, self.held_out = points(2400, seed=0), points(600, seed=1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, self.batch_size)


class Classifier(LightningModule):
    def __init__(self, width: int = 64, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, SPIRALS)
        self.accuracy = MulticlassAccuracy(SPIRALS)
        self.f1 = MulticlassF1Score(SPIRALS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(x))
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, spiral = batch
        loss = cross_entropy(self(x), spiral)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, spiral = batch
        scores = self(x)
        self.accuracy(scores, spiral)
        self.f1(scores, spiral)
        self.log("val_loss", cross_entropy(scores, spiral))
        self.log_dict({"val_accuracy": self.accuracy, "val_f1": self.f1})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams["rate"], total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(folder: str = "spirals", **arguments: Any) -> Trainer:
    """Return the trainer; `arguments` are more of Lightning's Trainer."""
    best = ModelCheckpoint(monitor="val_accuracy", mode="max")
    given = {"max_epochs": 5, "callbacks": [best], "default_root_dir": folder, **arguments}
    return Trainer(run={"workers": {"min": 1, "max": 2}}, **given)


if __name__ == "__main__":
    made, module, data = trainer(), Classifier(), Spirals()
    made.fit(module, datamodule=data)
    print(made.callback_metrics)
