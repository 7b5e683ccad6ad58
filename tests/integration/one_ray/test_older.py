"""Runs that an older version began are resumed, to the end that it would have reached.

`older/runs` holds what commit b45e073 wrote: a run on two replicas, and one of two stages, each stopped by SIGTERM
after about half of its steps; their task is `older/task.py`. Each `older/NAME.safetensors` is the model of the same job
that ran undisturbed there, and `older/made_with.json` names the hash of its last state, the processor and the
libraries. The paths of that machine are replaced by `FOLDER`.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raytrain_plus import Result
from raytrain_plus.audit.audit import audit
from raytrain_plus.launch.runner import resume

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

OLDER = Path(__file__).parents[1] / "older"
NAMES = ("replicas", "stages")
MADE_WITH: Mapping[str, Any] = json.loads((OLDER / "made_with.json").read_text())


def this_machine() -> dict[str, Any]:
    """Return what the bits of a state depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {"torch": torch.__version__},
    }


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Iterator[dict[str, Result]]:
    """Resume a copy of each run."""
    folder = tmp_path_factory.mktemp("older") / "copy"
    shutil.copytree(OLDER, folder)
    for name in ("dataset.json", "result.json"):
        for file in folder.glob(f"runs/*/{name}"):
            file.write_text(file.read_text().replace("FOLDER", str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        # The jobs name their data relative to it.
        patch.chdir(folder)
        yield {name: resume(f"runs/{name}", ["args={}"], quiet=True, roots=[folder]) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_that_of_the_undisturbed_run(ended: dict[str, Result], name: str) -> None:
    result = ended[name]
    assert (result.status, result.steps) == ("finished", 40), result.error
    expected, found = load_file(OLDER / f"{name}.safetensors"), load_file(Path(result.path) / "model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)
    report = audit(result.path)
    assert report.clean, report.faults


@pytest.mark.parametrize("name", NAMES)
def test_on_an_equal_machine_so_are_the_bits_of_the_whole_state(ended: dict[str, Result], name: str) -> None:
    here = this_machine()
    differing = [key for key in here if here[key] != MADE_WITH[key]]
    if differing:
        pytest.skip(f"made on a machine with another {' and '.join(differing)}")
    assert ended[name].state_sha256 == MADE_WITH["state_sha256"][name]
