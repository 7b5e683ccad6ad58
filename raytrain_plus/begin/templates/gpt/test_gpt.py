"""The model looks at no byte that it has to predict, and learns; in this process and without Ray: `pytest`."""

import torch
from gpt import CONTEXT, GPT
from torch import nn


def built(task: GPT) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(build() for build in task.layers().values()))


def test_later_bytes_change_no_earlier_score() -> None:
    model = built(GPT()).eval()
    text = torch.arange(CONTEXT).reshape(1, -1)
    changed = text.clone()
    changed[0, 40:] = 7
    with torch.no_grad():
        one, other = model(text), model(changed)
    assert torch.allclose(one[0, :40], other[0, :40], atol=1e-5)
    assert not torch.allclose(one[0, 40:], other[0, 40:], atol=1e-5)


def test_it_learns_in_a_few_steps() -> None:
    task = GPT()
    model = built(task)
    optimizer = task.optimizer(model.named_parameters())
    batch = {"bytes": torch.frombuffer(bytearray(b"abcdefgh" * 65), dtype=torch.uint8).reshape(8, CONTEXT + 1)}
    before = task.loss(model, batch).item()
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert task.loss(model, batch).item() < before / 2
