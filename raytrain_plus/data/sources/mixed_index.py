"""Index the sources of a mix as one dataset: units, files and row ids are theirs, source by source.

A unit is read by its own source, which may be of any format. The name of a file of source 3 begins with `3/` here and
in the ids of its rows, so that the same file in two sources has two sets of rows.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

from raytrain_plus.data.sources.one_table import check_one_table
from raytrain_plus.data.sources.read_types import united
from raytrain_plus.data.sources.source import Index, check_labels, class_names, read_with
from raytrain_plus.errors import DataError

MIX = "data.mix"
"""What stands for the path of a mix."""


def mixed_index(sources: Sequence[Index]) -> Index:
    """Return the index of a mix of these sources, none of which has a tokenizer.

    Raises `DataError` if they have different columns, or images of different classes.
    """
    names = [f"{MIX}[{number}]: {source.named}" for number, source in enumerate(sources)]
    schema = functools.reduce(lambda one, other: one and united(one, other.schema), sources, sources[0].schema)
    if schema is not None:
        sources = [read_with(source, schema) for source in sources]
    check_one_table(names, [source.schema for source in sources], "sources")
    _check_classes(names, sources)
    for name, source in zip(names[1:], sources[1:], strict=True):
        if not source.older:
            check_labels(sources[0], source, name)
    owned = tuple(replace(source, prefix=f"{number}/") for number, source in enumerate(sources))
    first_files = itertools.accumulate((len(source.files) for source in owned), initial=0)
    shifted = list(zip(first_files, owned, strict=False))
    prints = "".join(f"{source.fingerprint}\0" for source in owned)
    return Index(
        path=MIX,
        root="",
        files=tuple(f"{source.prefix}{file}" for source in owned for file in source.files),
        file_bytes=tuple(itertools.chain.from_iterable(source.file_bytes for source in owned)),
        file_footers=tuple(itertools.chain.from_iterable(source.file_footers for source in owned)),
        file_groups=tuple(itertools.chain.from_iterable(source.file_groups for source in owned)),
        unit_file=tuple(first + file for first, source in shifted for file in source.unit_file),
        unit_group=tuple(itertools.chain.from_iterable(source.unit_group for source in owned)),
        unit_rows=tuple(itertools.chain.from_iterable(source.unit_rows for source in owned)),
        unit_bytes=tuple(itertools.chain.from_iterable(source.unit_bytes for source in owned)),
        schema=owned[0].schema,
        fingerprint=hashlib.sha256(prints.encode()).hexdigest(),
        # Each source has those of its own files.
        file_sights=(),
        sources=owned,
    )


def _check_classes(names: Sequence[str], sources: Sequence[Index]) -> None:
    """Raise `DataError` if two sources of image files number other classes."""
    classes = [(name, found) for name, source in zip(names, sources, strict=True) if (found := class_names(source))]
    for name, found in classes:
        if found != classes[0][1]:
            differing = sorted({*found} ^ {*classes[0][1]})
            raise DataError(
                f"only one of two sources has images of {', '.join(differing[:4])}",
                where=name,
                expected=f"the class folders of {classes[0][0]}: labels number them",
                remedy="put an image of each class into the folders of all sources",
            )
