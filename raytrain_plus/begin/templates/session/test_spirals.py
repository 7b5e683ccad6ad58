"""The loop learns, in this process and without Ray: `pytest`."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
from spirals import main, prepare

from raytrain_plus import RunFacts
from raytrain_plus.session.session_task import session_task


def test_it_learns_in_a_few_steps(tmp_path: Path) -> None:
    prepare(tmp_path, "train")
    # What the run makes of the function: each call of `loss` is one turn of its loop.
    task = session_task(main)()
    task.run = RunFacts(total_steps=200, batch_size=96)
    batch = task.collate(pq.read_table(tmp_path).slice(0, 96))
    assert batch["at"].shape == (96, 2)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.named_parameters())
    before = task.loss(model, batch)["loss"].item()
    for _ in range(200):
        optimizer.zero_grad()
        task.loss(model, batch)["loss"].backward()
        optimizer.step()
    assert task.loss(model, batch)["loss"].item() < before / 2
    assert float(task.evaluate(model.eval(), batch)["accuracy"]) > 0.8
