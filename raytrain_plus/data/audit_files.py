"""Compare the data files of a run with those that it began with, for the audit."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.data.audit_faults import Faults, first_line


def compare(data: Path, then: Mapping[str, Any], faults: Faults) -> None:
    """Report how the files differ from those that the run began with."""
    try:
        data.stat()
    except FileNotFoundError:
        faults.add(f"the dataset no longer exists: {data}")
        return
    except OSError as error:
        faults.add(f"the dataset cannot be accessed: {error.strerror}: {data}")
        return
    now = {}
    if data.is_file():
        now[data.name] = data
    else:
        for folder, _, names in os.walk(data):
            for name in names:
                path = Path(folder, name).relative_to(data)
                if (
                    name.endswith(".parquet")
                    and Path(folder, name).is_file()
                    and not any(part[0] in "._" for part in path.parts)
                ):
                    now[path.as_posix()] = data / path
    was = {file["path"]: file for file in then["files"]}
    faults.add(*(f"{name} is missing; the run began with it" for name in sorted(was.keys() - now.keys())))
    faults.add(*(f"{name} is new; the run began without it" for name in sorted(now.keys() - was.keys())))
    changes = {name: _changed(now[name], was[name]) for name in sorted(now.keys() & was.keys())}
    faults.add(*(f"{name} {change}" for name, change in changes.items() if change))


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
