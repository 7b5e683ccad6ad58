"""What people have goes from `raytrain data` to the audit: odd files and names, and machines without a home."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.integration.conftest import TASKS

pytestmark = pytest.mark.timeout(240)


def raytrain(folder: Path, *words: str | Path, **environ: str) -> tuple[int, str]:
    given = {**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TASKS.parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_plus", *map(str, words)],
        cwd=folder,
        env=given | environ,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=150,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def job(folder: Path, path: str) -> Path:
    (folder / "task.py").write_text(
        "import torch\nfrom raytrain_plus import Task\n\n\nclass Line(Task):\n"
        "    def model(self):\n        return torch.nn.Linear(1, 1)\n\n"
        "    def optimizer(self, parameters):\n        return torch.optim.SGD(parameters, lr=0.01)\n\n"
        "    def loss(self, model, batch):\n        return model(batch['x'].float().reshape(-1, 1)).square().mean()\n"
    )
    file = folder / "line.yaml"
    data = {"path": path, "batch_size": 8, "shards": 2, "columns": ["x"]}
    file.write_text(json.dumps({"name": "line", "task": "task:Line", "epochs": 1, "collective": "torch", "data": data}))
    return file


def train(folder: Path, file: Path, rows: int, **environ: str) -> None:
    """Look at the data, check the job, train it for an epoch and audit it."""
    code, said = raytrain(folder, "data", file, **environ)
    assert code == 0, said
    assert re.search(rf"\b{rows} rows", said), said
    for words in (["validate", file], ["run", file], ["audit", folder / "runs" / "line"]):
        code, said = raytrain(folder, *words, **environ)
        assert code == 0, said
    assert re.search(rf"\b{rows} rows", said), said


def test_a_long_value_on_a_machine_without_a_home_and_with_a_long_temporary_folder(tmp_path: Path) -> None:
    rows = [f"{n},{'x' * (9 << 20) if n == 7 else 'short'}" for n in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["x,t", *rows]) + "\n")
    long = tmp_path / ("t" * 60)
    long.mkdir()
    # No folder can be made there.
    environ: Mapping[str, str] = {"HOME": "/proc/nobody", "TMPDIR": str(long), "XDG_CACHE_HOME": ""}
    train(tmp_path, job(tmp_path, "a.csv"), 40, **environ)
    assert list(long.glob("raytrain_plus-*/data/*/_complete.json"))


@pytest.mark.slow
def test_the_remedy_for_a_name_that_is_not_utf8_works(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    with open(folder + b"/a.jsonl", "wb") as file:
        file.write(b'{"x": 1.5}\n' * 40)
    file = job(tmp_path, "*/a.jsonl")
    for command in ("data", "validate", "run"):
        code, said = raytrain(tmp_path, command, file, XDG_CACHE_HOME=str(tmp_path / "cache"))
        assert code == 2
        assert f"{tmp_path}/caf\\xe9/a.jsonl: the name is not UTF-8 text\n  fix: rename the file or folder" in said
    code, said = raytrain(Path(os.fsdecode(folder)), "run", file, "--set", f"storage={tmp_path}/runs")
    assert code == 2
    assert "caf\\xe9: the name of the folder is not UTF-8 text\n  fix: rename it" in said
    os.rename(folder, tmp_path / "café")
    train(tmp_path, file, 40, XDG_CACHE_HOME=str(tmp_path / "cache"))
