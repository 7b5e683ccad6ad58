"""Compare the data files of a run with those that it began with, for the audit."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.audit.audit_faults import Faults
from raytrain_plus.errors import first_line
from raytrain_plus.storage.place import Place, RemotePath, in_parallel

IMAGES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"))
"""How the names of images end."""


def compare(data: Place, files: Iterable[Mapping[str, Any]], faults: Faults, prefix: str = "") -> None:
    """Report how the files differ from those that the run began with, whose names begin with `prefix`."""
    try:
        now = _remote_files_now(data) if isinstance(data, RemotePath) else _files_now(data)
    except FileNotFoundError:
        faults.add(f"the dataset no longer exists: {data}")
        return
    except OSError as error:
        faults.add(f"the dataset cannot be accessed: {error.strerror or first_line(error)}: {data}")
        return
    was = {file["path"].removeprefix(prefix): file for file in files}
    faults.add(*(f"{prefix}{name} is missing; the run began with it" for name in sorted(was.keys() - now.keys())))
    faults.add(*(f"{prefix}{name} is new; the run began without it" for name in sorted(now.keys() - was.keys())))
    both = sorted(now.keys() & was.keys())
    looked_at = in_parallel(_look, [now[name] for name in both])
    changes = ((name, _changed(found, was[name])) for name, found in zip(both, looked_at, strict=True))
    faults.add(*(f"{prefix}{name} {change}" for name, change in changes if change))


def compare_streams(data: Path, files: Iterable[Mapping[str, Any]], faults: Faults, prefix: str = "") -> None:
    """Report the same for files of token numbers, which are compared by size and content."""
    root = _without_wildcards(data)
    for was in files:
        name = was["path"].removeprefix(prefix)
        file = (root.parent if root.is_file() else root) / name
        try:
            size, digest = file.stat().st_size, _digest_of_pieces(file)
        except FileNotFoundError:
            faults.add(f"{prefix}{name} is missing; the run began with it")
            continue
        except OSError as error:
            faults.add(f"{prefix}{name} cannot be read: {error.strerror}")
            continue
        if size != was["bytes"]:
            faults.add(f"{prefix}{name} has changed: {size:,} bytes now, {was['bytes']:,} when the run began")
        elif digest != was["footer_sha256"]:
            faults.add(f"{prefix}{name} has changed: its content differs")


def _digest_of_pieces(file: Path) -> str:
    """Return the digest of a file of token numbers: SHA-256 over its size and 256 pieces of 64 KiB."""
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        digest = hashlib.sha256(f"{size}\0".encode())
        for number in range(256):
            opened.seek(max(0, size - 65536) * number // 255)
            digest.update(opened.read(65536))
    return digest.hexdigest()


def _remote_files_now(data: RemotePath) -> dict[str, Place]:
    """Return the same for a remote path. Wildcards are matched against the names of everything below their folder.

    A part with a wildcard that exists as it is spelled is taken literally.
    """
    entry = data.look()
    if entry is not None and entry.is_file:
        return {data.name: data}
    if entry is not None:
        below = {one.relative_to(data): one for one in data.listed(recursive=True) if one.entry and one.entry.is_file}
        found = {name: one for name, one in below.items() if name.suffix == ".parquet" and not _ignored(name.parts)}
        return {name.as_posix(): one for name, one in found.items()}
    above = [*reversed(data.parents)]
    number = next((n for n, one in enumerate((*above[1:], data)) if _wild(one.name) and one.look() is None), None)
    if number is None:
        raise FileNotFoundError(str(data))
    root, pattern = above[number], data.parts[number:]
    files = {one.relative_to(root): one for one in root.listed(recursive=True) if one.entry and one.entry.is_file}
    return {name.as_posix(): one for name, one in files.items() if _fits(name.parts, pattern)}


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a whole relative name match a pattern."""
    if not names or not pattern:
        return not names and not pattern
    if pattern[0] == "**":
        deeper = len(names) > 1 and not _ignored(names[:1]) and _fits(names[1:], pattern)
        return deeper or _fits(names, pattern[1:] or ["*"])
    if not _wild(pattern[0]):
        return names[0] == pattern[0] and _fits(names[1:], pattern[1:])
    hidden = names[0][0] in "._" and pattern[0][0] != names[0][0]
    return not hidden and fnmatch.fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def _wild(part: str) -> bool:
    return bool(set("*?[") & set(part))


