"""The modules that a standby imports."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Parallel
from raytrain_plus.workers.imports import imports_of
from tests.unit.controller.fakes import job_of, order_of

LOAD = """
import sys
from raytrain_plus.workers.imports import Imports, import_all
assert "torch" not in sys.modules
import_all(Imports(("missing", "leaves", "stops", "mine"), (sys.argv[1],)))
print("torch" in sys.modules, sys.modules["mine"].VALUE)
"""


def test_a_job_imports_its_task_its_transform_and_what_its_workers_use(tmp_path: Path) -> None:
    plan = order_of(job_of(), tmp_path).plan
    assert imports_of(plan).modules == ("raytrain_plus.workers.worker", "t")
    assert imports_of(plan).roots == (".",)
    data = Data(path="x", batch_size=8, shards=2, transform="changes:augment")
    staged = replace(plan, job=replace(plan.job, data=data, parallel=Parallel(pipeline=2)), collective="horovod")
    assert set(imports_of(staged).modules) == {
        *imports_of(plan).modules, "raytrain_plus.data.reading.stream", "horovod.torch",
        "raytrain_plus.parallel.pipeline.schedule", "changes",
    }  # fmt: skip


def test_a_task_that_only_the_driver_knows_is_not_imported(tmp_path: Path) -> None:
    plan = replace(order_of(job_of(), tmp_path).plan, pickled_task=b"a class of a notebook")
    assert "t" not in imports_of(plan).modules


@pytest.mark.slow
def test_a_module_that_cannot_be_imported_keeps_none_from_being_loaded(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")
    (tmp_path / "stops.py").write_text("raise KeyboardInterrupt")
    (tmp_path / "mine.py").write_text("VALUE = 7")
    told = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (told.returncode, told.stdout) == (0, "True 7\n"), told.stderr
