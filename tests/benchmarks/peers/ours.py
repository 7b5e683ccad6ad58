"""This platform: when one worker dies, the others continue from memory; a new one joins. As a module: the driver."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Set
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from examples.byte_gpt import VOCABULARY, ByteGPT
from raytrain_plus import Data, Elastic, Job, Parallel, Workers, run
from raytrain_plus.job.setting_types import Sharded
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.observe.views.progress import PlainView
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.trial.measure import TIMES
from tests.benchmarks.incidents import Incident
from tests.benchmarks.peers.model import REPOSITORY, SIZES, WORKERS, Log, kill_some, started

DRIVER = "tests.benchmarks.peers.ours"
NAME = "ours"


class Logged(ByteGPT):
    """The byte GPT; each worker logs the steps that it has applied."""

    def __init__(self, model: str, folder: str, pipeline: int, sharded: bool = False) -> None:
        super().__init__(width=SIZES[model].width)
        # Before a sharded state is built, four optimizers show how it can be divided; with stages, also before that.
        self._probes = (8 if pipeline > 1 else 4) if sharded else 0
        self._folder = Path(folder)
        self._log: Log | None = None
        # In stages the layers are measured at warm-up, the first and the last of them with the loss.
        self._practice = 2 * TIMES if pipeline > 1 else 0

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self._practice -= 1
        if self._practice == 0:
            self._finished(0)
        return super().loss(model, batch)

    def _finished(self, step: int) -> None:
        if self._log is None:
            self._log = Log(self._folder)
        self._log.finished(step)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        inner = super().optimizer(parameters)
        self._probes -= 1
        if self._probes >= 0:
            return inner

        def applied(optimizer: torch.optim.Optimizer, arguments: Any, settings: Any) -> None:
            # A worker that makes a warm-up step is not a member: it does so at step 0, where no worker is killed.
            # A newcomer has no rows of a sharded state at first, and so no count.
            if counts := [int(state["step"]) for state in optimizer.state.values()]:
                self._finished(max(counts) - 1)

        inner.register_step_post_hook(applied)
        return inner


def measure(
    folder: Path,
    kills: int,
    *,
    model: str = "byte_gpt",
    spares: int = 0,
    pipeline: int = 1,
    two: bool = False,
    sharded: Sharded = "none",
) -> list[Incident]:
    """Kill `kills` workers, one after the other, in runs under `folder`.

    With `two`, kill two of the four stages at once, which keep no copies for each other. Each kill needs a new run,
    because every death changes which worker keeps whose copy.
    """

    def start(made: Path) -> AbstractContextManager[object]:
        arguments = (model, str(spares), str(pipeline), sharded)
        return started(DRIVER, made, *arguments, settings={"RAY_AUTH_MODE": "disabled"})

    if two:
        return kill_some(start, folder, kills, replaces=False, choose=every_second)
    return kill_some(start, folder, kills, replaces=True, spares=spares)


def every_second(folder: Path, pids: Set[int], chance: random.Random) -> Set[int]:
    """Return the workers of stages 0 and 2, or of 1 and 3. In a new run the next stage keeps a copy of each."""
    [*_, view] = [event for event in events(folder) if event["kind"] == "view_formed"]
    first = chance.randrange(2)
    return {member["pid"] for member in view["members"] if member["stage"] % 2 == first} & pids


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the run in `folder`."""
    return read_events(LocalFolder(folder / "runs" / NAME))


def recoveries(folder: Path) -> list[Mapping[str, Any]]:
    """Return the recoveries of the runs under `folder`."""
    runs = sorted(folder.glob("**/run-*"))
    return [event for run in runs for event in events(run) if event["kind"] == "recovered"]


def drive(folder: Path, model: str, spares: int, pipeline: int, sharded: Sharded) -> None:
    """Train on its own Ray until it is ended."""
    size = SIZES[model]
    data = folder / "data"
    data.mkdir()
    text = np.random.default_rng(0).integers(0, VOCABULARY, (64 * WORKERS * size.rows, size.length + 1), dtype=np.uint8)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(text.reshape(-1)), size.length + 1)
    pq.write_table(pa.table({"bytes": rows}), data / "text.parquet", row_group_size=64, write_page_checksum=True)
    job = Job(
        name=NAME,
        task=Logged,
        args={"model": model, "folder": str(folder), "pipeline": pipeline, "sharded": sharded != "none"},
        data=Data(path=str(data), batch_size=WORKERS * size.rows, shards=WORKERS * size.rows),
        steps=1_000_000,
        workers=Workers(min=2, max=WORKERS, spares=spares),
        parallel=Parallel(pipeline=pipeline, sharded=sharded),
        elastic=Elastic(stop_grace_s=3),
        storage=str(folder / "runs"),
    )
    run(job, view=PlainView(sys.stdout), roots=[REPOSITORY])


if __name__ == "__main__":
    # Under its own name: a task in `__main__` would travel by value.
    from tests.benchmarks.peers import ours

    [way] = [one for one in get_args(Sharded) if one == sys.argv[5]]
    ours.drive(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), way)
