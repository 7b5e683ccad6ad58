"""Find the Parquet files of a split in a folder that is laid out like a dataset on Hugging Face's hub."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from raytrain_plus.data.paths.files import find_files
from raytrain_plus.errors import DataError
from raytrain_plus.storage.place import Place

_PART = re.compile(r"(?P<split>.+?)-\d{4,5}-of-\d{4,5}(-[0-9a-f]+)?\.parquet")
"""Such as `train-00000-of-00002.parquet`, with a hash in older repositories."""


def only_split(folder: Place) -> Place:
    """Return the path of the only split in a folder: a file, or the pattern of its files.

    Raises `DataError` if there are several splits, or no Parquet files.
    """
    splits = sorted({_split_of(PurePosixPath(name)) for name in find_files(folder).names})
    if len(splits) > 1:
        raise DataError(
            f"holds several splits: {', '.join(splits)}",
            where=str(folder),
            remedy=f"name one of them, such as {folder / splits[-1]}",
        )
    return folder / splits[0]


def _split_of(name: PurePosixPath) -> str:
    part = _PART.fullmatch(name.name)
    return str(name if part is None else name.with_name(f"{part['split']}-*.parquet"))
