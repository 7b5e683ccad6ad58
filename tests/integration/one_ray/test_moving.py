"""The programs of the page for who comes from elsewhere run as they stand there, and learn what they learned."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from tests.support import nano_gpt
from tests.support.commands import REPOSITORY
from tests.support.moved import moved

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]
RAYTRAIN = [sys.executable, "-m", "raytrain_plus"]


def executed(folder: Path, *command: str) -> str:
    """Return what a command prints, in this folder and on the Ray of these tests."""
    address = ray.get_runtime_context().gcs_address
    search = os.pathsep.join([str(folder), str(REPOSITORY)])
    env = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": search}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def result(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / name / "result.json").read_text())
    return found


def test_a_model_of_nanogpt_trains_unchanged_and_writes(tmp_path: Path) -> None:
    page = moved("nanoGPT")
    shutil.copy(nano_gpt.__file__, tmp_path / "model.py")
    (tmp_path / "words.py").write_text(page.programs[0])
    assert len((page.programs[0] + page.job).splitlines()) <= 40
    text = (REPOSITORY / "raytrain_plus" / "README.md").read_text()
    numbers = np.array([ord(one) % 65 for one in text], np.uint16)
    (tmp_path / "data").mkdir()
    numbers[:-2000].tofile(tmp_path / "data" / "train.bin")
    numbers[-2000:].tofile(tmp_path / "data" / "val.bin")
    job = page.job.replace("steps: 2000", "steps: 60").replace("every_steps: 250", "every_steps: 30")
    (tmp_path / "words.yaml").write_text(job.replace("max: 4", "max: 2").replace("batches: 20", "batches: 2"))
    executed(tmp_path, *RAYTRAIN, "run", "words.yaml")
    found = result(tmp_path, "words")
    assert found["status"] == "finished"
    # Of 65 symbols that are drawn alike: ln 65 = 4.17.
    assert found["metrics"]["loss"] < 3.4
    written = executed(tmp_path, sys.executable, "-c", page.programs[1])
    assert len(re.findall(r"\d+", written)) >= 101


@pytest.mark.parametrize("title", ["torchrun", pytest.param("Ray Train", marks=pytest.mark.slow)])
def test_a_loop_learns_what_it_learned(tmp_path: Path, title: str) -> None:
    page = moved(title)
    name = re.match(r'"""(\w+)\.py"""', page.after)[1]  # type: ignore[index]
    (tmp_path / f"{name}.py").write_text(page.after)
    if page.job:
        (tmp_path / f"{name}.yaml").write_text(page.job.replace("max: 4", "max: 2"))
        executed(tmp_path, *RAYTRAIN, "run", f"{name}.yaml")
    else:
        executed(tmp_path, sys.executable, f"{name}.py")
    found = result(tmp_path, name)
    assert found["status"] == "finished"
    # Ten epochs of 1,797 rows.
    assert found["steps"] == -(-10 * 1797 // 48)
    assert found["metrics"]["train_loss"] < 0.3


@pytest.mark.slow
def test_the_loop_of_torchrun_learned_as_much(tmp_path: Path) -> None:
    """On two processes of torch, as the page says that it was run."""
    page = moved("torchrun")
    (tmp_path / "digits_ddp.py").write_text(page.before)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    said = executed(tmp_path, *launch, "digits_ddp.py")
    losses = [float(line.split()[1]) for line in said.splitlines() if re.fullmatch(r"\d+ [\d.]+", line)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 3
    assert torch.load(tmp_path / "digits.pt", weights_only=True).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
