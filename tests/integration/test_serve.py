"""Execute the example for Ray Serve in `examples/README.md`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY, raytrain

DRIVER = """
import json, urllib.request
import pyarrow.parquet as pq
from ray import serve
try:
    rows = pq.read_table({data!r})
    request = urllib.request.Request("http://127.0.0.1:8000", json.dumps(rows["pixels"].to_pylist()).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)
    print("right:", sum(a == b for a, b in zip(told, rows["label"].to_pylist(), strict=True)) / len(told))
finally:
    serve.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_trained_model_answers(tmp_path: Path) -> None:
    paths = [f"data.path={tmp_path}/train", f"evaluate.path={tmp_path}/held_out", f"storage={tmp_path}/runs"]
    words = [word for path in [*paths, "epochs=4", "collective=torch"] for word in ("--set", path)]
    code, _, err = raytrain("run", "jobs/digits.yaml", *words, cwd=REPOSITORY)
    assert code == 0, err
    blocks = re.findall("```python\n(.*?)```", (REPOSITORY / "examples" / "README.md").read_text(), re.DOTALL)
    serving = [block for block in blocks if "serve.run" in block]
    assert len(serving) == 1
    assert len(serving[0].splitlines()) < 25
    program = serving[0].replace("runs/digits", f"{tmp_path}/runs/digits")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program + DRIVER.format(data=f"{tmp_path}/held_out/digits.parquet")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    right = re.search(r"^right: (\S+)$", done.stdout, re.MULTILINE)
    assert right is not None, done.stdout
    assert float(right[1]) > 0.8