def _files_now(data: Path) -> dict[str, Place]:
    """Return the files that a data path names, by their names in `dataset.json`."""
    root = _without_wildcards(data)
    root.stat()
    if data.is_file():
        return {data.name: data}
    if root == data:
        below = [Path(folder, name) for folder, _, names in os.walk(data, followlinks=True) for name in names]
        files = {path for path in below if path.suffix == ".parquet" and not _ignored(path.relative_to(data).parts)}
    else:
        files = _matching(root, data.relative_to(root).parts)
    return {path.relative_to(root).as_posix(): path for path in files if path.is_file()}


def _without_wildcards(data: Path) -> Path:
    """Return as much of a path as has no wildcards; a part that exists as it is spelled is taken literally."""
    while not os.path.lexists(data) and any(set("*?[") & set(part) for part in data.parts):
        data = data.parent
    return data


@functools.lru_cache(16)
def images_below(folder: str) -> list[str]:
    """Return the images below a folder of this machine, sorted by their names; none if it is no folder."""
    root = Path(folder)
    below = [Path(at, name).relative_to(root) for at, _, names in os.walk(root, followlinks=True) for name in names]
    found = [one for one in below if one.suffix.lower() in IMAGES and not _ignored(one.parts)]
    return [str(root / name) for name in sorted(one.as_posix() for one in found)]


def _ignored(parts: Iterable[str]) -> bool:
    return any(part[0] in "._" for part in parts)


def _matching(root: Path, pattern: Sequence[str]) -> set[Path]:
    """Return what matches a pattern below `root`, part by part.

    A wildcard stands for no name with a leading . or _ that the pattern does not spell.
    """
    places = {root}
    for number, part in enumerate(pattern):
        if part == "**":
            tops = [(place, os.walk(place, followlinks=True)) for place in places]
            walked = [(place, Path(folder), files) for place, below in tops for folder, _, files in below]
            within = [(at, files) for place, at, files in walked if not _ignored(at.relative_to(place).parts)]
            last = number == len(pattern) - 1
            places = {at / name for at, files in within for name in files if not _ignored([name])} if last else set()
            places |= {at for at, _ in within}
        elif set("*?[") & set(part):
            named = re.compile(("" if part[0] in "._" else "(?![._])") + fnmatch.translate(part))
            folders = [place for place in places if place.is_dir()]
            places = {folder / name for folder in folders for name in os.listdir(folder) if named.match(name)}
        else:
            places = {place / part for place in places}
    return places


class _Looked(NamedTuple):
    """The present state of a file."""

    fault: str
    """Why it cannot be read; empty if it can."""
    size: int = 0
    footer_sha256: str = ""
    row_groups: tuple[int, ...] = ()


def _look(file: Place) -> _Looked:
    def look(opened: pa.NativeFile) -> _Looked:
        size = opened.size()
        raw = _footer(opened, size)
        metadata = pq.read_metadata(opened)
        groups = tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        return _Looked("", size, hashlib.sha256(raw).hexdigest(), groups)

    try:
        if isinstance(file, RemotePath):
            return file.read(look)
        with pa.OSFile(str(file)) as opened:
            return look(opened)
    except (OSError, pa.ArrowException) as error:
        return _Looked(f"cannot be read: {first_line(error)}")


def _changed(now: _Looked, then: Mapping[str, Any]) -> str:
    """Describe how a file has changed since the run began; empty if it has not."""
    if now.fault:
        return now.fault
    if now.size != then["bytes"]:
        return f"has changed: {now.size:,} bytes now, {then['bytes']:,} when the run began"
    if now.footer_sha256 != then["footer_sha256"]:
        return "has changed: its footer differs"
    return "" if list(now.row_groups) == then["row_groups"] else "has other row groups than dataset.json lists"


def _footer(opened: pa.NativeFile, size: int) -> bytes:
    end = opened.read_at(min(8, size), max(0, size - 8))
    length = int.from_bytes(end[:4], "little")
    begin = max(0, size - 8 - length)
    return bytes(opened.read_at(min(length, size - begin), begin))
