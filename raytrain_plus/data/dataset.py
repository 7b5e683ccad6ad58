"""Index the data of a path, whatever its format: Parquet as it is, anything else as what it is converted to."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from raytrain_plus.data.convert.conversion import converted, default_cache, earlier, folder_name, source_files
from raytrain_plus.data.convert.formats import format_of
from raytrain_plus.data.convert.parts import is_complete
from raytrain_plus.data.files import data_exists, split_pattern
from raytrain_plus.data.source import Index, Origin, index, with_tokenizer
from raytrain_plus.errors import DataError
from raytrain_plus.job.settings import Format, Job
from raytrain_plus.observe.conversion_view import conversion_view


def dataset(path: str | Path, format_: Format | None = None, *, cache: Path | None = None) -> Index:
    """Return the index of the data at a path; convert it first if it is not Parquet, and say so on stderr.

    `format_`: None to recognise it by the names of the files. `cache`: the folder of converted data; None for the
    user's. Raises `DataError` for data that cannot be read.
    """
    base = Path(path).absolute()
    if not split_pattern(base)[1] and not data_exists(base):
        # Its error names what is there instead.
        return index(base)
    kind = format_ or format_of(base)
    if kind == "parquet":
        return index(base)
    files = source_files(base, kind)
    if not files:
        raise DataError("there are no files", where=str(base), expected="rows to train on")
    target = (cache or default_cache()) / folder_name(base, kind, files)
    if not is_complete(target):
        with conversion_view(sys.stderr, base.name, len(earlier(target)) > 0) as told:
            target = converted(base, kind, told, target.parent)
    origin = Origin(str(base), kind, tuple((str(file), file.stat().st_size) for file in files))
    return replace(index(target), origin=origin)


def training_data(job: Job) -> Index:
    """Return the index of the rows that a job trains on."""
    return with_tokenizer(dataset(job.data.path, job.data.format), job.data.tokenizer)


def held_out_data(job: Job) -> Index:
    """Return the index of the rows that a job is evaluated on; there must be some."""
    assert job.evaluate is not None
    return with_tokenizer(dataset(job.evaluate.path, job.data.format), job.data.tokenizer)
