"""Find the source of a job's rows: Parquet as it is, other formats converted, and datasets that functions return."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from raytrain_plus.data.convert.cache import default_cache
from raytrain_plus.data.convert.conversion import (
    converted,
    earlier,
    folder_name,
    saved_labels,
    sizes_of,
    source_files,
)
from raytrain_plus.data.convert.formats.formats import format_of, is_saved, unknown_format
from raytrain_plus.data.convert.parts import is_complete
from raytrain_plus.data.paths.files import data_exists, split_pattern
from raytrain_plus.data.paths.path_columns import columns_of, folder_of_other_keys
from raytrain_plus.data.paths.repository import only_split
from raytrain_plus.data.sources.alike import alike, check_own_labels
from raytrain_plus.data.sources.converted_source import ConvertedSource, Origin, converted_source
from raytrain_plus.data.sources.items import ItemSource, item_source
from raytrain_plus.data.sources.iterated import read_once
from raytrain_plus.data.sources.joined_source import JoinedSource, joined
from raytrain_plus.data.sources.mixed_source import mixed
from raytrain_plus.data.sources.packing import PackedSource, packed
from raytrain_plus.data.sources.parquet_source import ParquetSource, parquet_source
from raytrain_plus.data.sources.read_types import chosen, explicit, narrowed
from raytrain_plus.data.sources.source import Source
from raytrain_plus.data.sources.tokenized_source import tokenized
from raytrain_plus.data.sources.user_dataset import open_dataset
from raytrain_plus.data.sources.windows import are_streams, windows_of
from raytrain_plus.data.values.images import load_pillow
from raytrain_plus.data.values.token_stream import numbers_of
from raytrain_plus.errors import DataError
from raytrain_plus.job.setting_types import Format
from raytrain_plus.job.settings import Job
from raytrain_plus.observe.views.conversion_view import conversion_view, reading_view
from raytrain_plus.storage.place import Place, place_of, spelled

TEXTS: Sequence[Format] = ("jsonl", "csv")
"""The formats that say nothing of the digits of a fraction."""


def dataset(
    path: str | Place, format_: Format | None = None, *, cache: Path | None = None, skip: bool = False
) -> Source:
    """Return the source of the data at a path or an address; convert it first, and say so, if it is not Parquet.

    `format_`: None to recognise it by the names of the files. `cache`: the folder of converted data; None for the
    user's. `skip`: images that cannot be read are rows, too, which the run is to skip. Raises `DataError` for data that
    cannot be read.
    """
    base = place_of(path)
    if not split_pattern(base)[1] and not data_exists(base):
        # Its error names what is there instead.
        return parquet_source(base)
    kind = format_ or format_of(base)
    if kind == "parquet":
        try:
            return parquet_source(base)
        except DataError as error:
            raise error if format_ is not None or split_pattern(base)[1] else unknown_format(base, error) from None
    if kind == "huggingface" and not is_saved(base):
        return parquet_source(only_split(base))
    files = source_files(base, kind)
    if not files:
        raise DataError("there are no files", where=str(base), expected="rows to train on")
    target = (cache or default_cache()) / folder_name(base, kind, files)
    if not is_complete(target):
        with conversion_view(sys.stderr, base.name, len(earlier(target)) > 0) as told:
            target = converted(base, kind, told, target.parent, partial(told, copying=True), skip=skip)
    origin = Origin(spelled(base), kind, tuple(zip(map(spelled, files), sizes_of(files), strict=True)))
    return converted_source(target, origin, saved_labels(base) if kind == "huggingface" else None)


def returned_dataset(
    spec: str,
    roots: Sequence[str | Path],
    *,
    scattered: bool = False,
    cache: Path | None = None,
    run: str | None = None,
) -> Source:
    """Return the source of the dataset that `module:function` returns; read it once if it can only be iterated.

    `roots`: folders to import from. `scattered`: see `ItemSource`. `cache`: as for `dataset`. `run`: for a worker, that
    of the driver; see `open_dataset`. Raises `DataError` for data that cannot be read, and `TaskError` if the user's
    code raises.
    """
    began_without_ray = not _ray_runs()
    in_worker, run = run is not None, run or uuid4().hex
    found = open_dataset(spec, tuple(map(str, roots)), run)
    if found.kind == "indexed":
        return item_source(spec, roots, run, scattered=scattered)
    with reading_view(sys.stderr, spec) as told:
        target = read_once(found, cache or default_cache(), told, in_worker=in_worker)
    if not in_worker:
        print(f"rows of {spec} are those in {target}; delete it to read them again", file=sys.stderr, flush=True)
    if found.kind == "ray" and began_without_ray and _ray_runs():
        # Started by the user's function; a run starts or joins its own.
        sys.modules["ray"].shutdown()
    return converted_source(target, Origin(spec, None, (), run))


def _ray_runs() -> bool:
    """Return whether this process is connected to a Ray; does not load Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def training_data(job: Job, roots: Sequence[str | Path], *, older: bool = False) -> Source:
    """Return the source of the rows that a job trains on. `roots`: folders from which its code is imported.

    `older`: see `READING`.
    """
    if job.data.image_size is not None:
        # Before a worker starts.
        load_pillow()
    scattered = job.data.shuffle != "none"
    if job.data.mix is None:
        path, spec = job.data.path, job.data.dataset
        rows = _rows(job, path, spec, job.data.format, roots, scattered=scattered, older=older)
        return _with_tokens(job, _by_length(job, rows))
    sources = [
        _rows(job, one.get("path"), one.get("dataset"), one.get("format"), roots, scattered=scattered, older=older)
        for one in job.data.mix
    ]
    return _with_tokens(job, mixed(sources, older=older))


