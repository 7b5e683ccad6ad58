"""The module learns, in this process, without Ray: `pytest`."""

import torch
from spirals import Classifier, points
from torch.nn.functional import cross_entropy


def test_it_learns_in_a_few_steps() -> None:
    torch.manual_seed(0)
    module = Classifier()
    x, spiral = points(256, seed=0)[:]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    before = cross_entropy(module(x), spiral).item()
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(module(x), spiral).backward()
        optimizer.step()
    assert cross_entropy(module(x), spiral).item() < before / 2
