"""Initial values from a file: the bits of a model that reads them itself, in stages and through a death."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raytrain_plus import Parallel, Workers
from raytrain_plus.runs.export import export_program
from raytrain_plus.storage.folders.local import LocalFolder
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, ended
from tests.integration.tasks import Net, write_data
from tests.support.elastic_runs import exact

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]


def test_stages_begin_with_the_values_of_a_file_and_a_death_changes_no_bit(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    torch.manual_seed(5)
    values = torch.nn.ModuleDict({name: build() for name, build in Net().parts().items()}).state_dict()
    values["norm.running_mean"] += 1
    save_file(values, tmp_path / "base.safetensors")
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
