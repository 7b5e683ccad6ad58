"""The flips keep rows and held-out images, and the task learns; in this process and without Ray: `pytest`."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from shapes import Shapes, flip, prepare


def rows(folder: Path, name: str) -> pa.Table:
    prepare(folder, name)
    return pq.read_table(folder)


def test_about_half_of_the_training_images_are_mirrored(tmp_path: Path) -> None:
    before = rows(tmp_path, "train")
    after = flip(before, np.random.default_rng(0))
    assert (after.num_rows, after.schema) == (before.num_rows, before.schema)
    same = np.mean([one == other for one, other in zip(before["pixels"], after["pixels"], strict=True)])
    assert 0.4 < same < 0.6


def test_held_out_images_stay_as_they_are(tmp_path: Path) -> None:
    before = rows(tmp_path, "held_out")
    assert flip(before, np.random.default_rng(0)).equals(before)


def test_it_learns_in_a_few_steps(tmp_path: Path) -> None:
    task = Shapes()
    batch = task.collate(rows(tmp_path, "train").slice(0, 96))
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.named_parameters())
    before = task.loss(model, batch).item()
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert task.loss(model, batch).item() < before / 2
