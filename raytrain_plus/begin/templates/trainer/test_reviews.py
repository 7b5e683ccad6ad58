"""The model learns, in this process, without Ray and without a network: `pytest`."""

from pathlib import Path

import reviews
import torch


def test_it_learns_in_a_few_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = reviews.trainer(str(tmp_path), use_cpu=True)
    batch = made.data_collator([dict(row) for row in made.train_dataset[:64]])
    model = made.model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = made.compute_loss(model, dict(batch)).item()
    for _ in range(60):
        optimizer.zero_grad()
        made.compute_loss(model, dict(batch)).backward()
        optimizer.step()
    assert made.compute_loss(model, dict(batch)).item() < before / 2