def held_out_data(job: Job, roots: Sequence[str | Path], *, older: bool = False) -> Source:
    """Return the source of the rows that a job is evaluated on; there must be some. `older`: see `READING`."""
    assert job.evaluate is not None
    path, spec, drawn = job.evaluate.path, job.evaluate.dataset, job.evaluate.batches is not None
    return _with_tokens(job, _rows(job, path, spec, job.data.format, roots, scattered=drawn, older=older))


def both_data(job: Job, roots: Sequence[str | Path], *, older: bool = False) -> tuple[Source, Source | None]:
    """Return the training data and the held-out data, if there are any, as a run reads them. `older`: see `READING`."""
    seen = training_data(job, roots, older=older)
    return (seen, None) if job.evaluate is None else alike(seen, held_out_data(job, roots, older=older), older=older)


def _by_length(job: Job, rows: Source) -> Source:
    """Return the source of rows in groups of similar length, if the job says so."""
    column, data = job.data.group_by_length, job.data
    if column is None:
        return rows
    if not isinstance(rows, ItemSource):
        raise DataError(
            "only a dataset that is read by index can be grouped by length",
            where=f"data.group_by_length: {rows.named}",
            remedy="return a torch.utils.data.Dataset with a length, or leave data.group_by_length out",
        )
    return rows.by_length(column, data.batch_size, data.batch_size // data.shards // job.parallel.microbatches)


def _with_tokens(job: Job, rows: Source) -> Source:
    """Return the source of rows whose text becomes tokens as they are read, unless they hold tokens already."""
    made = job.data.pack is not None or job.data.windows is not None
    return rows if made else tokenized(rows, job.data.tokenizer)


def _rows(
    job: Job,
    path: str | None,
    spec: str | None,
    form: Format | None,
    roots: Sequence[str | Path],
    *,
    scattered: bool,
    older: bool,
) -> Source:
    """Return the source of the rows at a path or of a dataset, packed or cut into windows if the job says so."""
    pack, columns = job.data.pack, job.data.columns
    windows, numbers = job.data.windows, numbers_of(form)
    if windows is not None and path is not None and (numbers or (form is None and are_streams(path))):
        for name, value in (("data.columns", columns), ("data.tokenizer", job.data.tokenizer)):
            if value is not None:
                what = f"{name} is for documents, and these files hold the numbers of tokens already"
                raise DataError(what, where=path, remedy=f"leave out {name}")
        return windows_of(path, numbers, windows, job.data.stride, scattered=scattered)
    if spec is not None:
        # Documents are packed or joined in their own order.
        found = returned_dataset(spec, roots, scattered=scattered and pack is None and windows is None)
    else:
        assert path is not None
        found = dataset(path, form, skip=job.data.on_error == "skip")
    beside, other = list[pa.Field](), None
    if isinstance(found, ParquetSource):
        if older:
            found = replace(found, partitions=None)
        else:
            other = folder_of_other_keys(found.files)
        beside = [one for one in columns_of(found.partitions) if one.name not in found.schema.names]
    if columns is not None:
        stored = found.schema.names
        found = found.read_as(chosen(pa.schema([*found.schema, *beside]), columns, found.named))
        if not {*columns} & {*stored}:
            raise DataError(
                "it names columns of folders alone", where="data.columns", expected=f"some of {', '.join(stored)}, too"
            )
    elif other is not None:
        said = f"values in the names of folders are not read, because {other} lacks some"
        print(f"{found.named}: {said}", file=sys.stderr)
    elif beside:
        # Text would be tokenized, or refused by whatever makes tensors.
        texts = job.data.collate == "pad" and job.data.tokenizer is None
        left = [one.name for one in beside if pa.types.is_string(one.type) and not texts]
        found = found.read_as(pa.schema([*found.schema, *(one for one in beside if one.name not in left)]))
        if left:
            print(
                f"{found.named}: {', '.join(left)}, in the names of folders, is text and not read, unless data.columns "
                "names it",
                file=sys.stderr,
            )
    if not older:
        if _is_text(found):
            found = found.read_as(narrowed(found.schema, explicit(columns)))
        check_own_labels(found)
    tokenizer, select = job.data.tokenizer, columns is not None and not older
    if windows is not None:
        return joined(found, windows, job.data.stride, tokenizer, scattered=scattered, chosen=select)
    return found if pack is None else packed(found, pack, tokenizer, chosen=select)


def _is_text(data: Source) -> bool:
    return isinstance(data, ConvertedSource) and data.origin.format in TEXTS


def reads_otherwise(data: Source) -> bool:
    """Return whether an older version read rows of a source otherwise: see `READING`."""
    documents = (one.documents if isinstance(one, (PackedSource, JoinedSource)) else one for one in data.parts)
    return any(_is_text(one) or (isinstance(one, ParquetSource) and one.partitions is not None) for one in documents)
