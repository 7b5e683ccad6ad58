"""In a notebook: a task written in a cell trains, its cell shows how it goes, and the examples do what they say."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from raytrain_plus import attach
from tests.integration.conftest import background
from tests.integration.tasks import write_data
from tests.notebooks import NOTEBOOKS, executed, tidy
from tests.support.commands import until

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
print(result.steps, result.trained_steps, again.trained_steps, again.state_sha256 == result.state_sha256)
class Mine(Mine):
    width = 7
try:
    run(Job(name="cell", task=Mine, data=Data(path="data", batch_size=48), epochs=2, workers=Workers(min=2)))
except Exception as error:
    print(error)
""",
]


@pytest.mark.slow
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
    assert "21 21 0 True" in printed
    assert "the task's source has changed since this run finished: the code of the notebook" in printed
    page = "".join(shown[0]["data"]["text/html"])
    assert "step 21 of 21, 100 %" in page
    assert escape(text) in page


FIRST, *OTHERS = NOTEBOOKS


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_notebook_of_the_examples_runs(name: str, tmp_path: Path, nothing_goes_on: None) -> None:
    """The notebook's own cells assert its promises: an error in one is raised here."""
    notebook = executed(name, tmp_path)
    kept = nbformat.writes(tidy(notebook, tmp_path))
    assert len(kept) < 100_000
    assert str(tmp_path) not in kept
    if name == "lost_worker.ipynb":
        pages = [
            output["data"]["text/html"]
            for cell in notebook.cells
            for output in cell.get("outputs", ())
            if "data" in output
        ]
        assert len(pages) == 2
        assert "1 lost worker<" in pages[-1]
        assert "recovered in" in pages[-1]
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"data", "examples", "runs"}


FOLLOWED = """
import time
from raytrain_plus import start

class Slow(Mine):
    def loss(self, model, batch):
        time.sleep(0.02)
        return super().loss(model, batch)

handle = start(Job(name="cell", task=Slow, data=Data(path="data", batch_size=48, shards=12), steps=5000))
"""


def asked(client: BlockingKernelClient, code: str) -> dict[str, Any]:
    client.execute(code)
    return client.get_shell_msg(timeout=60)["content"]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_interrupting_a_cell_that_follows_ends_the_watching_alone(tmp_path: Path, nothing_goes_on: None) -> None:
    write_data(tmp_path / "data")
    kernel, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        begun = asked(client, CELLS[0] + FOLLOWED)
        assert begun["status"] == "ok", begun
        client.execute("handle.follow()")
        until(lambda: re.search(r"\nstep [1-9]", news(client)), "a step in the cell")
        kernel.interrupt_kernel()
        reply = client.get_shell_msg(timeout=10)["content"]
        assert (reply["status"], reply["ename"]) == ("error", "FollowInterrupted")
        assert reply["traceback"] == ["cell continues in the background: follow() shows it again, stop() ends it"]
        handle = attach(tmp_path / "runs" / "cell")
        at = handle.status().steps
        until(lambda: handle.status().steps > at + 3, "3 steps more")
        assert asked(client, "handle.stop()")["status"] == "ok"
        assert handle.result(timeout_s=30).status == "stopped"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    until(lambda: not background(), "the end of its processes")


def news(client: BlockingKernelClient) -> str:
    """Return the cell's output if it has changed, otherwise an empty text."""
    try:
        content = client.get_iopub_msg(timeout=0.2)["content"]
    except Empty:
        return ""
    return str(content.get("data", {}).get("text/plain", ""))
