"""LightningModules for tests: small ones, and digits with metrics, schedulers and a data module."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score


class Plain(LightningModule):
    """The smallest module that a run takes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return (self.layer(x).squeeze(1) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Rows(Dataset[Any]):
    """Digits in an order of its own."""

    def __init__(self, order: list[int]) -> None:
        found = load_digits()
        self.pixels = torch.tensor(found.data[order] / 16.0, dtype=torch.float32)
        self.labels = found.target[order].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pixels[index], self.labels[index]


class DigitsData(LightningDataModule):
    """Digits, the first ones for training and the last ones held out."""

    def __init__(self, order: list[int], batch_size: int, held_out: int = 150) -> None:
        super().__init__()
        self.order, self.batch_size, self.held_out = order, batch_size, held_out

    def setup(self, stage: str) -> None:
        self.train, self.validation = Rows(self.order), Rows(list(range(1797 - self.held_out, 1797)))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size, shuffle=False)

    def val_dataloader(self) -> Any:
        return DataLoader(self.validation, 32)

    test_dataloader = val_dataloader


class Digits(LightningModule):
    """Digits with metrics of both kinds, means and one that is none, and values kept over an evaluation."""

    def __init__(self, width: int = 32, interval: str = "epoch", gamma: float = 0.7, norm: str = "BatchNorm1d") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(64, width), getattr(nn, norm)(width), nn.ReLU())
        self.head = nn.Linear(width, 10)
        self.train_accuracy = MulticlassAccuracy(10, average="micro")
        self.of_evaluation = MetricCollection(
            {"accuracy": MulticlassAccuracy(10, average="micro"), "f1": MulticlassF1Score(10)}, prefix="val_"
        )
        self.mean_loss = MeanMetric()
        self.kept: list[torch.Tensor] = []

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.body(pixels))
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pixels, labels = batch
        scores = self(pixels)
        loss = cross_entropy(scores, labels)
        self.train_accuracy(scores, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "scores": scores}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pixels, labels = batch
        scores = self(pixels)
        loss = cross_entropy(scores, labels)
        self.of_evaluation.update(scores, labels)
        self.mean_loss(loss, weight=len(labels))
        self.log("val_loss", loss, sync_dist=True)
        self.log_dict(self.of_evaluation)
        self.kept.append(scores.argmax(1) == labels)

    def on_validation_epoch_end(self) -> None:
        self.log("val_kept", torch.cat(self.kept).float().mean())
        self.log("val_mean_loss", self.mean_loss.compute())
        self.mean_loss.reset()
        self.kept.clear()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pixels, labels = batch
        self.log("test_loss", cross_entropy(self(pixels), labels))

    def configure_optimizers(self) -> Any:
        decayed = [value for name, value in self.named_parameters() if name.endswith("weight")]
        others = [value for name, value in self.named_parameters() if not name.endswith("weight")]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=5e-3
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.hparams.gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.hparams.interval}}
