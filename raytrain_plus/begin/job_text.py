"""The job file that `raytrain new-job` writes for a task. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

PLACEHOLDER = "PATH/OF/YOUR/PARQUET/FILES"
"""The data path of a job whose data is not known; `raytrain validate` says that it does not exist."""
_SHARDS = 8
_BATCHES = (256, 128, 64, 32, 16, 8)
_STEPS = 20
"""Steps that an epoch should have at least, so that the first numbers come soon."""


@dataclass(frozen=True, slots=True)
class KnownData:
    """What is known of the data at a path."""

    rows: int
    row_groups: int
    columns: Sequence[str]
    images: bool = False
    """Whether a column may hold encoded images."""


def name_of(spec: str) -> str:
    """Return the name of a job for the class `module:Class`.

    >>> name_of("examples.byte_gpt:ByteGPT")
    'byte_gpt'
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", spec.rpartition(":")[2].rpartition(".")[2])
    return words.lower()


def sizes_for(rows: int) -> tuple[int, int]:
    """Return (`data.batch_size`, `data.shards`) to begin with for data of `rows` rows.

    >>> sizes_for(1437), sizes_for(100), sizes_for(5)
    ((64, 8), (8, 8), (5, 5))
    """
    if rows < _SHARDS:
        return rows, rows
    return next((batch for batch in _BATCHES if batch * _STEPS <= rows), _SHARDS), _SHARDS


def job_text(
    spec: str, signature: inspect.Signature, path: str | None, known: KnownData | None, prepare: str | None
) -> str:
    """Return a job file with a comment beside each key.

    `signature`: the task's constructor. `path`: its data, if given; `known`: what could be read there. `prepare`: the
    function `module:function` that writes the data, if there is one.
    """
    name = name_of(spec)
    batch, shards = sizes_for(known.rows) if known else (64, _SHARDS)
    place = path or (f"data/{name}/train" if prepare else PLACEHOLDER)
    if known:
        groups = f"{known.row_groups:,} row group{'s' * (known.row_groups != 1)}"
        there = f"{known.rows:,} rows in {groups}: {', '.join(known.columns)}"
    else:
        there = "a file, a folder or a pattern; or `dataset: MODULE:FUNCTION` in its place"
    images = known is not None and known.images
    lines = [
        (f"task: {spec}", ""),
        *_args(spec, signature),
        ("seed: 0", "of the initial weights, all random numbers and the sample order"),
        ("data:", ""),
        (f"  path: {_spelled(place)}", there),
        (f"  prepare: {prepare}", "writes the data if it is missing")
        if prepare
        else ("  # prepare: MODULE:FUNCTION", "function(folder, name) that writes the data if it is missing"),
        *([("  # image_size: [224, 224]", "decodes the images, to this height and width")] if images else []),
        (f"  batch_size: {batch}", "rows of one step, over all workers; a multiple of shards"),
        (f"  shards: {shards}", "logical shares of a batch; the result depends on them, not on the workers"),
        ("epochs: 10", "passes over the data; or `steps`"),
        ("workers: {min: 1, max: 2}", "trains with as many as there is room for"),
        ("# evaluate: {path: HELD_OUT, every_steps: 100}", "rows that are not trained on, for Task.evaluate"),
        ("# checkpoint: {every_steps: 200, keep: 3}", "default: one every 10 minutes, and one at the end"),
    ]
    width = max(len(line) for line, _ in lines if len(line) <= 50)
    told = [f"{line.ljust(width)}  # {why}" if why else line for line, why in lines]
    head = f"# A job for {spec.rpartition(':')[2]}, to begin with; raytrain validate says what each size means."
    return "\n".join([head, *told, ""])


def _args(spec: str, signature: inspect.Signature) -> list[tuple[str, str]]:
    """Return the lines with the constructor's arguments: those it requires, and as a comment those with a default."""
    taken = [one for one in signature.parameters.values() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    required = {one.name: None for one in taken if one.default is one.empty}
    defaults = {one.name: one.default for one in taken if one.name not in required and _is_plain(one.default)}
    cls = spec.rpartition(":")[2]
    if required:
        rest = f", has {_flow(defaults)}" if defaults else ""
        return [(f"args: {_flow(required)}", f"{cls}(...) requires these: give their values{rest}")]
    return [(f"# args: {_flow(defaults)}", f"arguments of {cls}(...); these are its defaults")] if defaults else []


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _flow(values: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(values, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True)
    return text.strip()


def _spelled(text: str) -> str:
    dumped: str = yaml.safe_dump(text, width=10**6, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")
