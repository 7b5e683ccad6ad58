"""Index data: Parquet as it is, other formats as what they are converted to, and datasets that functions return."""

from __future__ import annotations

import hashlib
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
from raytrain_plus.data.convert.parts import content_of, is_complete
from raytrain_plus.data.paths.files import data_exists, split_pattern
from raytrain_plus.data.paths.path_columns import columns_of, folder_of_other_keys
from raytrain_plus.data.paths.repository import only_split
from raytrain_plus.data.sources.items import items_of
from raytrain_plus.data.sources.iterated import read_once
from raytrain_plus.data.sources.mixed_index import mixed_index
from raytrain_plus.data.sources.packing import packed
from raytrain_plus.data.sources.read_types import chosen, explicit, narrowed
from raytrain_plus.data.sources.source import (
    Index,
    Origin,
    alike,
    check_own_labels,
    index,
    index_items,
    read_with,
    with_tokenizer,
)
from raytrain_plus.data.sources.user_dataset import open_dataset
from raytrain_plus.data.values.images import load_pillow
from raytrain_plus.errors import DataError
from raytrain_plus.job.setting_types import Format
from raytrain_plus.job.settings import Job
from raytrain_plus.observe.views.conversion_view import conversion_view, reading_view
from raytrain_plus.storage.place import Place, place_of, spelled

TEXTS: Sequence[Format] = ("jsonl", "csv")
"""The formats that say nothing of the digits of a fraction."""


def dataset(
    path: str | Place, format_: Format | None = None, *, cache: Path | None = None, skip: bool = False
) -> Index:
    """Return the index of the data at a path or an address; convert it first, and say so, if it is not Parquet.

    `format_`: None to recognise it by the names of the files. `cache`: the folder of converted data; None for the
    user's. `skip`: images that cannot be read are rows, too, which the run is to skip. Raises `DataError` for data that
    cannot be read.
    """
    base = place_of(path)
    if not split_pattern(base)[1] and not data_exists(base):
        # Its error names what is there instead.
        return index(base)
    kind = format_ or format_of(base)
    if kind == "parquet":
        try:
            return index(base)
        except DataError as error:
            raise error if format_ is not None or split_pattern(base)[1] else unknown_format(base, error) from None
    if kind == "huggingface" and not is_saved(base):
        return index(only_split(base))
    files = source_files(base, kind)
    if not files:
        raise DataError("there are no files", where=str(base), expected="rows to train on")
    target = (cache or default_cache()) / folder_name(base, kind, files)
    if not is_complete(target):
        with conversion_view(sys.stderr, base.name, len(earlier(target)) > 0) as told:
            target = converted(base, kind, told, target.parent, partial(told, copying=True), skip=skip)
    origin = Origin(spelled(base), kind, tuple(zip(map(spelled, files), sizes_of(files), strict=True)))
    found = _converted_index(target, origin)
    return replace(found, labels=saved_labels(base)) if kind == "huggingface" else found


def returned_dataset(
    spec: str,
    roots: Sequence[str | Path],
    *,
    scattered: bool = False,
    cache: Path | None = None,
    run: str | None = None,
) -> Index:
    """Return the index of the dataset that `module:function` returns; read it once if it can only be iterated.

    `roots`: folders to import from. `scattered`: see `Items`. `cache`: as for `dataset`. `run`: for a worker, that of
    the driver; see `open_dataset`. Raises `DataError` for data that cannot be read, and `TaskError` if the user's code
    raises.
    """
    began_without_ray = not _ray_runs()
    in_worker, run = run is not None, run or uuid4().hex
    found = open_dataset(spec, tuple(map(str, roots)), run)
    if found.kind == "indexed":
        return index_items(items_of(spec, roots, run, scattered=scattered))
    with reading_view(sys.stderr, spec) as told:
        target = read_once(found, cache or default_cache(), told, in_worker=in_worker)
    if not in_worker:
        print(f"rows of {spec} are those in {target}; delete it to read them again", file=sys.stderr, flush=True)
    if found.kind == "ray" and began_without_ray and _ray_runs():
        # Started by the user's function; a run starts or joins its own.
        sys.modules["ray"].shutdown()
    return _converted_index(target, Origin(spec, None, (), run))


def _converted_index(folder: Path, origin: Origin) -> Index:
    """Return the index of converted data, with a fingerprint of all values: their footers do not tell every change."""
    seen = index(folder)
    both = hashlib.sha256(f"{seen.fingerprint}\0{content_of(folder)}".encode()).hexdigest()
    return replace(seen, fingerprint=both, origin=origin)


