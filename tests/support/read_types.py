"""Jobs on columns, and the rows that they read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytrain_plus import Data, Evaluate, Job, Task
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.sources.source import Source


def job(path: Path | None = None, **data: Any) -> Job:
    given = {"path": None if path is None else str(path), "batch_size": 2, "shards": 1, **data}
    held_out = given.pop("held_out", None)
    evaluate = None if held_out is None else Evaluate(path=str(held_out), every_steps=1)
    return Job(name="x", task=Task, data=Data(**given), steps=2, evaluate=evaluate)


def read(data: Source) -> dict[str, list[Any]]:
    return without_ids(data.read_unit(0)).to_pydict()
