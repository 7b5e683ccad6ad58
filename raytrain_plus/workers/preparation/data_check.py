"""Check that the data on this node is what the driver saw, and that it stays so."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from raytrain_plus.data.dataset import dataset, returned_dataset
from raytrain_plus.data.paths.sight import Sight
from raytrain_plus.data.prepare import prepare
from raytrain_plus.data.sources.converted_source import ConvertedSource, Origin
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.items import ItemSource
from raytrain_plus.data.sources.joined_source import JoinedSource, joined
from raytrain_plus.data.sources.mixed_source import MixedSource, mix_of
from raytrain_plus.data.sources.packing import PackedSource, packed
from raytrain_plus.data.sources.parquet_source import ParquetSource, check_unchanged, parquet_source
from raytrain_plus.data.sources.source import Kind, Source
from raytrain_plus.data.sources.tokenized_source import TokenizedSource, tokenized
from raytrain_plus.data.sources.windows import WindowsSource, check_windows, windows_of
from raytrain_plus.data.values.tokens import TokenizerFile
from raytrain_plus.errors import DataError
from raytrain_plus.workers.messages import Plan


def same_data(plan: Plan, roots: list[Path], expected: Source) -> Source:
    """Make the data if this node lacks it, compare it with what the driver saw, and return it as this node sees it.

    Raises `DataChanged` if a file has changed since an earlier worker on this node first saw it, `DataError` if the
    data differs from the driver's.
    """
    match expected:
        case MixedSource():
            return mix_of([same_data(plan, roots, source) for source in expected.mixed])
        case TokenizedSource():
            return _same_tokenizer(same_data(plan, roots, expected.source), expected.tokenizer)
        case PackedSource():
            packing = expected.packing
            tokenizer = None if packing.tokenizer is None else packing.tokenizer.path
            documents = same_data(plan, roots, expected.documents)
            return _checked(packed(documents, packing.length, tokenizer, chosen=packing.chosen != ""), expected)
        case JoinedSource():
            length, stride, scattered = expected.source.length, expected.source.stride, expected.source.scattered
            tokenizer = None if expected.tokens.tokenizer is None else expected.tokens.tokenizer.path
            documents = same_data(plan, roots, expected.documents)
            again = joined(documents, length, stride, tokenizer, scattered=scattered, chosen=expected.chosen)
            return _checked(again, expected)
        case ItemSource():
            seen = returned_dataset(expected.named, roots, scattered=expected.scattered, run=expected.run)
            if expected.groups is not None and isinstance(seen, ItemSource):
                # Lengths were read once, by the driver.
                seen = seen.grouped(expected.groups)
            return _checked(seen, expected).read_as(expected.schema)
        case ConvertedSource(origin=Origin(format=None)):
            seen = returned_dataset(expected.named, roots, run=expected.origin.run)
            return _converted_alike(seen, expected)
        case ConvertedSource():
            # Each node converts its own copy, and may do so again: other files with the same rows.
            prepare(plan.job.data.prepare, expected.named, roots)
            skip = plan.job.data.on_error == "skip"
            return _converted_alike(dataset(expected.named, expected.origin.format, skip=skip), expected)
        case WindowsSource():
            prepare(plan.job.data.prepare, expected.named, roots)
            first = plan.sights.get(expected.named)
            if first is not None:
                replace(expected, sights=first).check_unchanged()
            length, stride = expected.length, expected.stride
            seen = windows_of(expected.named, expected.numbers, length, stride, scattered=expected.scattered)
            return _checked(seen, expected)
        case ParquetSource():
            # Not as the job names it: a path may be relative to the driver's working directory.
            prepare(plan.job.data.prepare, expected.named, roots)
            first = plan.sights.get(expected.named)
            if first is not None:
                replace(expected, sights=first).check_unchanged()
            found = _checked(parquet_source(expected.named), expected)
            return found.read_like(expected) if first is None else replace(found.read_like(expected), sights=first)
    raise TypeError(f"a source of an unknown kind: {type(expected).__name__}")


def _converted_alike(seen: Source, expected: ConvertedSource) -> Source:
    found = _checked(seen, expected)
    assert isinstance(found, ConvertedSource), "it has the same fingerprint"
    return found.read_like(expected)


def _checked(seen: Kind, expected: Source) -> Kind:
    """Return the data that this node sees. Raises `DataError` if it is not what the driver saw."""
    if seen.fingerprint != expected.fingerprint:
        found = differences(seen.describe(), expected.describe())
        raise DataError(
            f"this node ({os.uname().nodename}) sees different data than the driver: {'; '.join(found[:3])}",
            where=expected.named,
            expected=f"the data with the fingerprint {expected.fingerprint[:12]}, not {seen.fingerprint[:12]}",
            remedy="put the same files there on every node, or name a shared folder",
        )
    return seen


def _same_tokenizer(rows: Source, expected: TokenizerFile) -> Source:
    """Return the source of the same rows with tokens. Raises `DataError` if the driver has another tokenizer."""
    found = tokenized(rows, expected.path)
    seen = found.tokenizer if isinstance(found, TokenizedSource) else None
    if seen is None or seen.sha256 != expected.sha256:
        raise DataError(
            f"this node ({os.uname().nodename}) has a different tokenizer than the driver",
            where=f"data.tokenizer: {expected.path}",
            expected=f"a file with the SHA-256 {expected.sha256[:12]}" + (f", not {seen.sha256[:12]}" if seen else ""),
            remedy="put the same file there on every node, or name a shared folder",
        )
    return found


def sights_of(plan: Plan) -> dict[str, tuple[Sight, ...]]:
    """Return, for the path of each dataset that is used as it is, what was first seen of its files on this node."""
    parts = [one for data in _data_of(plan) for one in data.parts]
    return {one.named: one.sights for one in parts if isinstance(one, (ParquetSource, WindowsSource))}


def check_data(plan: Plan) -> None:
    """Compare all data files with what this worker first saw of them. Raises `DataChanged` if one has changed."""
    for data in _data_of(plan):
        check_unchanged(data)
        check_windows(data)


def _data_of(plan: Plan) -> list[Source]:
    return [data for data in (plan.data, plan.held_out) if data is not None]
