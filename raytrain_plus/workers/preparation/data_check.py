"""Check that the data on this node is what the driver saw, and that it stays so."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from raytrain_plus.data.dataset import again
from raytrain_plus.data.paths.sight import Sight
from raytrain_plus.data.prepare import prepare
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.mixed_index import mixed_index
from raytrain_plus.data.sources.packing import packed_again
from raytrain_plus.data.sources.source import Index, check_unchanged, with_tokenizer
from raytrain_plus.data.values.tokens import TokenizerFile
from raytrain_plus.errors import DataError
from raytrain_plus.workers.messages import Plan


def same_data(plan: Plan, roots: list[Path], expected: Index) -> Index:
    """Make the data if this node lacks it, compare it with what the driver saw, and return it as this node sees it.

    Raises `DataChanged` if a file has changed since an earlier worker on this node first saw it, `DataError` if the
    data differs from the driver's.
    """
    if expected.sources:
        sources = [same_data(plan, roots, source) for source in expected.sources]
        seen = replace(mixed_index(sources), older=expected.older)
        return seen if expected.tokenizer is None else _same_tokenizer(seen, expected.tokenizer)
    if expected.documents is not None and expected.packed is not None:
        return _checked(packed_again(same_data(plan, roots, expected.documents), expected.packed), expected)
    # Not as the job names it: a path may be relative to the driver's working directory.
    if expected.items is None and (expected.origin is None or expected.origin.format is not None):
        prepare(plan.job.data.prepare, expected.named, roots)
    # Each node converts its own copy of what is not Parquet, and may do so again: other files with the same rows.
    first = plan.sights.get(expected.named) if expected.origin is None and expected.items is None else None
    if first is not None:
        check_unchanged(replace(expected, file_sights=first))
    seen = again(expected, roots, skip=plan.job.data.on_error == "skip")
    if expected.tokenizer is not None:
        seen = _same_tokenizer(seen, expected.tokenizer)
    seen = replace(
        _checked(seen, expected),
        schema=expected.schema,
        read_as=expected.read_as,
        older=expected.older,
        partitions=expected.partitions,
        unit_bytes=expected.unit_bytes,
    )
    return seen if first is None else replace(seen, file_sights=first)


def _checked(seen: Index, expected: Index) -> Index:
    """Return the data that this node sees. Raises `DataError` if it is not what the driver saw."""
    if seen.fingerprint != expected.fingerprint:
        found = differences(seen.to_json(), expected.to_json())
        raise DataError(
            f"this node ({os.uname().nodename}) sees different data than the driver: {'; '.join(found[:3])}",
            where=expected.named,
            expected=f"the data with the fingerprint {expected.fingerprint[:12]}, not {seen.fingerprint[:12]}",
            remedy="put the same files there on every node, or name a shared folder",
        )
    return seen


def _same_tokenizer(rows: Index, expected: TokenizerFile) -> Index:
    """Return the index of the same rows with tokens. Raises `DataError` if the driver has another tokenizer."""
    found = with_tokenizer(rows, expected.path)
    seen = found.tokenizer
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
    return {seen.named: seen.file_sights for seen in _datasets(plan) if seen.origin is None}


def check_data(plan: Plan) -> None:
    """Compare all data files with what this worker first saw of them. Raises `DataChanged` if one has changed."""
    for seen in _datasets(plan):
        check_unchanged(seen)


def _datasets(plan: Plan) -> list[Index]:
    return [one for seen in (plan.index, plan.held_out) if seen is not None for one in seen.sources or (seen,)]
