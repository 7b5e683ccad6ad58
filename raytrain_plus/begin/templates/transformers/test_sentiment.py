"""The task learns, in this process, without Ray and without a network: `pytest`."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import sentiment
import torch


def test_it_learns_in_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentiment.prepare(tmp_path, "train")
    monkeypatch.setattr(sentiment, "TOKENIZER", tmp_path / "_tokenizer.json")
    task = sentiment.Sentiment()
    batch = task.collate(pq.read_table(tmp_path / "reviews.parquet").slice(0, 64))
    assert batch["input_ids"].shape == batch["attention_mask"].shape
    assert not batch["input_ids"][batch["attention_mask"] == 0].any(), "padding has the number 0"
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.named_parameters())
    before = task.loss(model, batch)["loss"].item()
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(model, batch)["loss"].backward()
        optimizer.step()
    assert task.loss(model, batch)["loss"].item() < before / 2
