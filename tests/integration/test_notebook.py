"""In a notebook: a task written in a cell trains, and its cell shows how it goes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from raytrain_plus import attach
from tests.integration.tasks import write_data
from tests.integration.test_detached import background, until
from tests.integration.test_run import REPOSITORY

CELLS = [
    """
from torch import nn
from torch.nn import functional as F
from raytrain_plus import Data, Job, Task, Workers, run

class Mine(Task):
    def model(self):
        return nn.Linear(6, 3)
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])
""",
    """
job = Job(name="cell", task=Mine, data=Data(path="data", batch_size=48), epochs=2, workers=Workers(min=2))
result = run(job)
""",
    """
assert result.status == "finished", result.error
again = run(job)
print(result.steps, result.samples, again.state_sha256 == result.state_sha256)
""",
]


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_a_task_from_a_cell_trains(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=500)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}, kernel_name="python3"
    ).execute()
    shown = [output for output in notebook.cells[1].outputs if output.output_type == "display_data"]
    text = "".join(shown[0]["data"]["text/plain"])
    assert "cell finished: 21 steps, 1,000 samples" in text
    assert "2 workers ready" in text
    printed = "".join(output.get("text", "") for output in notebook.cells[2].outputs if output.output_type == "stream")
    assert "21 1000 True" in printed


def executed(folder: Path, name: str) -> Any:
    """One of the examples, every cell run; errors are raised. `folder` gets what it makes."""
    shutil.copytree(REPOSITORY / "examples", folder / "examples")
    notebook = nbformat.read(folder / "examples" / name, 4)
    where = {"metadata": {"path": str(folder / "examples")}}
    NotebookClient(notebook, timeout=120, resources=where, kernel_name="python3").execute()
    return notebook


def said(notebook: Any) -> str:
    """What its cells print, and their values."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "\n".join(str(output.get("text") or output.get("data", {}).get("text/plain")) for output in outputs)


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_a_first_training(tmp_path: Path) -> None:
    notebook = executed(tmp_path, "first_training.ipynb")
    assert "finished: 300 steps" in said(notebook)
    assert "of 360 held-out digits read right" in said(notebook)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert shown[0]["data"]["text/html"].startswith("<svg ")


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_a_lost_worker(tmp_path: Path) -> None:
    told = said(executed(tmp_path, "lost_worker.ipynb"))
    assert "its process was killed or crashed\n0 steps lost, 1 worker kept" in told
    assert "898 of 898 steps audited" in told
    # Of the run that nobody disturbed: the same bits.
    assert told.rstrip().endswith("True")
    until(lambda: not background(), "the end of its processes")


@pytest.mark.parametrize("name", ["first_training.ipynb", "lost_worker.ipynb"])
def test_what_is_kept_of_the_examples_is_small_and_tells_of_no_machine(name: str) -> None:
    text = (REPOSITORY / "examples" / name).read_text()
    assert len(text) < 100_000
    assert "</svg>" in text
    assert "Traceback" not in text
    for place in ("/tmp/", "/home/", "/root/", "/work/", "/Users/"):
        assert place not in text


FOLLOWING = """
import _thread, threading
from raytrain_plus import start
handle = start(job)
threading.Timer(2.0, _thread.interrupt_main).start()
print(handle.follow())
"""


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_interrupting_a_cell_that_follows_ends_nothing(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=500)
    job = """
job = Job(name="cell", task=Mine, data=Data(path="data", batch_size=48), epochs=1000, workers=Workers(min=2))
"""
    cells = [CELLS[0], job + FOLLOWING]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=120, resources=where, kernel_name="python3").execute()
    assert "cell goes on; handle.follow() shows it again, handle.stop() stops it\nNone" in said(notebook)
    handle = attach(tmp_path / "runs" / "cell")
    made = handle.status().steps
    until(lambda: handle.status().steps > made + 5, "5 steps more")
    assert handle._repr_html_().startswith("<svg ")
    handle.stop()
    assert handle.result(timeout_s=30).status == "stopped"
    until(lambda: not background(), "the end of its processes")