def _ray_runs() -> bool:
    """Return whether this process is connected to a Ray; does not load Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def again(seen: Index, roots: Sequence[str | Path], *, skip: bool = False) -> Index:
    """Return the index of the same data, unpacked and no mix, as a worker's node sees it, without its tokenizer.

    `skip`: see `dataset`.
    """
    if seen.items is not None:
        return returned_dataset(seen.named, roots, scattered=seen.items.scattered, run=seen.items.run)
    if seen.origin is not None and seen.origin.format is None:
        return returned_dataset(seen.named, roots, run=seen.origin.run)
    return dataset(seen.named, "parquet" if seen.origin is None else seen.origin.format, skip=skip)


def training_data(job: Job, roots: Sequence[str | Path], *, older: bool = False) -> Index:
    """Return the index of the rows that a job trains on. `roots`: folders from which its code is imported.

    `older`: see `Index`.
    """
    if job.data.image_size is not None:
        # Before a worker starts.
        load_pillow()
    scattered = job.data.shuffle != "none"
    if job.data.mix is None:
        path, spec = job.data.path, job.data.dataset
        return _with_tokens(job, _rows(job, path, spec, job.data.format, roots, scattered=scattered, older=older))
    sources = [
        _rows(job, one.get("path"), one.get("dataset"), one.get("format"), roots, scattered=scattered, older=older)
        for one in job.data.mix
    ]
    return _with_tokens(job, replace(mixed_index(sources), older=older))


def held_out_data(job: Job, roots: Sequence[str | Path], *, older: bool = False) -> Index:
    """Return the index of the rows that a job is evaluated on; there must be some. `older`: see `Index`."""
    assert job.evaluate is not None
    path, spec = job.evaluate.path, job.evaluate.dataset
    return _with_tokens(job, _rows(job, path, spec, job.data.format, roots, scattered=False, older=older))


def both_data(job: Job, roots: Sequence[str | Path], *, older: bool = False) -> tuple[Index, Index | None]:
    """Return the training data and the held-out data, if there are any, as a run reads them. `older`: see `Index`."""
    seen = training_data(job, roots, older=older)
    return (seen, None) if job.evaluate is None else alike(seen, held_out_data(job, roots, older=older))


def _with_tokens(job: Job, rows: Index) -> Index:
    """Return the index of rows whose text becomes tokens as they are read, unless they are packed and hold tokens."""
    return rows if job.data.pack is not None else with_tokenizer(rows, job.data.tokenizer)


def _rows(
    job: Job,
    path: str | None,
    spec: str | None,
    form: Format | None,
    roots: Sequence[str | Path],
    *,
    scattered: bool,
    older: bool,
) -> Index:
    """Return the index of the rows at a path or of a dataset, packed if the job says so."""
    pack, columns = job.data.pack, job.data.columns
    if spec is not None:
        # Documents are packed in their own order.
        found = returned_dataset(spec, roots, scattered=scattered and pack is None)
    else:
        assert path is not None
        found = dataset(path, form, skip=job.data.on_error == "skip")
    if older:
        found = replace(found, partitions=None)
    beside = [one for one in columns_of(found.partitions) if one.name not in found.schema.names]
    if columns is not None:
        stored = found.schema.names
        found = read_with(found, chosen(pa.schema([*found.schema, *beside]), columns, found.named))
        if not {*columns} & {*stored}:
            raise DataError(
                "it names columns of folders alone", where="data.columns", expected=f"some of {', '.join(stored)}, too"
            )
    elif (other := folder_of_other_keys(found.files)) is not None and not older:
        said = f"values in the names of folders are not read, because {other} lacks some"
        print(f"{found.named}: {said}", file=sys.stderr)
    elif beside:
        # Text would be tokenized, or refused by whatever makes tensors.
        texts = job.data.collate == "pad" and job.data.tokenizer is None
        left = [one.name for one in beside if pa.types.is_string(one.type) and not texts]
        found = read_with(found, pa.schema([*found.schema, *(one for one in beside if one.name not in left)]))
        if left:
            print(
                f"{found.named}: {', '.join(left)}, in the names of folders, is text and not read, unless data.columns "
                "names it",
                file=sys.stderr,
            )
    if found.origin is not None and found.origin.format in TEXTS and not older:
        found = read_with(found, narrowed(found.schema, explicit(columns)))
    found = replace(found, older=older)
    if not older:
        check_own_labels(found)
    if pack is None:
        return found
    return packed(found, pack, job.data.tokenizer, chosen=columns is not None and not older)
