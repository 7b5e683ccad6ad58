"""Compare the data files of a run with those that it began with, for the audit."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.data.audit_faults import Faults
from raytrain_plus.errors import first_line


def compare(data: Path, files: Iterable[Mapping[str, Any]], faults: Faults, prefix: str = "") -> None:
    """Report how the files differ from those that the run began with, whose names begin with `prefix`."""
    try:
        now = _files_now(data)
    except FileNotFoundError:
        faults.add(f"the dataset no longer exists: {data}")
        return
    except OSError as error:
        faults.add(f"the dataset cannot be accessed: {error.strerror}: {data}")
        return
    was = {file["path"].removeprefix(prefix): file for file in files}
    faults.add(*(f"{prefix}{name} is missing; the run began with it" for name in sorted(was.keys() - now.keys())))
    faults.add(*(f"{prefix}{name} is new; the run began without it" for name in sorted(now.keys() - was.keys())))
    changes = {name: _changed(now[name], was[name]) for name in sorted(now.keys() & was.keys())}
    faults.add(*(f"{prefix}{name} {change}" for name, change in changes.items() if change))


def _files_now(data: Path) -> dict[str, Path]:
    """Return the files that a data path names, by their names in `dataset.json`."""
    root = data
    while not os.path.lexists(root) and any(set("*?[") & set(part) for part in root.parts):
        root = root.parent
    root.stat()
    if data.is_file():
        return {data.name: data}
    if root == data:
        below = [Path(folder, name) for folder, _, names in os.walk(data) for name in names]
        files = {path for path in below if path.suffix == ".parquet" and not _ignored(path.relative_to(data).parts)}
    else:
        files = _matching(root, data.relative_to(root).parts)
    return {path.relative_to(root).as_posix(): path for path in files if path.is_file()}


def _ignored(parts: Iterable[str]) -> bool:
    return any(part[0] in "._" for part in parts)


def _matching(root: Path, pattern: Sequence[str]) -> set[Path]:
    """Return what matches a pattern below `root`, part by part.

    A wildcard stands for no name with a leading . or _ that the pattern does not spell; `**` follows no links.
    """
    places = {root}
    for number, part in enumerate(pattern):
        if part == "**":
            walked = [(place, Path(folder), files) for place in places for folder, _, files in os.walk(place)]
            below = [(at, files) for place, at, files in walked if not _ignored(at.relative_to(place).parts)]
            last = number == len(pattern) - 1
            places = {at / name for at, files in below for name in files if not _ignored([name])} if last else set()
            places |= {at for at, _ in below}
        elif set("*?[") & set(part):
            named = re.compile(("" if part[0] in "._" else "(?![._])") + fnmatch.translate(part))
            folders = [place for place in places if place.is_dir()]
            places = {folder / name for folder in folders for name in os.listdir(folder) if named.match(name)}
        else:
            places = {place / part for place in places}
    return places


def _changed(file: Path, then: Mapping[str, Any]) -> str:
    """Describe how a file has changed since the run began; empty if it has not."""
    try:
        size, raw = file.stat().st_size, _footer(file)
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        return f"cannot be read: {first_line(error)}"
    if size != then["bytes"]:
        return f"has changed: {size:,} bytes now, {then['bytes']:,} when the run began"
    if hashlib.sha256(raw).hexdigest() != then["footer_sha256"]:
        return "has changed: its footer differs"
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return "" if groups == then["row_groups"] else "has other row groups than dataset.json lists"


def _footer(file: Path) -> bytes:
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, size - 8 - length))
        return stream.read(length)
