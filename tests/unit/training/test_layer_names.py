"""The layers of a job, and what is said of a task that declares none."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from raytrain_plus import Data, Job, Task
from raytrain_plus.errors import TaskError
from raytrain_plus.job.settings import Parallel, Workers
from raytrain_plus.training.model.layer_names import layers_of


class Whole(Task):
    def model(self) -> nn.Module:
        return nn.Bilinear(2, 2, 1)


class InLayers(Task):
    def layers(self) -> dict[str, type[nn.Module]]:
        return {"first": nn.ReLU, "last": nn.GELU}


def job(parallel: Parallel) -> Job:
    data, workers = Data(path="data", batch_size=8, shards=4), Workers(max=4)
    return Job(name="job", task="tasks:Whole", data=data, workers=workers, steps=2, parallel=parallel)


@pytest.mark.parametrize(
    ("parallel", "setting"),
    [
        (Parallel(pipeline=2), "parallel.pipeline: 2"),
        (Parallel(pipeline=2, tensor=2), "parallel.pipeline: 2"),
        (Parallel(sharded="full"), "parallel.sharded: full"),
    ],
)
def test_the_error_of_a_model_without_layers_names_the_setting_and_an_example(parallel: Parallel, setting: str) -> None:
    with pytest.raises(TaskError, match="does not declare its layers") as caught:
        layers_of(job(parallel), Whole)
    assert caught.value.where == setting
    assert caught.value.remedy == (
        f"define Task.layers in place of Task.model, as examples/gpt.py does, or leave out {setting}"
    )
    example = Path(__file__).parents[3] / "examples" / "gpt.py"
    assert "def layers(self)" in example.read_text()


def test_layers_are_named_for_a_model_in_parts() -> None:
    assert layers_of(job(Parallel()), InLayers) is None
    assert layers_of(job(Parallel(pipeline=2)), InLayers) == ("first", "last")
    assert layers_of(job(Parallel(sharded="full")), InLayers) is None
