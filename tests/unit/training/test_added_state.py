"""What a forward pass adds to its model is refused by name, in the trial and in a run; caches are the module's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Parallel
from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.state.holding import NOTHING_ADDED
from raytrain_plus.training.step.build import build_state, whole_steps
from tests.support.optimizers import CPU, Plain, job, trial


class Adds(nn.Linear):
    """Keeps something from its first forward pass on."""

    def __init__(self, what: str) -> None:
        super().__init__(4, 4)
        self.what = what
        self.register_buffer("seen", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "buffer":
            self.seen = x.detach().mean()
        elif self.what == "parameter":
            self.scale = nn.Parameter(torch.ones(4))
        elif self.what == "tensor":
            self.last = x.detach()
        elif self.what == "cache":
            self.register_buffer("mask", torch.ones(len(x), 1), persistent=False)
        elif self.what == "output":
            # It belongs to the graph of the step.
            self.output = super().forward(x)
        return super().forward(x)


def task_of(what: str, layered: bool) -> type[Plain]:
    class Own(Plain):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), Adds(what))

        def layers(self) -> Any:
            return {"first": lambda: nn.Linear(4, 4), "1": lambda: Adds(what)} if layered else None

    return Own


WORDS = {"buffer": "the buffer '1.seen'", "parameter": "the parameter '1.scale'", "tensor": "the tensor '1.last'"}


@pytest.mark.parametrize("what", ["buffer", "parameter", "tensor", "cache", "output"])
@pytest.mark.parametrize("layered", [False, True])
def test_what_a_forward_pass_adds_is_refused(tmp_path: Path, what: str, layered: bool) -> None:
    way: dict[str, Any] = {"parallel": Parallel(pipeline=2, schedule="gpipe")} if layered else {}
    if what not in WORDS:
        assert trial(tmp_path, task_of(what, layered), **way).rows == 4
        return
    with pytest.raises(TaskError, match=f"the forward pass adds {WORDS[what]} to the model"):
        trial(tmp_path, task_of(what, layered), **way)


def test_a_run_refuses_it_too(tmp_path: Path) -> None:
    task = task_of("buffer", False)
    [part] = whole_steps(build_state(job(tmp_path, task), task(), CPU)).state.parts
    with (
        pytest.raises(TrainingError, match=r"the forward pass adds the buffer '1\.seen'"),
        part.forward(0, 0, 0, part.writes()),
    ):
        part.module(torch.ones(2, 4))


def test_a_run_that_an_older_version_began_may_add_it(tmp_path: Path) -> None:
    task = task_of("tensor", False)
    state = build_state(job(tmp_path, task), task(), CPU)
    state.rules[NOTHING_ADDED] = False
    state.train()
    [part] = state.parts
    with part.forward(0, 0, 0, part.writes()):
        part.module(torch.ones(2, 4))
