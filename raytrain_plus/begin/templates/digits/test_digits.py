"""The task learns, in this process and without Ray: `pytest`."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
from digits import Digits, prepare


def test_it_learns_in_a_few_steps(tmp_path: Path) -> None:
    prepare(tmp_path, "train")
    task = Digits()
    batch = task.collate(pq.read_table(tmp_path).slice(0, 96))
    assert batch["pixels"].shape == (96, 64)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.named_parameters())
    before = task.loss(model, batch).item()
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert task.loss(model, batch).item() < before / 2
    assert float(task.evaluate(model.eval(), batch)["accuracy"]) > 0.8
