"""A task that reports more than a loss, in steps and in evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.integration.tasks import Faulty


class Measured(Faulty):
    """Returns metrics beside its loss, and summarises the held-out rows."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        loss = super().loss(model, batch)
        share = batch["y"].eq(0).float().mean()
        return {"loss": loss, "metrics": {"share": share, "undefined": float("nan"), "rows": len(batch["y"])}}

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scores = model(batch["x"])
        return {"loss": F.cross_entropy(scores, batch["y"]), "label": batch["y"], "guess": scores.argmax(1)}

    def summarise(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        label, guess = outputs["label"] == 0, outputs["guess"] == 0
        return {"f1": 2 * (label & guess).sum() / (label.sum() + guess.sum())}


class Plain(Faulty):
    """The same without anything beside the loss of a step."""

    evaluate = Measured.evaluate
    summarise = Measured.summarise
