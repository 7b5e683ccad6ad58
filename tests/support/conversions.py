"""The same rows in every format."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather

from raytrain_plus.data.convert import parts

ROWS = [{"id": n, "x": n / 4, "t": f'line {n}, "quoted"\t' + "é" * (n % 7), "ok": n % 3 == 0} for n in range(3000)]


TABLE = pa.Table.from_pylist(ROWS)


NONE = parts.Progress("")


def write_jsonl(file: Path, rows: list[dict[str, Any]], opened: Any = open) -> None:
    with opened(file, "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_csv(file: Path, rows: list[dict[str, Any]], tab: bool = False) -> None:
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), delimiter="\t" if tab else ",")
        writer.writeheader()
        writer.writerows(rows)


def write_stream(file: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, 70)


def write_saved(folder: Path, rows: list[dict[str, Any]]) -> None:
    """As `save_to_disk` of Hugging Face's datasets does."""
    folder.mkdir()
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    write_stream(folder / names[0], rows[:100])
    write_stream(folder / names[1], rows[100:])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


def two_files(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", rows[:1234])
    write_jsonl(folder / "b.ndjson", rows[1234:])


SOURCES: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "rows.jsonl": write_jsonl,
    "rows.jsonl.gz": lambda file, rows: write_jsonl(file, rows, gzip.open),
    "rows.csv": write_csv,
    "rows.tsv": lambda file, rows: write_csv(file, rows, tab=True),
    "rows.arrow": write_stream,
    "rows.feather": lambda file, rows: pa.feather.write_feather(pa.Table.from_pylist(rows), str(file)),
    "saved": write_saved,
    "folder": two_files,
}


def quiet(read: int, of: int) -> None:
    assert 0 <= read <= of


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def kill_after_a_part(words: list[str], cache: Path) -> int:
    """Kill the conversion into a cache that a command makes, after its first part; return the inode of that part."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    # A part whose progress is not written is made again.
    while not any((parts.load_progress(one) or NONE).parts for one in cache.glob(".*.partial")):
        assert process.poll() is None
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    [partial] = cache.glob(".*.partial")
    return (partial / "part-00000.parquet").stat().st_ino


Members = Sequence[tuple[str, bytes]]


def write(file: Path, members: Members) -> None:
    with tarfile.open(file, "w:gz" if file.name.endswith("gz") else "w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
