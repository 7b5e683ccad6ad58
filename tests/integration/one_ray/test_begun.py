"""Initial values from a file: the bits of a model that reads them itself, in stages and through a death."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from raytrain_plus import Parallel, Workers, attach, load
from raytrain_plus.errors import InputError, RaytrainError
from raytrain_plus.runs.export import export_program, export_weights
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, ended
from tests.integration.tasks import Net, write_data
from tests.support.elastic_runs import exact

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


def write_values(to: Path, seed: int = 5) -> None:
    torch.manual_seed(seed)
    values = torch.nn.ModuleDict({name: build() for name, build in Net().parts().items()}).state_dict()
    values["norm.running_mean"] += 1
    save_file(values, to / "base.safetensors")


def saved_names(run: Path) -> set[str]:
    """Return the names of the tensors in a run's newest checkpoint."""
    return set(json.loads(max((run / "checkpoints").glob("*.json")).read_text())["tensors"])


def test_stages_begin_with_the_values_of_a_file_and_a_death_changes_no_bit(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    write_values(tmp_path)
    plain: dict[str, Any] = {"task": "tasks:Begun", "parallel": Parallel()}
    expected = ended(Run(exact(tmp_path, "one", workers=Workers(min=1), args={"itself": True}, **plain)))
    drawn = ended(Run(exact(tmp_path, "drawn", workers=Workers(min=1), parallel=Parallel())))
    assert expected[1] != drawn[1]
    staged = {**plain, "parallel": Parallel(pipeline=2)}
    run = Run(exact(tmp_path, "staged", workers=Workers(min=2), args={"pad_s": 0.01}, **staged))
    run.until_step(5)
    run.kill(run.members()[1])
    assert ended(run) == expected
    assert run.events("recovered")
    # A trained model needs no initial values.
    (tmp_path / "base.safetensors").unlink()
    export_program(LocalFolder(run.folder), tmp_path / "program.pt2", [TASKS])
    assert {member["stage"] for member in run.events("view_formed")[0]["members"]} == {0, 1}


def test_frozen_weights_stay_in_their_file(tmp_path: Path) -> None:
    """Neither checkpoints nor what workers send have them; after a death and in stages a run has the same bits."""
    write_data(tmp_path / "data", rows=517)
    write_values(tmp_path)
    alone: dict[str, Any] = {"task": "tasks:Rebuilt", "workers": Workers(min=1), "parallel": Parallel()}
    saved = ended(Run(exact(tmp_path, "saved", args={"saved": True}, **alone)))
    expected = ended(Run(exact(tmp_path, "one", **alone)))
    assert expected[1:] == saved[1:]
    assert expected[0] != saved[0], "a digest stands for each frozen weight"
    names = [saved_names(tmp_path / "runs" / name) for name in ("saved", "one")]
    assert names[0] - names[1] == {"param/first.weight", "param/norm.weight", "param/norm.bias"}
    assert names[1] - names[0] == {"rebuilt/first.weight", "rebuilt/norm.weight", "rebuilt/norm.bias"}

    pair: dict[str, Any] = {"task": "tasks:Rebuilt", "workers": Workers(min=2)}
    run = Run(exact(tmp_path, "killed", args={"pad_s": 0.01}, **pair))
    run.until_step(5)
    run.kill(run.members()[1])
    assert ended(run) == expected
    assert run.events("recovered")
    staged = exact(tmp_path, "staged", **{**pair, "parallel": Parallel(pipeline=2)})
    assert ended(Run(staged)) == expected

    model = torch.nn.Sequential(OrderedDict((name, build()) for name, build in Net().parts().items()))
    with pytest.raises(InputError, match="is not the one with which it was trained"):
        load(run.folder, model)
    model.load_state_dict(load_file(tmp_path / "base.safetensors"))
    load(run.folder, model)
    export_weights(LocalFolder(run.folder), tmp_path / "whole.safetensors", [TASKS])
    whole = load_file(tmp_path / "whole.safetensors")
    assert whole.keys() == model.state_dict().keys()
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_run_is_not_continued_with_other_frozen_weights(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    write_values(tmp_path)
    pair: dict[str, Any] = {"task": "tasks:Rebuilt", "workers": Workers(min=2), "parallel": Parallel(pipeline=2)}
    stopped = Run(exact(tmp_path, "stopped", args={"pad_s": 0.05}, **pair))
    stopped.until_step(5)
    attach(stopped.folder).stop()
    assert stopped.finish().status == "stopped"
    write_values(tmp_path, seed=6)
    with pytest.raises(RaytrainError, match=r"the frozen weight 'first\.weight' has other values"):
        ended(Run(stopped.job, fresh=False))
