"""Say which format a data path has, by its name or its content, and which names its files have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from raytrain_plus.data.paths.files import is_file, names_below
from raytrain_plus.data.values.token_stream import SUFFIXES as STREAMS
from raytrain_plus.errors import DataError
from raytrain_plus.job.setting_types import Format
from raytrain_plus.storage.place import Place, RemotePath

PACKED: Mapping[str, str] = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Suffixes of compressed files, which follow those of the formats whose files are text -> pyarrow's names for them."""
_OF_TEXT: Mapping[Format, tuple[str, ...]] = {
    "jsonl": (".jsonl", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "text": (".txt", ".md"),
}
SUFFIXES: Mapping[Format, tuple[str, ...]] = {
    "parquet": (".parquet",),
    **{name: (*found, *(one + packed for one in found for packed in PACKED)) for name, found in _OF_TEXT.items()},
    "arrow": (".arrow", ".feather"),
    "huggingface": (".arrow",),
    "images": (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    "webdataset": (".tar", ".tar.gz", ".tgz"),
    "lance": (".lance",),
}
"""For each format, how the names of its files end; of Lance, those of its folders too."""

SAVED_SPLITS, SAVED = "dataset_dict.json", "state.json"
"""The files by which `save_to_disk` of Hugging Face's `datasets` marks a folder: of several splits, and of one."""
SAVED_INFO = "dataset_info.json"
"""What it writes of the columns beside them."""
_MAGIC = b"PAR1"
"""How a Parquet file begins."""


def format_of(path: Place) -> Format:
    """Return the format of the data at an absolute path or a remote one; Parquet if nothing tells.

    A folder has the format of the files in it, if these have one format and none of them is Parquet. Beside files of
    another format, images count if they are more.
    """
    by_name = _of_name(path.name)
    if by_name is not None or is_file(path):
        return by_name or "parquet"
    if is_saved(path):
        return "huggingface"
    found = Counter(one for name in names_below(path) if (one := _of_name(name)) is not None)
    images = found.pop("images", 0)
    if images > found.total() and "parquet" not in found:
        return "images"
    return next(iter(found)) if len(found) == 1 else "parquet"


def unknown_format(path: Place, error: DataError) -> DataError:
    """Return what to say of data that was taken for Parquet because its names tell no other format.

    `error`: what reading it as Parquet says; returned if it is Parquet, or a pattern.
    """
    file = is_file(path)
    names = [path.name] if file else names_below(path)
    found = Counter(one for name in names if (one := _of_name(name)) is not None)
    if "parquet" in found or (file and _may_be_parquet(path)):
        return error
    if found:
        there = ", ".join(f"{count} {name}" for name, count in found.most_common())
        first = path / f"*{SUFFIXES[next(iter(found))][0]}"
        remedy = f"set data.format to one of them, or name the files of one, such as {first}"
        return DataError(f"holds files of several formats: {there}", where=str(path), remedy=remedy)
    if any(name.lower().endswith(STREAMS) for name in names):
        what = "holds no rows: files of such names are streams of token numbers"
        return DataError(what, where=str(path), remedy="set data.windows to the tokens of a row")
    named = ", ".join(dict.fromkeys(f"*{suffixes[0]}" for suffixes in SUFFIXES.values()))
    return DataError(
        "is not a Parquet file, and its name tells no other format" if file else error.what,
        where=str(path),
        expected=f"a file named as {named}" if file else f"files named as {named}",
        remedy="rename the file, or set data.format" if file else "put the data there; or set data.format",
    )


def _may_be_parquet(file: Place) -> bool:
    """Return whether a file begins as Parquet, or cannot be read at all."""
    try:
        if isinstance(file, RemotePath):
            return bool(file.read(lambda opened: opened.read_at(len(_MAGIC), 0)) == _MAGIC)
        with file.open("rb") as opened:
            return opened.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return True


def is_saved(folder: Place) -> bool:
    """Return whether `save_to_disk` has written a folder."""
    return is_file(folder / SAVED) or is_file(folder / SAVED_SPLITS)


def _of_name(name: str) -> Format | None:
    return next((one for one, suffixes in SUFFIXES.items() if name.lower().endswith(suffixes)), None)
