"""Read image files: each is a row, with its encoded bytes in the column `image` and its class in `label`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.convert.formats.record_blocks import RecordBlock, Records
from raytrain_plus.data.values.images import header_fault
from raytrain_plus.errors import DataError

CLASSES = b"classes"
"""The key of the class names, as a JSON list, in the metadata of the columns: `label` is a position in this list."""


class ImageFiles(Records):
    """Each file has one row, at position 0."""

    def __init__(self, root: Path, files: Sequence[Path], *, check: bool = True) -> None:
        """Number the classes: the sorted folders directly below `root` that hold images, as ImageFolder does.

        Without such folders there are no labels. `check`: refuse a file that does not begin as an image. Raises
        `DataError` for a file beside them.
        """
        self._root, self._check = root, check
        names = sorted({name for file in files if (name := _class_of(root, file)) is not None})
        self._numbers = {name: number for number, name in enumerate(names)}
        beside = next((file for file in files if names and _class_of(root, file) is None), None)
        if beside is not None:
            raise DataError(
                f"the image lies beside folders of images: {', '.join(names[:3])}{', ...' * (len(names) > 3)}",
                where=str(beside),
                expected="each image in the folder of its class, or all images in one folder",
                remedy="move the image into one of the folders",
            )

    @override
    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:
        image, label = pa.field("image", pa.binary()), pa.field("label", pa.int64())
        if not self._numbers:
            return pa.schema([image])
        return pa.schema([image, label], {CLASSES: json.dumps([*self._numbers])})

    @override
    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[RecordBlock]:
        try:
            encoded = file.read_bytes()
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}", where=str(file)) from error
        # What is found before training does not stop it in the middle.
        fault = header_fault(encoded) if self._check else ""
        if fault:
            raise DataError(f"is not a readable image: {fault}", where=str(file), remedy="replace it, or remove it")
        columns = [pa.array([encoded], pa.binary())]
        name = _class_of(self._root, file)
        if name is not None:
            columns.append(pa.array([self._numbers[name]], pa.int64()))
        yield RecordBlock(pa.table(columns, schema=schema), 0, len(encoded))


def _class_of(root: Path, file: Path) -> str | None:
    """Return the first folder of a file below `root`; None if it lies in `root` itself."""
    parts = file.relative_to(root).parts
    return parts[0] if len(parts) > 1 else None
